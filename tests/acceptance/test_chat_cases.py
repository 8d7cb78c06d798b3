"""The chat cases fail when a dialect is wrong in what they are about."""

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

import mference_gemma4.chat as dialect
from mference_acceptance.speech import STAND_IN
from mference_core import plugins
from mference_core.chat import ChatFormat, Event, Malformed, Message, StreamDecoder, Text, ToolCall, template
from mference_core.errors import RequestError
from mference_core.plugins import LoadedFamily
from mference_core.tokens import Tokenizer

Broken = Callable[..., LoadedFamily]
Refused = Callable[[str, LoadedFamily], str]
Passed = Callable[[str, LoadedFamily], Mapping[str, Any]]
CASES = ("chat-renders", "control-text", "empty-content", "call-round-trips", "malformed-calls", "random-answers")


def with_chat(broken: Broken, **changes: Any) -> LoadedFamily:
    return broken(mference_chat_format=lambda chat: attrs.evolve(chat, **changes))


def with_content(broken: Broken, change: Callable[[str], str]) -> LoadedFamily:
    """Change the content of every message before it is rendered."""

    def normalize(messages: list[Message], tools: Any) -> tuple[list[Message], Any]:
        checked, offered = dialect.normalize(messages, tools)
        return [{**message, "content": change(message["content"])} for message in checked], offered

    return with_chat(broken, normalize=normalize)


class Wrapped:
    """The dialect's decoder with some of its doings replaced."""

    def __init__(self, tokenizer: Tokenizer, tools: list[dict[str, Any]] | None, prompt: Sequence[int]) -> None:
        self.tokenizer, self.real = tokenizer, dialect.GemmaDecoder(tokenizer, tools, prompt)

    def push(self, token: int) -> list[Event]:
        return self.real.push(token)

    def finish(self, reason: str) -> list[Event]:
        return self.real.finish(reason)


def with_decoder(broken: Broken, decoder: Callable[..., StreamDecoder]) -> LoadedFamily:
    return with_chat(broken, decoder=decoder)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["demo", "stand-in", "without tools"])
def test_sound_dialects_pass(sound: LoadedFamily, broken: Broken, figures: Passed, name: str, kind: str) -> None:
    """With the demo's tokenizer, with none anywhere, and where the dialect refuses tools; the figures say so."""
    family = sound
    if kind == "stand-in":
        family = attrs.evolve(sound, family=attrs.evolve(sound.family, demo=None))
    elif kind == "without tools":
        if name == "chat-renders":
            pytest.skip("its conversations have tools")
        family = with_chat(broken, normalize=no_tools)
    found = figures(name, family)
    assert found["tokenizer"] == (STAND_IN if kind == "stand-in" else "demo")
    if name in ("call-round-trips", "malformed-calls"):
        assert (found.get("tools") == "refused by the dialect") == (kind == "without tools")


def no_tools(messages: list[Message], tools: Any) -> tuple[list[Message], Any]:
    if tools or any(message.get("tool_calls") for message in messages):
        raise RequestError(what="tools", got="given", expected="none")
    return messages, None


def test_every_family_here_has_conversations(figures: Passed) -> None:
    for name in ("gemma4", "qwen36"):
        assert figures("chat-renders", plugins.load(name))["conversations"] >= 5


def test_another_prompt_is_caught(broken: Broken, refused: Refused) -> None:
    """Be it another template of the family's own, or other text put into the checkpoint's."""
    own = dialect.chat_format().template
    assert own.count("<bos>'") == 1
    family = with_chat(broken, template=own.replace("<bos>'", "<bos>\\n'"))
    assert "conversation 0 of chat.json renders '\\n<|turn>user" in refused("chat-renders", family)
    assert "conversation 0" in refused("chat-renders", with_content(broken, str.upper))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stops": {"<|stop|>": "eos"}}, "no control token <|stop|>"),
        ({"stops": {}}, "no stop token"),
        ({"stops": {"<eos>": "tired"}}, "the reason ['tired']"),
        ({"bos": "<s>"}, "no control token <s>"),
    ],
)
def test_tokens_that_do_not_exist_are_caught(
    broken: Broken, refused: Refused, changes: dict[str, Any], reason: str
) -> None:
    assert reason in refused("chat-renders", with_chat(broken, **changes))


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (None, "has no chat.json"),
        ("[]", "no conversation"),
        ('[{"messages": []}]', "is no list of"),
        ('{"a": 1}', "is no list of"),
        (re.compile("2009"), "conversation 0 of chat.json has other ids"),
    ],
)
def test_conversations_must_be_there_and_right(
    sound: LoadedFamily, refused: Refused, tmp_path: Path, write: Any, reason: str
) -> None:
    assert sound.family.reference is not None
    folder = tmp_path / "reference"
    shutil.copytree(sound.family.reference, folder)
    path = folder / "chat.json"
    if write is None:
        path.unlink()
    else:
        path.write_text(write if isinstance(write, str) else write.sub("2010", path.read_text("utf-8")), "utf-8")
    family = attrs.evolve(sound, family=attrs.evolve(sound.family, reference=folder))
    assert reason in refused("chat-renders", family)


def test_text_that_becomes_control_is_caught(
    sound: LoadedFamily, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "_mark", lambda value, _: value)
    assert "spelt in user text changes the prompt's control tokens" in refused("control-text", sound)


def test_text_that_is_cleaned_away_is_caught(broken: Broken, refused: Refused) -> None:
    family = with_content(broken, lambda text: text.replace("<bos>", ""))
    assert "<bos> spelt in user text does not reach the model" in refused("control-text", family)


def shout_none(text: str) -> str:
    return text or "None"


def refuse_nothing(text: str) -> str:
    if not text:
        raise RequestError(what="content", got="empty", expected="text")
    return text


def drop_question(text: str) -> str:
    return text or "(silence)"


@pytest.mark.parametrize(
    ("change", "reason"),
    [(shout_none, "written as None"), (refuse_nothing, "is refused"), (drop_question, "an empty question")],
)
def test_empty_content_that_is_not_empty_is_caught(
    broken: Broken, refused: Refused, change: Callable[[str], str], reason: str
) -> None:
    assert reason in refused("empty-content", with_content(broken, change))


def test_escapes_that_are_not_read_back_are_caught(
    sound: LoadedFamily, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialect, "ESCAPE", re.compile(r"(?!)"))
    assert "is read as" in refused("call-round-trips", sound)


class Splitting(Wrapped):
    """Loses a space that is a token of its own."""

    def push(self, token: int) -> list[Event]:
        return [] if self.tokenizer.spelling(token) == b" " else super().push(token)


class Forgetful(Wrapped):
    """Drops the text beside a call."""

    def push(self, token: int) -> list[Event]:
        return [event for event in super().push(token) if not isinstance(event, Text)]


@pytest.mark.parametrize(("decoder", "reason"), [(Splitting, "shows 'Letme look.'"), (Forgetful, "beside its calls")])
def test_a_decoder_that_minds_how_tokens_are_cut_is_caught(
    broken: Broken, refused: Refused, decoder: Any, reason: str
) -> None:
    assert reason in refused("call-round-trips", with_decoder(broken, decoder))


class Strict(Wrapped):
    """Raises for a call that is not closed."""

    def finish(self, reason: str) -> list[Event]:
        events = super().finish(reason)
        if any(isinstance(event, Malformed) for event in events):
            raise ValueError("not closed")
        return events


class Hasty(Wrapped):
    """Takes what it has of a call for all of it."""

    def finish(self, reason: str) -> list[Event]:
        events = super().finish(reason)
        half = any(isinstance(event, Malformed) for event in events)
        return [ToolCall(id="c", name="do_it", arguments="{}")] if half else events


class Silent(Wrapped):
    """Says why a call cannot be read, and not what it was."""

    def finish(self, reason: str) -> list[Event]:
        return [event for event in super().finish(reason) if not isinstance(event, Text)]


class Reticent(Wrapped):
    """Shows a broken call without the reason."""

    def finish(self, reason: str) -> list[Event]:
        return [event for event in super().finish(reason) if not isinstance(event, Malformed)]


class Trusting(Wrapped):
    """Knows a tool that nobody offered."""

    def __init__(self, tokenizer: Tokenizer, tools: list[dict[str, Any]] | None, prompt: Sequence[int]) -> None:
        known = {"type": "function", "function": {"name": "do_it"}}
        super().__init__(tokenizer, [*(tools or []), known], prompt)


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (Strict, "raises ValueError: not closed"),
        (Hasty, "half a call"),
        (Silent, "not as what was written"),
        (Reticent, "without a reason"),
        (Trusting, "not offered"),
    ],
)
def test_a_decoder_that_fails_on_broken_calls_is_caught(
    broken: Broken, refused: Refused, decoder: Any, reason: str
) -> None:
    assert reason in refused("malformed-calls", with_decoder(broken, decoder))


class Brittle(Wrapped):
    """Raises for an id without a token."""

    def push(self, token: int) -> list[Event]:
        if token >= self.tokenizer.size:
            raise KeyError(token)
        return super().push(token)


class Wordy(Wrapped):
    """Returns text where events belong."""

    def finish(self, reason: str) -> Any:
        del reason
        return ["done"]


class Rambling(Wrapped):
    """Gives a reason of two lines."""

    def finish(self, reason: str) -> list[Event]:
        return [*super().finish(reason), Malformed("one\ntwo")]


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [(Brittle, "raises KeyError"), (Wordy, "no event"), (Rambling, "as the reason why")],
)
def test_a_decoder_that_cannot_bear_any_answer_is_caught(
    broken: Broken, refused: Refused, decoder: Any, reason: str
) -> None:
    assert reason in refused("random-answers", with_decoder(broken, decoder))


def test_a_decoder_in_need_of_undeclared_control_tokens_is_told_so(
    sound: LoadedFamily, broken: Broken, refused: Refused
) -> None:
    family = with_chat(broken, control=())
    family = attrs.evolve(family, family=attrs.evolve(sound.family, demo=None))
    assert isinstance(family.ask("mference_chat_format"), ChatFormat)
    assert "ChatFormat.control" in refused("random-answers", family)
