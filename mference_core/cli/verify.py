"""`mference verify`: every byte of an install against its manifest."""

import shlex
from pathlib import Path

import click
from attrs import asdict

from mference_core.cli.install_progress import emit, watcher
from mference_core.cli.options import install_argument, installed_directory, notice
from mference_core.errors import DigestMismatch, MferenceError
from mference_core.experts.plan import format_bytes


@click.command("verify")
@install_argument
@click.option("--write-receipt", is_flag=True, help="Write the receipt that --verify trusted-receipt asks for.")
@click.option("--expert-digests", is_flag=True, help="Add digests of each expert, and list them in the manifest.")
@click.option("--json", "as_json", is_flag=True, help="One JSON event per line.")
def command(
    directory: Path | None, family: str | None, *, write_receipt: bool, expert_digests: bool, as_json: bool
) -> None:
    """Hash every file of an install, several at a time, and name what is damaged.

    Nothing is written unless asked for. With digests of its experts an install is verified as it is read: a load under
    full-sha256 no longer hashes whole files first, and a repair fetches single experts.
    """
    from mference_core.install.verify import verify_install  # noqa: PLC0415

    path = installed_directory(directory, family)
    watch = watcher(as_json=as_json)
    try:
        with watch.context():
            report = verify_install(path, write_receipt=write_receipt, expert_digests=expert_digests, progress=watch)
    except MferenceError as error:
        if as_json:
            emit("error", message=str(error), kind=type(error).__name__)
        raise
    for damage in report.damages:
        if as_json:
            emit("damage", **{**asdict(damage), "path": str(damage.path)}, message=str(damage))
        else:
            notice(f"damaged: {damage}")
    if report.stale_receipt and not as_json:
        notice("its receipt says otherwise: --verify trusted-receipt would not notice; --write-receipt removes it")
    rate = report.size_bytes / max(report.seconds, 1e-9)
    if as_json:
        values = {**asdict(report), "path": str(report.path), "damages": len(report.damages)}
        emit("damaged" if report.damages else "verified", **values)
    if report.damages:
        raise DigestMismatch(
            what=str(report.path),
            got=f"damaged in {len(report.damages)} place{'s' if len(report.damages) > 1 else ''}",
            expected="what its manifest says",
            remedy=f"run 'mference repair {shlex.quote(str(path))}'",
        )
    if as_json:
        return
    wrote = [word for word, done in (("a receipt", report.receipt), ("digests", report.digests)) if done]
    click.echo(
        f"verified {report.path}: {report.files} files, {format_bytes(report.size_bytes)} "
        f"({report.size_bytes} bytes) in {report.seconds:.1f} s, {format_bytes(int(rate))}/s"
        + (f"; wrote {' and '.join(wrote)}" if wrote else "")
    )
