"""Writing grammars: a Lark-like notation, as `llguidance` reads it.

Rules have lower-case names, terminals (one regular expression each) upper-case ones. A control token is written by its
id, so that its spelling in ordinary text never stands for it.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field

Mark = Callable[[str], str]
"""Turns the spelling of a control token into what stands for it in a grammar."""

WHITE = r"( |\r?\n[ \t]{0,24})?"
"""White space inside JSON: a space or one indented line, or a model that likes white space could go on for long."""

ANY = r"/(?s:.*)/"
"""The body of a terminal for any text, control tokens excepted."""


def literal(text: str) -> str:
    """Return `text` as a literal."""
    return json.dumps(text, ensure_ascii=True)


def without(mark: str) -> str:
    """Return the body of a terminal for any text in which `mark` does not occur."""
    return rf"{ANY} & ~/(?s:.*){re.escape(mark).replace('/', chr(92) + '/')}(?s:.*)/"


def json_value(schema: Mapping[str, Any]) -> str:
    """Return what stands for a JSON value that `schema` allows."""
    described = {**schema, "x-guidance": {"whitespace_pattern": WHITE}}
    return f"%json {json.dumps(described, ensure_ascii=True)}"


def token(number: int) -> str:
    """Return what stands for a token id."""
    return f"<[{number}]>"


@define
class Rules:
    """Rules of one grammar in the making."""

    _bodies: dict[str, str] = field(factory=dict, init=False)
    _names: dict[str, str] = field(factory=dict, init=False)
    _count: int = field(default=0, init=False)

    def reserve(self) -> str:
        """Return the name of a rule whose body `define` gives later."""
        self._count += 1
        return f"r{self._count}"

    def define(self, name: str, body: str) -> None:
        """Give a rule its body."""
        self._bodies[name] = body

    def rule(self, body: str) -> str:
        """Return the name of a rule with this body."""
        return self._named(body, self.reserve)

    def terminal(self, body: str) -> str:
        """Return the name of a terminal with this body: a regular expression, or terminals put together."""
        return self._named(body, lambda: self.reserve().upper())

    def until(self, ending: str, text: str = ANY) -> str:
        """Return the name of a rule for `text`, a terminal's body, up to and with the first `ending`."""
        return self._named(f"{self.terminal(text)} {literal(ending)}", self.reserve, "[lazy]")

    def _named(self, body: str, name: Callable[[], str], options: str = "") -> str:
        key = options + body
        if key not in self._names:
            self._names[key] = name()
            self._bodies[self._names[key] + options] = body
        return self._names[key]

    def text(self, start: str) -> str:
        """Return the grammar that begins with the rule body `start`."""
        return f"start: {start}\n" + "".join(f"{name}: {body}\n" for name, body in self._bodies.items())
