"""The Gemma 4 chat dialect: stops, template, hidden thoughts and tool calls.

Unusual: strings in tool calls stand between `<|"|>` control tokens, everything else is written bare; a tool result
goes on in the model turn of its call, so `<|tool_response>` ends generation like a stop token. The template's head
comment has the grammar of a conversation; a call is read by these rules:

    call   = call:NAME OBJECT               NAME is letters, digits, _ and one of the request's tools
    OBJECT = { KEY : VALUE , ... }          KEY is letters, digits, _ - . $ and not repeated
    VALUE  = OBJECT | [ VALUE , ... ] | STRING | true | false | null | number as in JSON
    STRING = <|"|> characters <|"|> | a JSON string

White space may stand between any two of these, nothing after the call. Between the marks JSON escapes are read (the
template writes a backslash twice) and a backslash that begins none is itself. A bare word of another kind (`02134`,
`False`) is read only if the tool's schema says what it is. What cannot be read is shown as text, with the reason.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from mference_core.chat import (
    MAX_DEPTH,
    NUMBER,
    ChatFormat,
    Event,
    Malformed,
    Message,
    Reasoning,
    Text,
    ToolCall,
    branches_of,
    dump_json,
    exact_number,
    fit,
    inner_schema,
    types_of,
)
from mference_core.errors import RequestError
from mference_core.tokens import Tokenizer
from mference_gemma4.call_grammar import write_calls

MAX_CALL_BYTES = 256 << 10
MAX_LABEL_CHARACTERS = 64
VISIBLE_CHANNELS = ("final", "answer")
STRING_MARK = '<|"|>'
STOPS = {"<eos>": "eos", "<turn|>": "end_of_turn", "<|tool_response>": "tool_calls"}
TURNS = ("<bos>", "<|turn>", "<|channel>", "<channel|>", "<|think|>")
TOOLS = ("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<tool_response|>", STRING_MARK)
EFFORTS = {"none": False, "low": True, "medium": True, "high": True}  # thinking is on or off, not graded

NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
KEY = re.compile(r"[A-Za-z0-9_.$-]+")
WORD = re.compile(r"[A-Za-z0-9_.+-]+")
SPACE = re.compile(r"[ \t\r\n]*")
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u[0-9A-Fa-f]{4}|.)", re.DOTALL)
ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
CONSTANTS = {"true": True, "false": False, "null": None}


class Unreadable(Exception):
    """Why a text is not a call; caught in this module."""


def _escape(found: re.Match[str]) -> str:
    """Return what an escape in a marked string stands for."""
    text = found.group()
    if text[1] != "u":
        return ESCAPES.get(text[1], text)
    if len(text) == 2:
        raise Unreadable("a \\u escape has no four digits")
    try:
        value = str(json.loads(f'"{text}"'))
    except ValueError as error:
        raise Unreadable("a \\u escape has no four digits") from error
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise Unreadable("an escape is half a surrogate pair")
    return value


class CallReader:
    """Reads one call; `mark` is what stands for the string mark in `text`, `tools` maps names to parameter schemas."""

    def __init__(self, text: str, tools: Mapping[str, Any], mark: str = STRING_MARK) -> None:
        self.text, self.tools, self.mark = text, tools, mark
        self.at = 0

    def read(self) -> tuple[str, dict[str, Any]]:
        """Return the tool's name and its arguments. Raises `Unreadable`."""
        self._take("call:", "a call begins with 'call:'")
        name = self._match(NAME, "a call has a tool name")
        if name not in self.tools:
            raise Unreadable(f"unknown tool {name!r}")
        arguments = self._object(self.tools[name], 0)
        self._skip()
        if self.at < len(self.text):
            raise Unreadable("text follows the call")
        return name, arguments

    def _skip(self) -> None:
        found = SPACE.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def _peek(self, token: str) -> bool:
        self._skip()
        return self.text.startswith(token, self.at)

    def _take(self, token: str, rule: str) -> None:
        if not self._peek(token):
            raise Unreadable(f"{rule} (character {self.at})")
        self.at += len(token)

    def _match(self, pattern: re.Pattern[str], rule: str) -> str:
        self._skip()
        found = pattern.match(self.text, self.at)
        if not found:
            raise Unreadable(f"{rule} (character {self.at})")
        self.at = found.end()
        return found.group()

    def _object(self, schema: Any, depth: int) -> dict[str, Any]:
        self._take("{", "an object begins with '{'")
        result: dict[str, Any] = {}
        while not (self._peek("}") and not result):
            key = self._match(KEY, "a key is letters, digits, '_', '-', '.' or '$'")
            if key in result:
                raise Unreadable(f"key {key!r} is repeated")
            self._take(":", "a key is followed by ':'")
            result[key] = self._value(inner_schema(schema, key), depth + 1)
            if not self._peek(","):
                break
            self.at += 1
        self._take("}", "an object ends with '}'")
        return result

    def _array(self, schema: Any, depth: int) -> list[Any]:
        self._take("[", "an array begins with '['")
        result: list[Any] = []
        while not (self._peek("]") and not result):
            result.append(self._value(inner_schema(schema), depth + 1))
            if not self._peek(","):
                break
            self.at += 1
        self._take("]", "an array ends with ']'")
        return result

    def _value(self, schema: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise Unreadable(f"nested more than {MAX_DEPTH} levels deep")
        if self._peek("{") or self._peek("["):
            value = self._object(schema, depth) if self._peek("{") else self._array(schema, depth)
            return fit(value, dump_json(value), schema)
        if self._peek(self.mark) or self._peek('"'):
            text = self._marked() if self._peek(self.mark) else self._quoted()
            return fit(text, text, schema)
        return self._word(schema)

    def _marked(self) -> str:
        start = self.at + len(self.mark)
        end = self.text.find(self.mark, start)
        if end < 0:
            raise Unreadable("a string is not closed")
        self.at = end + len(self.mark)
        return ESCAPE.sub(_escape, self.text[start:end])

    def _quoted(self) -> str:
        text = self._match(QUOTED, "a string is not closed")
        try:
            value = str(json.loads(text, strict=False))
        except ValueError as error:
            raise Unreadable("a string has a bad escape") from error
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise Unreadable("an escape is half a surrogate pair")
        return value

    def _word(self, schema: Any) -> Any:
        word = self._match(WORD, "a value is missing")
        if word in CONSTANTS:
            return fit(CONSTANTS[word], word, schema)
        if NUMBER.fullmatch(word):
            try:
                return fit(exact_number(word), word, schema)
            except ValueError as error:
                raise Unreadable("a number is too large") from error
        value = fit(word, word, schema)
        if isinstance(value, str) and "string" not in types_of(schema):
            raise Unreadable(f"{word!r} is no value (character {self.at - len(word)})")
        return value


def parse_call(text: str, tools: Mapping[str, Any], mark: str = STRING_MARK) -> tuple[str, str]:
    """Return the name and the arguments (compact JSON, keys sorted) of a call. Raises `Unreadable` with the reason."""
    name, arguments = CallReader(text, tools, mark).read()
    return name, dump_json(arguments)


class GemmaDecoder:
    """The events of one answer: channels shown or hidden by label, calls read when they close."""

    def __init__(self, tokenizer: Tokenizer, tools: list[dict[str, Any]] | None, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.tools = {t["function"]["name"]: t["function"].get("parameters") for t in tools or ()}
        self._tried = False  # whether a call was written, readable or not
        self._channel, self._no_channel, self._call, self._no_call, self._mark = map(
            tokenizer.id_of, ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", STRING_MARK)
        )
        self._text = tokenizer.detokenizer(first=False)
        self._hidden = False
        self._label: str | None = None  # text of a channel label so far, None outside one
        self._body: list[int] | None = None  # ids of a call so far, None outside one
        self._size = 0
        edges = (self._channel, self._no_channel, tokenizer.id_of("<turn|>"))
        last = next((n for n in range(len(prompt) - 1, -1, -1) if prompt[n] in edges), None)
        if last is not None and prompt[last] == self._channel:
            for token in prompt[last:]:
                self.push(token)  # the prompt ends inside a channel: its label decides, its text was already said

    def push(self, token: int) -> list[Event]:
        """Return what `token` completes."""
        if self._body is not None:
            return self._in_call(token, self._body)
        if token not in (self._channel, self._no_channel, self._call):
            return self._shown(self._text.push(token))
        left = self._shown(self._text.flush())
        self._hidden, self._label = False, None  # a label that no newline ended says nothing
        if token == self._channel:
            self._label = ""
        elif token == self._call:
            self._body, self._size, self._tried = [], 0, True
        return left

    def finish(self, reason: str) -> list[Event]:
        """Return what is left: an unfinished character, or a call that was cut off, as text."""
        events = self._shown(self._text.flush())
        if self._body is not None:
            body, self._body = self._body, None
            events += self._unread("the call is not closed", body, closed=False)
        elif reason == "tool_calls" and not self._tried:
            events.append(Malformed("the model waits for a tool result without a call"))
        return events

    def _shown(self, text: str) -> list[Event]:
        if self._label is not None:
            self._label += text
            label, newline, text = self._label.partition("\n")
            if not newline and len(label) <= MAX_LABEL_CHARACTERS:
                return []
            text = text if newline else label
            self._label, self._hidden = None, label.strip() not in VISIBLE_CHANNELS
        return [Reasoning(text) if self._hidden else Text(text)] if text else []

    def _in_call(self, token: int, body: list[int]) -> list[Event]:
        if token != self._no_call:
            body.append(token)
            self._size += len(self.tokenizer.spelling(token))
            if self._size <= MAX_CALL_BYTES:
                return []
            self._body = None
            return self._unread(f"the call is longer than {MAX_CALL_BYTES} bytes", body, closed=False)
        self._body = None
        try:
            name, arguments = parse_call(*self._readable(body))
        except Unreadable as reason:
            return self._unread(str(reason), body, closed=True)
        return [ToolCall(id=f"call_{secrets.token_hex(12)}", name=name, arguments=arguments)]

    def _readable(self, body: list[int]) -> tuple[str, Mapping[str, Any], str]:
        """Return the text of a call with its string marks as one character that the text does not hold."""
        chunks: list[list[int]] = [[]]
        for token in body:
            if token == self._mark:
                chunks.append([])
            else:
                chunks[-1].append(token)
        texts = [self._spell(chunk) for chunk in chunks]
        used = {letter for text in texts for letter in text}
        mark = next(chr(code) for code in range(0xE000, 0x110000) if chr(code) not in used)
        return mark.join(texts), self.tools, mark

    def _spell(self, ids: Sequence[int]) -> str:
        stream = self.tokenizer.detokenizer(spell_control=True, first=False)
        return "".join([stream.push(token) for token in ids] + [stream.flush()])

    def _unread(self, reason: str, body: list[int], *, closed: bool) -> list[Event]:
        text = "<|tool_call>" + self._spell(body) + ("<tool_call|>" if closed else "")
        return [Malformed(reason), Text(text)]


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping)


def plain_schema(schema: Any) -> dict[str, Any]:
    """Return a schema whose every property has one type by name, as the dialect's declarations need it.

    Of several types the first that is not null counts, of alternatives the first that has one; `allOf` branches are
    joined, the earlier wins; keys beside the alternatives fill what the chosen one leaves open. Without a type it is
    an object if it has properties, else a string.
    """
    result = dict(schema) if isinstance(schema, Mapping) else {}
    alternatives = [plain_schema(b) for b in branches_of(result, "anyOf", "oneOf") if isinstance(b, Mapping)]
    chosen = [b for b in alternatives if b["type"] != "null"] or alternatives
    joined: dict[str, Any] = {}
    own = {key: value for key, value in result.items() if key not in ("anyOf", "oneOf", "allOf")}
    for part in filter(_is_schema, [*branches_of(result, "allOf"), *chosen[:1], own]):
        if isinstance(part.get("properties"), Mapping) and isinstance(joined.get("properties"), Mapping):
            joined["properties"] = {**part["properties"], **joined["properties"]}
        joined = {**part, **joined}
    kind = joined.get("type")
    if isinstance(kind, list):
        names = [name for name in kind if isinstance(name, str)]
        kind = next((name for name in names if name != "null"), names[0] if names else None)
    joined["type"] = kind if isinstance(kind, str) else "object" if "properties" in joined else "string"
    if isinstance(joined.get("properties"), Mapping):
        joined["properties"] = {name: plain_schema(inner) for name, inner in joined["properties"].items()}
    if "items" in joined:
        joined["items"] = plain_schema(joined["items"])
    return joined


def _check_keys(what: str, value: Any) -> None:
    """Raise `RequestError` for an object key the dialect cannot write."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not KEY.fullmatch(key):
                raise RequestError(
                    what=f"a key of {what}", got=repr(key), expected="letters, digits, '_', '-', '.' or '$'"
                )
            _check_keys(what, inner)
    elif isinstance(value, list):
        for inner in value:
            _check_keys(what, inner)


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise RequestError(what="a tool name", got=repr(name), expected="letters, digits and '_' for this family")


def _check_properties(what: str, schema: Any) -> None:
    if isinstance(schema, Mapping):
        properties = schema.get("properties", {})
        if not isinstance(properties, Mapping):
            raise RequestError(what=f"properties in {what}", got=repr(properties), expected="an object")
        _check_keys(what, dict.fromkeys(properties))
        for inner in (*properties.values(), schema.get("items")):
            _check_properties(what, inner)


def normalize(
    messages: list[Message], tools: list[dict[str, Any]] | None
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """Check that calls and tools can be written in this dialect, and give every property one type."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            _check_name(call["function"]["name"])
            _check_keys(f"the arguments of {call['function']['name']}", call["function"]["arguments"])
    plain = []
    for tool in tools or ():
        function = dict(tool["function"])
        _check_name(function["name"])
        if "parameters" in function:
            function["parameters"] = plain_schema(function["parameters"])
            _check_properties(f"the parameters of {function['name']}", function["parameters"])
        plain.append({"type": "function", "function": function})
    return messages, plain or None


def chat_format() -> ChatFormat:
    """Return the dialect."""
    return ChatFormat(
        control=(*STOPS, *TURNS, *TOOLS),
        stops=STOPS,
        bos="<bos>",
        template=files("mference_gemma4").joinpath("chat_template.jinja").read_text(encoding="utf-8"),
        normalize=normalize,
        decoder=GemmaDecoder,
        reasoning=("<|channel>", "<channel|>"),
        efforts=EFFORTS,
        call_grammar=write_calls,
    )
