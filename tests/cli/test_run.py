"""`mference run`: what it prints, and how it refuses."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

REFERENCE_PROMPTS = (6, 21, 70)


def _golden(reference: Path, length: int) -> dict[str, mx.array]:
    arrays = mx.load(str(reference / "goldens" / f"len{length}.safetensors"))
    assert isinstance(arrays, dict)
    return arrays


def _ids(path: Path, ids: Any) -> Path:
    path.write_text(json.dumps(ids))
    return path


@pytest.mark.parametrize("length", REFERENCE_PROMPTS)
@pytest.mark.parametrize("source", ["", "mlx"])
@pytest.mark.parametrize("slots", ["3", "resident"])
def test_greedy_tokens_are_the_goldens(
    cli: Any, gemma4_reference: Path, tmp_path: Path, length: int, source: str, slots: str
) -> None:
    golden = _golden(gemma4_reference, length)
    prompt = _ids(tmp_path / "ids.json", golden["input_ids"].tolist())
    where = ("--model", gemma4_reference / source, "--tokens", prompt)
    how = ("--temperature", 0, "--max-new", 32, "--dtype", "float32", "--expert-slots", slots, "--json", "--quiet")
    code, out, err = cli("run", *where, *how)
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["token_ids"] == golden["decode.tokens"].tolist()
    assert facts["text"] == ""
    assert facts["finish_reason"] == "length"
    assert (facts["prompt_tokens"], facts["completion_tokens"]) == (length, 32)
    assert facts["expert_hit_rate"] == 1.0 if slots == "resident" else 0 < facts["expert_hit_rate"] < 1
    assert facts["bytes_read"] > 0
    assert facts["peak_memory_bytes"] > 10_000_000


def test_sampling_is_repeatable_by_seed(cli: Any, gemma4_reference: Path, tmp_path: Path) -> None:
    prompt = _ids(tmp_path / "ids.json", [2, 10, 20, 30])

    def run(seed: int) -> list[int]:
        where = ("--model", gemma4_reference, "--tokens", prompt)
        _, out, _ = cli("run", *where, "--temperature", 1, "--seed", seed, "--max-new", 24, "--json", "--quiet")
        ids: list[int] = json.loads(out)["token_ids"]
        return ids

    assert run(1) == run(1)
    assert run(1) != run(2)


REFUSALS = [
    ([], "exactly one", 2),
    (["--prompt", "a", "--prompt-file", "b"], "exactly one", 2),
    (["--prompt", ""], "--prompt is empty", 2),
    (["--prompt-file", "{tmp}/missing.txt"], "missing.txt cannot be read: No such file", 2),
    (["--prompt-file", "{tmp}/latin1.txt"], "latin1.txt is not UTF-8 at byte 0", 2),
    (["--prompt", "a"], "without a tokenizer; use --tokens FILE", 2),
    (["--tokens", "{tmp}/text.json"], "not JSON", 2),
    (["--tokens", "{tmp}/object.json"], "expected a JSON list of integer token ids", 2),
    (["--tokens", "{tmp}/big.json"], "token id is 9999; expected 0 to 255", 2),
    (["--tokens", "{tmp}/empty.json"], "--tokens is empty", 2),
    (["--messages-file", "{tmp}/object.json"], "messages is an object", 2),
    (["--tokens", "{tmp}/ids.json", "--think"], "--think is without messages; expected --messages-file beside it", 2),
    (["--tokens", "{tmp}/ids.json", "--tools-file", "x"], "--tools-file is without messages", 2),
    (["--tokens", "{tmp}/ids.json", "--max-new", "0"], "--max-new is 0", 2),
    (["--tokens", "{tmp}/ids.json", "--temperature", "-1"], "temperature is -1", 2),
    (["--tokens", "{tmp}/ids.json", "--top-p", "0"], "top_p is 0", 2),
    (["--tokens", "{tmp}/ids.json", "--top-k", "-1"], "top_k is -1", 2),
    (["--tokens", "{tmp}/ids.json", "--stop", ""], "a stop string is empty", 2),
    (["--tokens", "{tmp}/ids.json", "--expert-slots", "0"], "--expert-slots is '0'; expected a positive number", 2),
    (["--tokens", "{tmp}/ids.json", "--expert-slots", "many"], "--expert-slots is 'many'", 2),
    (["--tokens", "{tmp}/ids.json", "--memory", "lots"], "memory size is 'lots'", 2),
    (["--tokens", "{tmp}/ids.json", "--memory", "1MiB"], "memory budget is 1.0MiB; expected at least", 2),
    (
        ["--tokens", "{tmp}/ids.json", "--max-context", "3"],
        "prompt is 3 tokens; expected at most 2 in a context of 3",
        2,
    ),
    (["--tokens", "{tmp}/ids.json", "--max-context", "9999"], "expected at most 4096 for this model", 2),
    (["--tokens", "{tmp}/ids.json", "--prefill-chunk", "0"], "--prefill-chunk is '0'", 2),
    (["--tokens", "{tmp}/ids.json", "--dtype", "float16"], "--dtype", 2),
    (["--tokens", "{tmp}/ids.json", "--famly", "x"], "No such option", 2),
]


@pytest.mark.parametrize(("arguments", "text", "code"), REFUSALS, ids=[" ".join(r[0]) for r in REFUSALS])
def test_bad_input_is_one_line(
    cli: Any, gemma4_reference: Path, tmp_path: Path, arguments: list[str], text: str, code: int
) -> None:
    """Every mistake is one line on stderr that says what, with the exit code of its kind; stdout stays empty."""
    (tmp_path / "latin1.txt").write_bytes(b"\xe9t\xe9")
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "object.json").write_text("{}")
    (tmp_path / "big.json").write_text("[9999]")
    (tmp_path / "empty.json").write_text("[]")
    (tmp_path / "ids.json").write_text("[2, 3, 4]")
    filled = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    got, out, err = cli("run", "--model", gemma4_reference, *filled, "--quiet")
    assert (got, out) == (code, "")
    assert text in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_unknown_family_lists_what_is_installed(cli: Any) -> None:
    code, _, err = cli("run", "--family", "gema4", "--prompt", "hi")
    assert code == 2
    assert err.startswith("error: no family 'gema4'; installed: ")


def test_neither_family_nor_model(cli: Any) -> None:
    code, _, err = cli("run", "--prompt", "hi")
    assert code == 2
    assert "give --model DIR or --family NAME" in err


def _copy(reference: Path, target: Path) -> Path:
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        (target / name).write_bytes((reference / "mlx" / name).read_bytes())
    return target


def test_damaged_directories_are_refused(cli: Any, gemma4_reference: Path, tmp_path: Path) -> None:
    """A missing, empty, truncated or contradictory model directory is one line naming the file."""
    ids = _ids(tmp_path / "ids.json", [2, 3])

    def refused(model: Path) -> str:
        code, out, err = cli("run", "--model", model, "--tokens", ids, "--quiet")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert err.startswith("error: ")
        return str(err)

    assert "nowhere" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(tmp_path / "empty")
    short = _copy(gemma4_reference, tmp_path / "short")
    data = (short / "model.safetensors").read_bytes()
    (short / "model.safetensors").write_bytes(data[:-6000])
    assert "model.safetensors" in refused(short)
    odd = _copy(gemma4_reference, tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text())
    config["text_config"]["num_experts"] = 7
    (odd / "config.json").write_text(json.dumps(config))
    assert "experts" in refused(odd) or "router" in refused(odd)
    config["text_config"] |= {"num_experts": 8, "num_kv_shared_layers": 2}
    (odd / "config.json").write_text(json.dumps(config))
    assert "num_kv_shared_layers" in refused(odd)
    (odd / "config.json").write_text("{")
    assert "config.json" in refused(odd)


def test_a_family_that_does_not_read_the_model_is_refused(cli: Any, gemma4_reference: Path, tmp_path: Path) -> None:
    other = _copy(gemma4_reference, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    ids = _ids(tmp_path / "ids.json", [2, 3])
    code, _, err = cli("run", "--model", other, "--tokens", ids)
    assert code == 2
    assert "no accepted family reads model type 'llama'" in err
    code, _, err = cli("run", "--model", other, "--family", "gemma4", "--tokens", ids)
    assert code == 1
    assert "a model with model type 'llama'" in err


def test_the_default_context_is_at_most_the_models_own(cli: Any, gemma4_reference: Path, tmp_path: Path) -> None:
    """A model that holds fewer than 4096 tokens runs without --max-context, to its own limit."""
    small = _copy(gemma4_reference, tmp_path / "small")
    config = json.loads((small / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 8
    (small / "config.json").write_text(json.dumps(config))
    ids = _ids(tmp_path / "ids.json", [2, 3, 4, 5, 6])
    code, out, err = cli("run", "--model", small, "--tokens", ids, "--json", "--quiet")
    assert code == 0, err
    assert len(json.loads(out)["token_ids"]) == 3
