#include "mference.h"
#if defined(MF_X86)
#include "avx512.h"
static int supported(void) { return 0; }
const mf_variant mf_amx = {"amx", supported, mf_avx512_prepare, mf_avx512_many, mf_avx512_activate, mf_avx512_attend};
#endif
