"""States that cannot be rewound: together or alone, after failures, after edits, across the turns of a conversation."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mference_acceptance.arrays import listed
from mference_acceptance.context import Context
from mference_acceptance.runs import complete
from mference_core import plugins
from mference_core.chat import Text, render
from mference_core.conversation import Conversation
from mference_core.engine import Engine
from mference_core.errors import CannotRewind, StreamError
from mference_core.generate import GenerateOptions, Generation
from mference_core.graph import Routing
from mference_core.sampling import SamplingOptions
from mference_core.session import Session
from mference_core.tokens import Tokenizer
from mference_qwen36.chat import chat_format

CHAT = chat_format()
GREEDY = GenerateOptions(max_new=8, sampling=SamplingOptions(temperature=0.0))
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    return Context(family=plugins.load("qwen36"), folder=tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def engine(context: Context) -> Iterator[Engine]:
    with context.engine("float", chunk=16, context=1200) as loaded:
        yield loaded


@cache
def tokenizer() -> Tokenizer:
    """One id per byte below 249 of the 256 the tiny model knows, and the marks at the end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: 256 - len(MARKS)]
    raw = tokenizers.Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(MARKS))
    return Tokenizer.wrap(raw)


def cold(engine: Engine, ids: Sequence[int], count: int = 4) -> tuple[int, ...]:
    return complete(engine.session(), ids, count).tokens


def test_ragged_timelines_advance_as_if_alone(engine: Engine, context: Context) -> None:
    """Prompts of many lengths in one call, padding columns beside each: states and logits are each one's own."""
    ids = context.longest.ids
    prompts = [list(ids[start : start + size]) for start, size in ((0, 1), (3, 16), (9, 5), (20, 16), (40, 2))]
    together = [engine.session() for _ in prompts]
    logits = engine.forward(together, prompts)
    assert logits is not None
    for row, prompt in enumerate(prompts):
        alone = engine.session()
        single = engine.forward([alone], [prompt])
        assert single is not None
        same = mx.array_equal if mx.default_device() == mx.Device(mx.cpu) else mx.allclose
        assert bool(same(logits[row], single[0]))
        for a, b in zip(together[row].states, alone.states, strict=True):
            assert a.length == b.length == len(prompt)
            mine, theirs = a.snapshot().arrays, b.snapshot().arrays
            assert all(bool(same(mine[name], theirs[name])) for name in theirs)


def test_a_cut_is_refused_and_a_snapshot_is_not(engine: Engine, context: Context) -> None:
    ids = list(context.longest.ids)
    session = engine.session()
    session.prefill(ids[:40])
    saved = session.snapshots()
    session.prefill(ids[40:])
    for length in (1, 40, 149):
        with pytest.raises(CannotRewind, match=r"layers \[0, 1, 2\] is unable to rewind so far; restore a snapshot"):
            session.rewind(length)
    assert session.length == 150
    session.restore(saved, ids[:40])
    assert complete(session, ids[40:], 4).tokens == cold(engine, ids)


def edited(turns: Sequence[str]) -> list[int]:
    """Return the prompt of a chat of user turns with a fixed answer between them."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": "ok"}]
    return render(tokenizer(), CHAT, messages[:-1])


def test_an_edited_turn_gives_what_a_cold_run_gives(engine: Engine) -> None:
    """Three turns, the second edited (bug report B13): nothing of the old state may be left."""
    first, second = edited(["abc", "def", "ghi"]), edited(["abc", "dXf", "ghi"])
    session = engine.session()
    for prompt, reused in ((first, 0), (second, 0), (second, 0), ([*second, 65, 66], len(second))):
        assert session.reuse(prompt) == reused
        assert complete(session, prompt[reused:], 4).tokens == cold(engine, prompt)
        del session.tokens[len(prompt) :]
        session = engine.session()
        session.prefill(prompt)


def test_states_of_one_length_are_never_mixed(engine: Engine, context: Context) -> None:
    """After a reuse that had to start again every layer holds the same number of tokens."""
    ids = list(context.longest.ids)
    session = engine.session()
    session.prefill(ids[:50])
    assert session.reuse([*ids[:30], 7, 8]) == 0
    assert {state.length for state in session.states} == {0}
    assert complete(session, ids[:20], 4).tokens == cold(engine, ids[:20])


class Interrupted(Exception):
    """What a test raises in the middle of a call."""


@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("tokens", [1, 16])
def test_an_interrupted_call_leaves_no_trace(engine: Engine, context: Context, layer: int, tokens: int) -> None:
    """Some states have advanced, others not; afterwards the session goes on as if the call had never been."""
    ids = list(context.longest.ids)

    def stop(index: int, x: Any, routing: Routing | None) -> None:
        del x, routing
        if index == layer:
            raise Interrupted

    session, other = engine.session(), engine.session()
    session.prefill(ids[:40])
    other.prefill(ids[:7])
    with pytest.raises(Interrupted):
        engine.forward([session, other], [ids[40 : 40 + tokens]] * 2, observe=stop)
    assert session.length == 40
    assert {state.length for state in session.states} == {40}
    assert complete(session, ids[40:], 4).tokens == cold(engine, ids)
    assert complete(other, ids[7:20], 4).tokens == cold(engine, ids[:20])


def test_a_failed_chunk_keeps_the_chunks_before_it(engine: Engine, context: Context) -> None:
    """Prefill stops in its third chunk: two are held, and the rest can follow."""
    ids, calls = list(context.longest.ids), []

    def stop(index: int, x: Any, routing: Routing | None) -> None:
        del x, routing
        calls.append(index)
        if len(calls) == 10:
            raise StreamError(what="a read", got="broken")

    session = engine.session()
    with pytest.raises(StreamError):
        session.prefill(ids, observe=stop)
    assert session.length == 32
    assert session.tokens == ids[:32]
    assert complete(session, ids[32:], 4).tokens == cold(engine, ids)


def test_generation_closed_early_can_go_on(engine: Engine, context: Context) -> None:
    """With everything resident the next token is queued before this one is read; closing must not lose count."""
    ids = list(context.longest.ids[:30])
    want = cold(engine, ids, 8)
    for taken in (1, 2, 5):
        session = engine.session()
        generation = Generation(session=session, prompt=ids, options=GREEDY)
        stream = generation.steps()
        for _ in range(taken):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert tuple(generation.token_ids) == want[:taken]
        session.recover()
        assert {state.length for state in session.states} == {session.length}
        held = session.length
        assert session.tokens == [*ids, *want][:held]
        rest = complete(session, [*ids, *want][held : len(ids) + taken] or [want[taken]], 2)
        assert rest.tokens[0] in want


def test_a_token_ahead_is_taken_back(engine: Engine, context: Context) -> None:
    """A queued call that never settles is undone by whatever comes next."""
    ids = list(context.longest.ids[:20])
    session = engine.session()
    session.prefill(ids)
    engine.forward_array(session, mx.array(5))
    assert {state.length for state in session.states} == {21}
    assert session.fork().length == 20
    assert {state.length for state in session.states} == {20}
    engine.forward_array(session, mx.array(7))
    assert complete(session, [9], 4).tokens == cold(engine, [*ids, 9])


def answer(conversation: Conversation, text: str) -> str:
    return "".join(event.text for event in conversation.ask(text) if isinstance(event, Text))


PLAIN = """{%- for m in messages -%}
<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n
{%- endfor -%}
{{ '<|im_start|>assistant\n' if add_generation_prompt }}"""


@pytest.mark.parametrize("template", [None, PLAIN], ids=["drops thoughts", "keeps all"])
def test_turns_of_a_conversation_are_not_taken_again(engine: Engine, template: str | None) -> None:
    """The second and third turn compute only what is new, and give what a cold run over the same tokens gives.

    A template that drops thoughts once they are past writes the last answer in two ways; its tokens are in the state
    already and stay as they were.
    """
    words = Tokenizer.wrap(tokenizer().raw, template=template)
    session = engine.session()
    conversation = Conversation(session=session, tokenizer=words, chat=CHAT, options=GREEDY)
    held: list[int] = []
    for turn in ("abc", "de", "f"):
        assert answer(conversation, turn)
        generation = conversation.last
        assert generation is not None
        assert generation.figures.cached_tokens == len(held)
        assert list(generation.prompt[: len(held)]) == held
        assert generation.figures.prompt_tokens > len(held)
        assert tuple(generation.token_ids) == cold(engine, generation.prompt, len(generation.token_ids))
        held = list(session.tokens)
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 3
    again = render(words, CHAT, conversation.messages)
    assert again[: len(held)] != held or template is not None


def test_all_timelines_take_the_bytes_declared(engine: Engine, context: Context) -> None:
    session: Session = engine.session()
    for length in (0, 1, 2, 15, 17, 64, 255, 256, 257, 600):
        ids = (context.longest.ids * 5)[session.length : length]
        if ids:
            session.prefill(ids)
        assert session.nbytes == engine.layout.bytes_at(length)
        assert session.nbytes == sum(array.nbytes for state in session.states for array in state.arrays)
    assert listed(session.states[0].arrays[0])
