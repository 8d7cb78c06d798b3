"""What the chat cases work with: a family's dialect, a tokenizer to speak it with, and what an answer decodes to."""

import json
from collections.abc import Sequence
from typing import Any

from attrs import field, frozen

from mference_acceptance.case import CaseFailed, require
from mference_acceptance.context import Context
from mference_core.chat import (
    ChatFormat,
    Malformed,
    Reasoning,
    Text,
    ToolCall,
    check_tools,
    common_prefix,
    load_json,
    render,
)
from mference_core.errors import RequestError
from mference_core.tokens import TOKENIZER_FILE, Tokenizer, tokenizer_directory

USER: dict[str, Any] = {"role": "user", "content": "Go on, please."}
STAND_IN = "none: bytes and the dialect's own control tokens stand in"


@frozen(kw_only=True, eq=False)
class Speech:
    """A dialect with a tokenizer: the demo's or the reference's own, else a stand-in of bytes; `source` says which."""

    chat: ChatFormat
    tokenizer: Tokenizer
    source: str
    stops: dict[int, str]

    @property
    def own(self) -> bool:
        """Whether the tokenizer is the family's own."""
        return self.source != STAND_IN

    def calls_tools(self, tools: Any) -> bool:
        """Say whether the dialect takes tools; one that cannot call them must refuse them."""
        try:
            render(self.tokenizer, self.chat, [USER], tools=tools)
        except RequestError:
            return False
        return True

    def answer(self, message: dict[str, Any], tools: Any) -> "Answer":
        """Return what the model would have written to give this assistant message, as its template has it."""
        asked = render(self.tokenizer, self.chat, [USER], tools=tools)
        whole = render(self.tokenizer, self.chat, [USER, message], tools=tools, add_generation_prompt=False)
        rest = whole[common_prefix(asked, whole) :]
        end = next((at for at, token in enumerate(rest) if token in self.stops), len(rest))
        reason = self.stops[rest[end]] if end < len(rest) else "max_tokens"
        return Answer(prompt=tuple(asked), ids=tuple(rest[:end]), reason=reason)

    def decode(self, ids: Sequence[int], tools: Any, *, prompt: Sequence[int] = (), reason: str) -> "Heard":
        """Push ids through a new decoder; raises `CaseFailed` when it raises or returns something else than events."""
        heard = Heard()
        try:
            decoder = self.chat.decoder(self.tokenizer, check_tools(tools), prompt)
            for token in ids:
                heard.take(decoder.push(token))
            heard.take(decoder.finish(reason))
        except CaseFailed:
            raise
        except Exception as error:
            shown = self.tokenizer.decode(ids, spell_control=True)
            hint = " (if ChatFormat.control names it, the stand-in has it)" if not self.own else ""
            raise CaseFailed(f"the decoder raises {type(error).__name__}: {error}{hint} on {shown[:200]!r}") from error
        return heard


@frozen(kw_only=True)
class Answer:
    """Ids of an answer after a prompt, without the stop that ends it, whose reason is `reason`."""

    prompt: tuple[int, ...] = field(repr=False)
    ids: tuple[int, ...]
    reason: str


@frozen
class Heard:
    """The events of one answer, texts joined."""

    texts: list[str] = field(factory=list)
    thoughts: list[str] = field(factory=list)
    calls: list[ToolCall] = field(factory=list)
    reasons: list[str] = field(factory=list)

    def take(self, events: Any) -> None:
        """Keep events; raises `CaseFailed` for one that is none or makes no sense."""
        for event in events:
            match event:
                case Text(text):
                    self.texts.append(text)
                case Reasoning(text):
                    self.thoughts.append(text)
                case ToolCall():
                    self._call(event)
                case Malformed(reason):
                    whole = isinstance(reason, str) and reason.strip() != "" and "\n" not in reason
                    require(whole, f"the decoder gives {reason!r} as the reason why a call cannot be read")
                    self.reasons.append(reason)
                case _:
                    raise CaseFailed(f"the decoder returns {event!r}, which is no event")

    def _call(self, call: ToolCall) -> None:
        try:
            arguments = load_json(call.arguments)
        except ValueError:
            arguments = None
        require(isinstance(arguments, dict), f"the arguments of a call are {call.arguments!r}, not a JSON object")
        require(bool(call.id), f"a call of {call.name} has no id")
        self.calls.append(call)

    @property
    def text(self) -> str:
        """All visible text."""
        return "".join(self.texts)

    @property
    def named(self) -> list[tuple[str, Any]]:
        """Names and arguments of the calls."""
        return [(call.name, load_json(call.arguments)) for call in self.calls]


def speech(context: Context) -> Speech:
    """Return the family's dialect and a tokenizer for it. Raises `ManifestError` where a stop token is missing."""
    chat = context.family.ask("mference_chat_format")
    require(isinstance(chat, ChatFormat), "mference_chat_format returns no ChatFormat")
    source, tokenizer = STAND_IN, None
    for name, folder in (("demo", context.family.family.demo), ("reference", context.family.family.reference)):
        if folder is not None and (tokenizer_directory(folder) / TOKENIZER_FILE).is_file():
            source, tokenizer = name, Tokenizer.load(tokenizer_directory(folder), control=chat.control)
            break
    if tokenizer is None:
        own = (*chat.control, *chat.stops, *((chat.bos,) if chat.bos else ()), *(chat.reasoning or ()))
        tokenizer = Tokenizer.of_bytes(own)
    return Speech(chat=chat, tokenizer=tokenizer, source=source, stops=chat.stop_ids(tokenizer))


def golden_renders(context: Context) -> list[dict[str, Any]]:
    """Return reference/chat.json: conversations and what the template must make of them."""
    path = context.reference / "chat.json"
    if not path.is_file():
        raise CaseFailed("the reference has no chat.json: a list of {messages, tools?, switches?, text, ids?}")
    entries = json.loads(path.read_text("utf-8"))
    known = {"messages", "tools", "switches", "text", "ids"}
    for entry in entries if isinstance(entries, list) else [None]:
        sound = isinstance(entry, dict) and {"messages", "text"} <= entry.keys() <= known
        require(sound, "chat.json is no list of {messages, tools?, switches?, text, ids?}")
    require(len(entries) > 0, "chat.json has no conversation")
    return list(entries)
