r"""Reading and writing the tool calls of an answer: DSML, which is ordinary text.

    block  = <｜DSML｜tool_calls> (invoke)+ </｜DSML｜tool_calls>
    invoke = <｜DSML｜invoke name="NAME"> parameter* </｜DSML｜invoke>           NAME is one of the request's tools
    parameter = <｜DSML｜parameter name="KEY" string="BOOL"> VALUE </｜DSML｜parameter>
    BOOL = true | false                               KEY has neither '"' nor a line end, and comes once in an invoke

White space may stand between the parts, not around a VALUE. VALUE ends at the first closing mark. It is text where
`string` is true and JSON where it is false; where the tool's schema asks for another type, and the value can be read
as one, the schema decides. One part that cannot be read spoils the block: no call of it counts.
"""

import re
from collections.abc import Mapping
from typing import Any

from mference_core.chat.schema import fit, inner_schema
from mference_core.chat.values import dump_json, load_json
from mference_core.errors import RequestError

DSML = "｜DSML｜"
OPEN, CLOSE = f"<{DSML}tool_calls>", f"</{DSML}tool_calls>"
INVOKE_END, PARAMETER_END = f"</{DSML}invoke>", f"</{DSML}parameter>"
INVOKE = re.compile(rf'<{DSML}invoke name="([A-Za-z0-9_.-]{{1,64}})">')
PARAMETER = re.compile(rf'<{DSML}parameter name="([^"\r\n]+)" string="(true|false)">')
SPACE = re.compile(r"\s*")
MAX_DEPTH = 64


class Unreadable(Exception):
    """Why a block holds no calls; caught where calls are decoded."""


class _Reader:
    """A block's text, read from left to right."""

    def __init__(self, text: str, tools: Mapping[str, Any]) -> None:
        self.text, self.tools, self.at = text, tools, 0

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        found = []
        while invoke := self._match(INVOKE):
            name = invoke[1]
            if name not in self.tools:
                raise Unreadable(f"unknown tool {name!r}")
            found.append((name, self._arguments(self.tools[name])))
        if self.at < len(self.text) or not found:
            raise self._expected("'<｜DSML｜invoke name=\"NAME\">'")
        return found

    def _arguments(self, schema: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        while parameter := self._match(PARAMETER):
            key, start = parameter[1], parameter.end()
            if key in arguments:
                raise Unreadable(f"parameter {key!r} is given twice")
            end = self.text.find(PARAMETER_END, start)
            if end < 0:
                raise Unreadable(f"parameter {key!r} is not closed")
            self.at = end + len(PARAMETER_END)
            arguments[key] = _value(key, self.text[start:end], inner_schema(schema, key), text=parameter[2] == "true")
        self._space()
        if not self.text.startswith(INVOKE_END, self.at):
            raise self._expected(f"a parameter or '{INVOKE_END}'")
        self.at += len(INVOKE_END)
        return arguments

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self._space()
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found

    def _space(self) -> None:
        found = SPACE.match(self.text, self.at)
        assert found
        self.at = found.end()

    def _expected(self, what: str) -> Unreadable:
        return Unreadable(f"{what} is expected (character {self.at})")


def _value(key: str, written: str, schema: Any, *, text: bool) -> Any:
    if text:
        return fit(written, written, schema)
    try:
        value = load_json(written)
    except ValueError:
        raise Unreadable(f"parameter {key!r} is no JSON") from None
    if _depth(value) > MAX_DEPTH:
        raise Unreadable(f"parameter {key!r} is nested more than {MAX_DEPTH} levels deep")
    return _fitted(value, written, schema)


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0) if isinstance(value, dict | list) else 0


def _fitted(value: Any, written: str, schema: Any) -> Any:
    """Fit a JSON value, and what it holds, to its schema."""
    if isinstance(value, dict):
        value = {key: _fitted(inner, _spelt(inner), inner_schema(schema, key)) for key, inner in value.items()}
    elif isinstance(value, list):
        value = [_fitted(inner, _spelt(inner), inner_schema(schema)) for inner in value]
    return fit(value, value if isinstance(value, str) else written, schema)


def _spelt(value: Any) -> str:
    return value if isinstance(value, str) else dump_json(value)


def parse_calls(text: str, tools: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the tool names and arguments (compact JSON, keys sorted) of a block, given without its outer marks.

    `tools` maps the request's tools to the schemas of their parameters, None where there is none. Raises `Unreadable`.
    """
    return [(name, dump_json(arguments)) for name, arguments in _Reader(text, tools).calls()]


def written_parameters(name: str, arguments: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the parameters of a past call in key order: `key`, `string` (true or false) and `value`, as written.

    Raises `RequestError` for a call that would not read back as it was.
    """
    written = []
    for key in sorted(arguments):
        value = arguments[key]
        text = value if isinstance(value, str) else dump_json(value)
        if not key or any(letter in key for letter in '"\r\n'):
            raise RequestError(
                what=f"a key of the arguments of {name}", got=repr(key), expected="a name without '\"' or line ends"
            )
        for part, shown in ((key, f"a key of the arguments of {name}"), (text, f"argument {key} of {name}")):
            if DSML in part:
                raise RequestError(what=shown, got=f"text with {DSML}", expected="none of this dialect's marks")
        written.append({"key": key, "string": str(isinstance(value, str)).lower(), "value": text})
    return written
