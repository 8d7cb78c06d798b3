"""One runtime in a process of its own, run by that runtime's Python: reads requests as JSON lines, answers with seconds.

    python worker.py {ours,mlx-lm,llama.cpp} MODEL [--threads N] [--context N]

A request is {"prefill": rows} (a prompt from nothing) or {"prefill": rows, "decode": tokens} (one by one after it).
Only the standard library is imported before the runtime: nothing of this project is there in another's environment.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

Take = Callable[[list[int]], None]


def ours(options: argparse.Namespace) -> tuple[Take, Callable[[], None], int]:
    """Load with this project; experts as the memory plan chooses."""
    mx, engine = import_module("mlx.core"), import_module("mference_core.engine")
    plugins = import_module("mference_core.plugins")
    import_module("mference_kernels.native").set_threads(options.threads)
    load = engine.LoadOptions(context=options.context, chunk=512, slots=options.slots)
    model = engine.Engine.load(plugins.load(options.family), options.model, load)
    session = model.session()

    def take(tokens: list[int]) -> None:
        mx.eval(session.prefill(tokens))

    return take, session.reset, model.graph.vocab_size


def mlx_lm(options: argparse.Namespace) -> tuple[Take, Callable[[], None], int]:
    """Load with mlx-lm, in the precision of the checkpoint."""
    mx, cache = import_module("mlx.core"), import_module("mlx_lm.models.cache")
    model, config = import_module("mlx_lm.utils").load_model(options.model)
    held = [cache.make_prompt_cache(model)]

    def take(tokens: list[int]) -> None:
        mx.eval(model(mx.array(tokens)[None], cache=held[0])[:, -1])

    def reset() -> None:
        held[0] = cache.make_prompt_cache(model)

    return take, reset, config.get("text_config", config)["vocab_size"]


def llama(options: argparse.Namespace) -> tuple[Take, Callable[[], None], int]:
    """Load with llama.cpp's own defaults for the CPU, weights repacked as it likes."""
    api: Any = import_module("llama_cpp")
    api.llama_backend_init()
    sys.stderr.write(api.llama_print_system_info().decode() + "\n")
    model = api.llama_model_load_from_file(str(options.model).encode(), api.llama_model_default_params())
    if not model:
        raise SystemExit("llama.cpp cannot load the model")
    settings = api.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = options.context, 512, 512
    settings.n_threads = settings.n_threads_batch = options.threads
    context = api.llama_init_from_model(model, settings)

    def take(tokens: list[int]) -> None:
        ids = (api.llama_token * len(tokens))(*tokens)  # named, so that it lives as long as the call
        if api.llama_decode(context, api.llama_batch_get_one(ids, len(ids))):
            raise SystemExit("llama.cpp cannot decode")

    def reset() -> None:
        api.llama_memory_clear(api.llama_get_memory(context), True)  # noqa: FBT003 (a C function)

    return take, reset, api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))


KINDS = {"ours": ours, "mlx-lm": mlx_lm, "llama.cpp": llama}


def main() -> None:
    """Load, say so, and serve requests until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--slots", default="auto")
    parser.add_argument("--family", default="gemma4")
    options = parser.parse_args()
    out = sys.stdout
    sys.stdout = sys.stderr  # what a runtime prints is not an answer
    take, reset, vocab_size = KINDS[options.kind](options)
    draw = Random(0)  # noqa: S311 (test data)
    print(json.dumps({"ready": options.kind}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        rows, new = request["prefill"], request.get("decode", 0)
        tokens = [draw.randrange(vocab_size) for _ in range(rows + new)]
        reset()
        start = time.perf_counter()
        take(tokens[:rows])
        prefill = time.perf_counter() - start
        start = time.perf_counter()
        for token in tokens[rows:]:
            take([token])
        decode = time.perf_counter() - start
        print(json.dumps({"seconds": decode if new else prefill}), file=out, flush=True)


if __name__ == "__main__":
    main()
