"""The files that a download fills: what an earlier session left of them is compared in full."""

from pathlib import Path
from random import Random

from mference_core.install.files import TILE_BYTES, OutputFiles
from mference_core.install.ranges import RangePlan
from mference_core.manifest import WEIGHTS_NAME

SIZE = 2 * TILE_BYTES + 1000


def test_an_index_of_many_tiles_is_known_again(tmp_path: Path) -> None:
    image = Random(0).randbytes(SIZE - 10)  # noqa: S311
    plan = RangePlan(ranges=(), outputs={WEIGHTS_NAME: SIZE}, index_sha256="")

    def known_again() -> bool:
        files = OutputFiles(root=tmp_path, plan=plan)
        try:
            return files.reopen(image)
        finally:
            files.close()

    files = OutputFiles(root=tmp_path, plan=plan)
    files.reserve(image)
    files.close()
    assert known_again()
    for place in (0, TILE_BYTES, len(image) - 1):
        with (tmp_path / WEIGHTS_NAME).open("r+b") as file:
            file.seek(place)
            file.write(bytes([image[place] ^ 1]))
        assert not known_again()
        with (tmp_path / WEIGHTS_NAME).open("r+b") as file:
            file.seek(place)
            file.write(image[place : place + 1])
    assert known_again()
