"""One loaded model: limits, failures that leave no trace, bytes that are what was planned."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import attrs
import mlx.core as mx
import pytest

from mference_core import plugins
from mference_core.engine import (
    Engine,
    LoadOptions,
    context_limit,
    last_rows,
    plan_for,
    resolve_dtype,
)
from mference_core.engine import open_model as open_directory
from mference_core.errors import CannotRewind, ManifestError, NumericError, RequestError, UsageError
from mference_core.experts.plan import parse_bytes
from mference_core.plugins import LoadedFamily
from mference_core.session import Session

OPTIONS = LoadOptions(dtype="float32", slots=4, chunk=8, context=64)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


@pytest.fixture(scope="module")
def family() -> LoadedFamily:
    return plugins.load("gemma4")


@pytest.fixture(scope="module")
def engine(family: LoadedFamily, gemma4_reference: Path) -> Iterator[Engine]:
    with Engine.load(family, gemma4_reference / "mlx", OPTIONS) as loaded:
        yield loaded


def load(family: LoadedFamily, path: Path, **options: Any) -> Engine:
    return Engine.load(family, path, attrs.evolve(OPTIONS, **options))


def same(got: mx.array, want: mx.array) -> bool:
    return bool(mx.array_equal(got, want))


@pytest.fixture
def cold(engine: Engine) -> mx.array:
    """Logits after the prompt on a timeline that nothing has happened to."""
    return engine.session().prefill(PROMPT)


def refused(act: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        act()
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_prompt_is_refused(engine: Engine) -> None:
    refused(lambda: engine.session().prefill([]), RequestError, "prompt is empty; expected at least one token")


@pytest.mark.parametrize("bad", [-1, 256, 10**9])
def test_a_token_beyond_the_vocabulary_is_refused_before_anything_runs(engine: Engine, bad: int) -> None:
    session, seen = engine.session(), list[int]()
    prompt = [*PROMPT, bad]
    refused(
        lambda: session.prefill(prompt, progress=seen.append), RequestError, f"token id is {bad}; expected 0 to 255"
    )
    assert (session.length, seen) == (0, [])


def test_a_prompt_may_fill_the_context_and_not_pass_it(engine: Engine) -> None:
    """Exactly the limit is served; one more is refused with both numbers, and the memory does not change."""
    session = engine.session()
    session.prefill([1] * 60)
    before = session.nbytes
    refused(
        lambda: session.prefill([1] * 5), RequestError, "prompt of 5 tokens after 60 is 65 tokens; expected at most 64"
    )
    assert (session.length, session.nbytes) == (60, before)
    session.prefill([1] * 4)
    assert session.length == 64
    refused(lambda: session.decode(1), RequestError, "is 65 tokens; expected at most 64")
    assert session.nbytes == engine.layout.bytes_at(64)


def test_progress_counts_tokens_chunk_by_chunk(engine: Engine) -> None:
    seen: list[int] = []
    engine.session().prefill(PROMPT, progress=seen.append)
    assert seen == [8, 16, 20]


class Stop:
    """An observer that raises at one layer of one chunk."""

    def __init__(self, error: BaseException, layer: int, chunk: int) -> None:
        self.error, self.layer, self.left = error, layer, chunk

    def __call__(self, index: int, *_: object) -> None:
        if index == self.layer:
            if self.left == 0:
                raise self.error
            self.left -= 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("boom")])
@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_an_interrupted_call_leaves_whole_chunks_or_says_so(
    engine: Engine, cold: mx.array, error: BaseException, layer: int, chunk: int
) -> None:
    """What was taken stays; the rest can be taken again, or the session refuses until it is reset."""
    session = engine.session()
    with pytest.raises(type(error)):
        session.prefill(PROMPT, observe=Stop(error, layer, chunk))
    assert session.tokens == PROMPT[: 8 * chunk]
    assert same(session.prefill(PROMPT[session.length :]), cold)
    session.reset()
    assert same(session.prefill(PROMPT), cold)


def test_interrupted_decoding_goes_on_exactly(engine: Engine) -> None:
    """Past every wrap of the rings: each further token is interrupted once, at another layer."""
    plain, rough = engine.session(), engine.session()
    plain.prefill(PROMPT)
    rough.prefill(PROMPT)
    for step in range(40):
        with pytest.raises(KeyboardInterrupt):
            rough.prefill([step], observe=Stop(KeyboardInterrupt(), step % 4, 0))
        assert same(rough.decode(step), plain.decode(step))


def test_an_interrupted_batch_leaves_every_timeline_as_it_was(engine: Engine) -> None:
    sessions = [engine.session() for _ in range(3)]
    for session, length in zip(sessions, (1, 5, 20), strict=True):
        session.prefill(PROMPT[:length])
    with pytest.raises(KeyboardInterrupt):
        engine.forward(sessions, [[1, 2, 3], [4], [5, 6]], observe=Stop(KeyboardInterrupt(), 2, 0))
    assert [session.length for session in sessions] == [1, 5, 20]
    for session, length in zip(sessions, (1, 5, 20), strict=True):
        again = engine.session()
        again.prefill(PROMPT[:length])
        assert same(session.prefill([7, 8]), again.prefill([7, 8]))


def test_a_broken_session_refuses_until_it_is_reset(
    engine: Engine, cold: mx.array, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a state cannot go back after an interrupt, no later call may pretend that it did."""
    session = engine.session()
    session.prefill(PROMPT[:8])
    saved = session.snapshots()
    kind = type(session.states[0])
    with monkeypatch.context() as patch:
        patch.setattr(kind, "can_truncate", lambda *_: False)
        with pytest.raises(KeyboardInterrupt):
            session.prefill([1], observe=Stop(KeyboardInterrupt(), 1, 0))
    refused(lambda: session.prefill([1]), RequestError, "session is interrupted mid-way")
    session.restore(saved, PROMPT[:8])
    assert same(session.prefill(PROMPT[8:]), cold)


def test_rewinding_beyond_what_is_held_is_refused(engine: Engine) -> None:
    session = engine.session()
    session.prefill(PROMPT)
    for length in (-1, 21):
        refused(lambda length=length: session.rewind(length), CannotRewind, f"session of 20 tokens cut to {length}")
    assert session.length == 20


def poisoned(source: Path, target: Path, tensor: str) -> Path:
    """Copy a float checkpoint with one value of one tensor set to NaN."""
    target.mkdir()
    shutil.copyfile(source / "config.json", target / "config.json")
    weights = cast("dict[str, mx.array]", mx.load(str(source / "model.safetensors")))
    assert tensor in weights
    bad = weights[tensor].reshape(-1)
    bad[0] = mx.array(float("nan"))
    weights[tensor] = bad.reshape(weights[tensor].shape)
    mx.save_safetensors(str(target / "model.safetensors"), weights)
    return target


@pytest.mark.parametrize(
    ("tensor", "where"),
    [
        ("layers.0.layer_scalar", "layer 0"),
        ("layers.2.pre_feedforward_layernorm.weight", "layer 2"),
        ("layers.3.layer_scalar", "layer 3"),
        ("norm.weight", "the head"),
    ],
)
def test_a_value_that_is_not_finite_is_traced_to_its_layer(
    family: LoadedFamily, gemma4_reference: Path, tmp_path: Path, tensor: str, where: str
) -> None:
    path = poisoned(gemma4_reference, tmp_path / "bad", f"model.language_model.{tensor}")
    with load(family, path, slots="resident") as bad:
        error = bad.locate_nonfinite(PROMPT)
    assert isinstance(error, NumericError)
    assert str(error).startswith(f"output of {where} after 20 tokens is not finite")


@pytest.mark.parametrize("slots", [3, 5, "resident"])
@pytest.mark.parametrize("kind", ["float", "mlx"])
def test_bytes_held_are_those_planned(family: LoadedFamily, gemma4_reference: Path, kind: str, slots: Any) -> None:
    """Weights, experts and states, to the byte."""
    path = gemma4_reference / ("mlx" if kind == "mlx" else "")
    with load(family, path, slots=slots) as loaded:
        session = loaded.session()
        session.prefill([1] * 64)
        plan = loaded.memory
        assert loaded.weights.nbytes == plan.resident_bytes
        assert sum(held.source.nbytes for held in loaded.experts if held is not None) == plan.expert_bytes
        assert session.nbytes == plan.state_bytes
        assert plan.resident == (slots == "resident")


def test_memory_does_not_grow_with_tokens(engine: Engine) -> None:
    session = engine.session()
    session.prefill(PROMPT)
    mx.eval(session.decode(1))
    mx.clear_cache()
    before = mx.get_active_memory()
    for token in range(40):
        mx.eval(session.decode(token))
    assert mx.get_active_memory() <= before + (64 << 10)


def test_a_budget_chooses_slots_and_refuses_what_cannot_fit(family: LoadedFamily, gemma4_reference: Path) -> None:
    checkpoint = open_directory(family, gemma4_reference / "mlx", "full-sha256")
    options = attrs.evolve(OPTIONS, slots="auto", memory_bytes=parse_bytes("1GiB"))
    _, generous = plan_for(family, checkpoint, options)
    assert generous.slots_per_layer == 8
    assert generous.resident or generous.mapped
    fixed = generous.total_bytes - generous.expert_bytes
    per_slot = generous.expert_bytes // 8
    _, tight = plan_for(family, checkpoint, attrs.evolve(options, memory_bytes=fixed + 5 * per_slot + per_slot // 2))
    assert (tight.resident, tight.slots_per_layer) == (False, 5)
    small = attrs.evolve(options, memory_bytes=fixed + per_slot - 1)
    refused(lambda: plan_for(family, checkpoint, small), UsageError, "memory budget is")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": "float16"}, "--dtype is 'float16'; expected auto, float32 or bfloat16"),
        ({"context": 0}, "below 1"),
        ({"chunk": 0}, "below 1"),
        ({"context": 5000}, "--max-context is 5000; expected at most 4096 for this model"),
        ({"slots": 0}, "--expert-slots is 0; expected at least 1"),
        ({"kv_dtype": "int8"}, "--kv-dtype is 'int8'; expected auto, float32, bfloat16, float16"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    family: LoadedFamily, gemma4_reference: Path, options: dict[str, Any], text: str
) -> None:
    refused(lambda: load(family, gemma4_reference / "mlx", **options), UsageError, text)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (None, None),
        ({}, None),
        ({"max_position_embeddings": 100}, 100),
        ({"text_config": {"max_position_embeddings": 50}, "max_position_embeddings": 100}, 50),
        ({"text_config": {}, "max_position_embeddings": 100}, 100),
        ({"text_config": 3, "max_position_embeddings": "100"}, None),
        ({"max_position_embeddings": -1}, None),
    ],
)
def test_the_context_limit_is_the_checkpoints(config: dict[str, Any] | None, limit: int | None) -> None:
    assert context_limit(config) == limit


def test_automatic_dtype_is_float32_on_cpus() -> None:
    expected = "float32" if mx.default_device() == mx.Device(mx.cpu) else "bfloat16"
    assert resolve_dtype("auto") == expected


def test_one_token_ahead_equals_one_at_a_time(engine: Engine) -> None:
    """`forward_array` takes a token that is not computed yet."""
    plain, ahead = engine.session(), engine.session()
    logits, early = plain.prefill(PROMPT), ahead.prefill(PROMPT)
    for _ in range(5):
        token = int(cast("float", mx.argmax(logits).item()))
        logits = plain.decode(token)
        early = engine.forward_array(ahead, mx.argmax(early))
        ahead.tokens.append(token)
        assert same(early, logits)
    assert ahead.tokens == plain.tokens


def test_forward_without_logits_only_takes_the_tokens(engine: Engine, cold: mx.array) -> None:
    session = engine.session()
    assert engine.forward([session], [PROMPT[:8]], want_logits=False) is None
    assert same(session.prefill(PROMPT[8:]), cold)


def test_last_rows_of_a_tree_are_each_timelines_own() -> None:
    x = mx.arange(12).reshape(2, 3, 2)
    got = last_rows({"a": x, "b": [x + 100]}, [1, 3])
    assert got["a"].tolist() == [[[0, 1]], [[10, 11]]]
    assert got["b"][0].tolist() == [[[100, 101]], [[110, 111]]]


def test_a_missing_directory_is_one_line(family: LoadedFamily, tmp_path: Path) -> None:
    refused(lambda: load(family, tmp_path / "none"), ManifestError, "is missing; expected a model directory")


def test_a_config_of_another_shape_is_refused_before_weights_are_read(
    family: LoadedFamily, gemma4_reference: Path, tmp_path: Path
) -> None:
    config = json.loads((gemma4_reference / "config.json").read_text("utf-8"))
    config["text_config"]["hidden_size"] = 128
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    shutil.copyfile(gemma4_reference / "model.safetensors", tmp_path / "model.safetensors")
    refused(lambda: load(family, tmp_path), ManifestError, "of shape")


def test_sessions_count_their_own_tokens(engine: Engine) -> None:
    session: Session = engine.session()
    session.prefill(PROMPT[:3])
    twin = session.fork()
    twin.decode(9)
    assert (session.tokens, twin.tokens) == (PROMPT[:3], [*PROMPT[:3], 9])
