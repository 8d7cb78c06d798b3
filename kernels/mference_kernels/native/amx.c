#if defined(__x86_64__)
#include "avx512.h"
static int supported(void) { return 0; }
const mf_variant mf_amx = {"amx", supported, mf_avx512_prepare, mf_avx512_product, mf_avx512_activate, mf_avx512_attend};
#endif
