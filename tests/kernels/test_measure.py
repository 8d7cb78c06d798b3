"""The report on speed: every part runs and says numbers; what they are is the machine's business."""

import re

import pytest

from mference_kernels import measure, native


@pytest.mark.usefixtures("restored")
def test_every_part_reports_every_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ROUNDS", 1)
    sizes = measure.Sizes(hidden=128, inner=64, experts=4, chosen=2, mib=1, heads=2, head_dim=16)
    lines = list(measure.report(sizes))
    assert len(lines) == 5 + len(native.variants()) * (4 + 3 + 1 + 2)
    for line in lines:
        if line.startswith("  "):
            assert re.search(r"\d+\.\d+", line)
            assert any(f" {variant} " in line for variant in native.variants())
