"""Timelines that are used again: always what a cold run gives, and never more reuse than there was."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mference_core import plugins
from mference_core.engine import Engine, LoadOptions
from mference_core.errors import CannotRewind, RequestError
from mference_core.kv import Compressed, KVLayout, Linear
from mference_core.session import Session
from mference_core.states import CompressedState

CHUNK, WINDOW = 5, 16
PROMPT = [(37 * i + 11) % 251 for i in range(60)]
OLDEST = 60 - (WINDOW + CHUNK) + WINDOW - 1
"""Shortest length a ring of window and chunk can go back to after 60 tokens: 54."""


@pytest.fixture(scope="module")
def engine(gemma4_reference: Path) -> Iterator[Engine]:
    options = LoadOptions(dtype="float32", slots="resident", chunk=CHUNK, context=128)
    with Engine.load(plugins.load("gemma4"), gemma4_reference / "mlx", options) as loaded:
        yield loaded


def equal(got: mx.array, want: mx.array) -> bool:
    if mx.default_device() == mx.Device(mx.cpu):
        return bool(mx.array_equal(got, want))
    return bool(mx.allclose(got, want, rtol=5e-5, atol=5e-5))


def cold(engine: Engine, prompt: list[int]) -> mx.array:
    return engine.session().prefill(prompt)


def serve(session: Session, prompt: list[int]) -> tuple[int, mx.array]:
    """Take a prompt on a used timeline; return the tokens reused and the logits."""
    cached = session.reuse(prompt)
    assert session.tokens == prompt[:cached]
    return cached, session.prefill(prompt[cached:])


def changed(at: int, length: int = 60) -> list[int]:
    """Return the prompt with another token at one place, perhaps longer or shorter."""
    other = (PROMPT * 2)[:length]
    return [*other[:at], (other[at] + 1) % 251, *other[at + 1 :]]


@pytest.mark.parametrize(
    ("prompt", "cached"),
    [
        (PROMPT, 59),
        ([*PROMPT, 5, 6, 7], 60),
        (PROMPT[:58], 57),
        (changed(57), 57),
        (changed(OLDEST), OLDEST),
        (changed(OLDEST - 1), 0),
        (changed(15), 0),
        (changed(3), 0),
        (changed(0), 0),
        (PROMPT[:20], 0),
        ([9], 0),
    ],
)
def test_a_used_timeline_serves_any_prompt_as_a_cold_one(engine: Engine, prompt: list[int], cached: int) -> None:
    """The same prompt, a longer one, one that differs early or late: what rings have lost is not reused."""
    session = engine.session()
    session.prefill(PROMPT)
    got, logits = serve(session, prompt)
    assert got == cached
    assert equal(logits, cold(engine, prompt))
    assert session.tokens == prompt
    assert equal(session.decode(1), cold(engine, [*prompt, 1]))


def test_a_short_timeline_is_reused_at_any_length(engine: Engine) -> None:
    """Before its rings have wrapped nothing is lost."""
    for at in range(1, 20, 3):
        session = engine.session()
        session.prefill(PROMPT[:20])
        cached, logits = serve(session, changed(at, 20))
        assert cached == at
        assert equal(logits, cold(engine, changed(at, 20)))


@given(
    turns=st.lists(
        st.tuples(st.integers(0, 80), st.integers(0, 80), st.integers(1, 12), st.integers(0, 9)), min_size=1, max_size=6
    )
)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_chats_with_edits_stay_exact(engine: Engine, turns: list[tuple[int, int, int, int]]) -> None:
    """Each turn keeps some of what was said, appends to it, and some tokens are generated."""
    session, said = engine.session(), PROMPT[:3]
    for keep, salt, count, generated in turns:
        said = [*said[: max(1, keep)], *((salt + 7 * i) % 251 for i in range(count))][:110]
        _, logits = serve(session, said)
        assert equal(logits, cold(engine, said))
        for token in range(min(generated, 128 - len(said))):
            session.decode(token)
            said = [*said, token]
        assert session.nbytes <= engine.layout.bytes_at(128)


def test_rewinding_says_which_layers_cannot(engine: Engine) -> None:
    """Sliding layers have lost what full layers still hold; refused, nothing has changed."""
    session = engine.session()
    session.prefill(PROMPT)
    with pytest.raises(CannotRewind, match=r"session of 60 tokens cut to 30: layers \[0, 2\] is unable to rewind"):
        session.rewind(30)
    assert [state.length for state in session.states] == [60] * 4
    assert equal(session.decode(4), cold(engine, [*PROMPT, 4]))


def test_forks_share_nothing(engine: Engine) -> None:
    trunk = engine.session()
    trunk.prefill(PROMPT[:40])
    forks = [trunk.fork() for _ in range(3)]
    for turn in range(12):
        for branch, fork in enumerate(forks):
            fork.decode((branch + 3 * turn) % 251)
    for branch, fork in enumerate(forks):
        said = PROMPT[:40] + [(branch + 3 * turn) % 251 for turn in range(12)]
        assert fork.tokens == said
        assert equal(fork.decode(7), cold(engine, [*said, 7]))
    assert equal(trunk.prefill(PROMPT[40:]), cold(engine, PROMPT))


def test_an_ahead_token_that_is_never_settled_is_forgotten(engine: Engine) -> None:
    """Generation asks for one token more than it keeps: the next call starts from what was kept."""
    session = engine.session()
    session.prefill(PROMPT)
    mx.eval(engine.forward_array(session, mx.array(5)))
    assert session.length == 60
    assert equal(session.prefill([8]), cold(engine, [*PROMPT, 8]))


def test_a_state_half_way_through_a_token_is_taken_back() -> None:
    """An interrupt between two writes of one layer leaves its length as it was, not what it holds."""
    pooled = Compressed(entries=Linear(rows={"e": (1, 2)}, dtype="float32"), rate=2, open_rows={"t": 1})
    layout = KVLayout(layers=(pooled,), context=16)
    session = Session(engine=cast("Engine", SimpleNamespace(layout=layout)))
    state = cast("CompressedState", session.states[0])
    session.begin()
    state.take(t=mx.ones((3, 1)))
    session.recover()
    assert (state.length, state.entries.length, state.open_rows["t"].tolist()) == (0, 0, [[0.0]])


def test_reset_forgets_everything(engine: Engine) -> None:
    session = engine.session()
    session.prefill(PROMPT)
    session.reset()
    assert (session.length, session.tokens) == (0, [])
    assert all(state.length == 0 for state in session.states)
    assert equal(session.prefill(PROMPT[:7]), cold(engine, PROMPT[:7]))


@pytest.mark.parametrize("call", [lambda s: s.prefill([1] * 200), lambda s: s.prefill([]), lambda s: s.decode(-1)])
def test_a_refused_call_changes_nothing(engine: Engine, call: Any) -> None:
    session = engine.session()
    session.prefill(PROMPT)
    before = session.nbytes
    with pytest.raises(RequestError):
        call(session)
    assert (session.tokens, session.nbytes) == (PROMPT, before)
    assert equal(session.decode(4), cold(engine, [*PROMPT, 4]))
