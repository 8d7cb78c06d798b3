"""Checkpoints of real size and any family, written from its contract and install plan: seeded codes, sane scales.

`python -m mference_core.testing.synthetic FAMILY OUTPUT [--layers N] [--mlx] [--seed N] [--routed-bits N]`

The install and the MLX directory of one seed hold the same values: installing the second gives the first, byte for
byte. What a family quantises, and how, is read from its reference checkpoint.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic

from mference_core import plugins
from mference_core.arch import Arch, encode_arch
from mference_core.checkpoint import CONFIG_NAME
from mference_core.errors import MferenceError
from mference_core.gturbo.model import EXPERTS_DIR
from mference_core.gturbo.receipt import encode_receipt, make_receipt
from mference_core.install.finish import TOKENIZER_NAMES
from mference_core.install.report import InstallProgress, InstallReport, Progress
from mference_core.install.transaction import abandon, check_disk, install_errors, locked, prepare, promote
from mference_core.manifest import (
    LAYOUT_NAME,
    MANIFEST_NAME,
    RECEIPT_NAME,
    WEIGHTS_NAME,
    Manifest,
    encode_manifest,
    read_manifest,
)
from mference_core.plugins import LoadedFamily
from mference_core.tensors import ExpertLayer
from mference_core.testing.filler import Filler
from mference_core.testing.mlx_directory import write_synthetic_mlx
from mference_core.testing.plan import Synthetic, part_pieces, plan_synthetic, weight_parts
from mference_core.testing.writing import Piece, Writer

__all__ = ["Synthetic", "plan_synthetic", "write_synthetic", "write_synthetic_mlx"]


def write_synthetic(
    family: LoadedFamily,
    output: Path,
    *,
    arch: Arch | None = None,
    layers: int | None = None,
    seed: int = 0,
    routed_bits: int | None = None,
    tokenizer: Path | None = None,
    progress: Progress | None = None,
) -> InstallReport:
    """Write an install; arguments as for `plan_synthetic`, `tokenizer` a directory whose tokenizer files are copied.

    Memory stays below 64 MiB whatever the size. Raises: UsageError, ManifestError, InstallError; nothing appears at
    `output` before it is complete.
    """
    started = monotonic()
    made = plan_synthetic(family, arch=arch, layers=layers, routed_bits=routed_bits)
    outputs, filler = made.outputs, Filler(seed)
    extra = [tokenizer / name for name in (CONFIG_NAME, *TOKENIZER_NAMES)] if tokenizer else []
    with locked(output) as target, install_errors(target.shown):
        check_disk(target, outputs.total_bytes)
        prepare(target, overwrite=False)
        try:
            writer = Writer(root=target.partial, total_bytes=outputs.total_bytes, progress=progress)
            writer.write(WEIGHTS_NAME, _residents(made, filler))
            for number, layer in sorted(made.checkpoint.experts.items()):
                name = f"{EXPERTS_DIR}/{outputs.layout.layers[number].file}"
                writer.write(name, _blobs(filler, layer, outputs.layout.expert_stride))
            writer.write(LAYOUT_NAME, [outputs.layout_image])
            for path in extra:
                if path.is_file():
                    writer.write(f"tokenizer/{path.name}", [path.read_bytes()])
            manifest = encode_manifest(_manifest(made, writer, seed))
            receipt = encode_receipt(make_receipt(read_manifest(manifest), target.shown))
            (target.partial / MANIFEST_NAME).write_bytes(manifest)
            (target.partial / RECEIPT_NAME).write_bytes(receipt)
            promote(target, overwrite=False)
        except BaseException:
            abandon(target)
            raise
    size = writer.done_bytes + len(manifest) + len(receipt)
    return InstallReport(
        path=target.shown,
        model_id=made.model_id,
        files=len(writer.files) + 2,
        size_bytes=size,
        resident_tensors=len(made.checkpoint.weights),
        routed_layers=len(made.checkpoint.experts),
        dropped={},
        seconds=monotonic() - started,
    )


def _residents(made: Synthetic, filler: Filler) -> Iterator[Piece]:
    yield made.outputs.index_image
    for weight in made.outputs.weights:
        for pieces in weight_parts(made, filler, weight).values():
            yield from pieces()


def _blobs(filler: Filler, layer: ExpertLayer, stride_bytes: int) -> Iterator[Piece]:
    padding = bytes(stride_bytes - layer.expert_bytes)
    for expert in range(layer.count):
        for part in layer.parts:
            yield from part_pieces(filler, layer, expert, part.name)
        yield padding


def _manifest(made: Synthetic, writer: Writer, seed: int) -> Manifest:
    layout = made.outputs.layout
    return Manifest(
        arch=encode_arch(made.arch),
        files=dict(writer.files),
        experts_per_layer=layout.experts_per_layer,
        num_layers=len(layout.layers),
        expert_stride=layout.expert_stride,
        quant=made.outputs.quant,
        model_id=made.model_id,
        extra={"synthetic": {"seed": seed}},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="mference_core.testing.synthetic", description="Write a synthetic model.")
    parser.add_argument("family", help="an installed family, accepted or not")
    parser.add_argument("output", type=Path, help="the directory to write")
    parser.add_argument("--layers", type=int, help="keep the first N layers only")
    parser.add_argument("--mlx", action="store_true", help="write an MLX directory, a source of installs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--routed-bits", type=int, choices=[2, 4, 8])
    options = parser.parse_args(arguments)
    write = write_synthetic_mlx if options.mlx else write_synthetic
    try:
        report = write(
            plugins.load(options.family),
            options.output,
            layers=options.layers,
            seed=options.seed,
            routed_bits=options.routed_bits,
            progress=_show if sys.stderr.isatty() else None,
        )
    except MferenceError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 (this is a command)
        return error.exit_code
    rate = report.size_bytes / report.seconds / 1e9
    print(f"{report.path}: {report.size_bytes} bytes in {report.seconds:.1f} s, {rate:.2f} GB/s")  # noqa: T201
    return 0


def _show(done: InstallProgress) -> None:
    print(f"\r{done.done_bytes / max(1, done.total_bytes):4.0%} {done.file:40}", end="", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
