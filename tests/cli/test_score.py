"""`mference score`: the numbers other programs are compared with."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

TOLERANCE = 5e-5


def _close(got: mx.array, wanted: mx.array, tolerance: float = TOLERANCE) -> bool:
    return bool((mx.abs(got - wanted) <= tolerance * (1 + mx.abs(wanted))).all())


def _score(cli: Any, reference: Path, tmp_path: Path, *more: object) -> dict[str, mx.array]:
    golden = mx.load(str(reference.parent / "goldens" / "len70.safetensors"))
    assert isinstance(golden, dict)
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(golden["input_ids"].tolist()))
    out = tmp_path / "out.safetensors"
    code, _, err = cli("score", "--model", reference, "--tokens", ids, "--output", out, "--dtype", "float32", *more)
    assert code == 0, err
    got = mx.load(str(out))
    assert isinstance(got, dict)
    return got


@pytest.mark.parametrize("chunk", [1, 16, 100])
def test_details_are_the_goldens(cli: Any, gemma4_reference: Path, tmp_path: Path, chunk: int) -> None:
    """Layers, router ids exactly and in the goldens' order, weights and logits at every position."""
    golden = mx.load(str(gemma4_reference / "goldens" / "len70.safetensors"))
    assert isinstance(golden, dict)
    got = _score(cli, gemma4_reference / "mlx", tmp_path, "--details", "--prefill-chunk", chunk)
    assert _close(got["logits"], golden["logits"])
    for layer in range(4):
        assert _close(got[f"layer.{layer}"], golden[f"layer.{layer}"])
        assert mx.array_equal(got[f"router.{layer}.experts"], golden[f"router.{layer}.experts"])
        assert got[f"router.{layer}.experts"].dtype == mx.int32
        assert _close(got[f"router.{layer}.weights"], golden[f"router.{layer}.weights"], 1e-5)


def test_top_columns_and_the_mass_left(cli: Any, gemma4_reference: Path, tmp_path: Path) -> None:
    whole = _score(cli, gemma4_reference / "mlx", tmp_path)["logits"]
    got = _score(cli, gemma4_reference / "mlx", tmp_path, "--top", 64)
    assert sorted(got) == ["tail_mass", "top_ids", "top_logprobs"]
    logprobs = whole - mx.logsumexp(whole, axis=-1, keepdims=True)
    assert _close(got["top_logprobs"], -mx.sort(-logprobs, axis=-1)[:, :64], 1e-6)
    assert _close(mx.take_along_axis(logprobs, got["top_ids"], axis=-1), got["top_logprobs"], 1e-6)
    assert _close(got["tail_mass"], 1 - mx.exp(got["top_logprobs"]).sum(axis=-1), 1e-5)


def test_bad_outputs_are_refused_before_work(cli: Any, gemma4_reference: Path, tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text("[2, 3]")
    start = ("score", "--model", gemma4_reference, "--tokens", ids, "--output")
    code, _, err = cli(*start, tmp_path / "out.bin")
    assert (code, "ending in .safetensors" in err) == (2, True)
    code, _, err = cli(*start, tmp_path / "no" / "out.safetensors")
    assert (code, "missing; create it first" in err) == (2, True)
    code, _, err = cli(*start, tmp_path / "out.safetensors", "--text", "x")
    assert (code, "exactly one" in err) == (2, True)
    code, _, err = cli(*start, tmp_path / "out.safetensors", "--top", 999)
    assert (code, "--top is 999; expected at most 256" in err) == (2, True)
    assert not (tmp_path / "out.safetensors").exists()
