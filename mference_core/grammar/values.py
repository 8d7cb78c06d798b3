"""Rules for values that a dialect writes in its own way: JSON's structure, but strings and keys spelt differently."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field

from mference_core.chat.schema import branches_of, types_of
from mference_core.errors import RequestError
from mference_core.grammar.notation import Rules, json_value, literal

MAX_DEPTH = 16
NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
SCALARS = {"null": '"null"', "boolean": '("true" | "false")'}
WRITTEN = {
    "integer": "/-?(0|[1-9][0-9]{0,18})/",
    "number": r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?/",
}
KINDS = ("string", "integer", "number", "boolean", "null", "object", "array")

Schema = Mapping[str, Any]


@define
class ValueRules:
    """Turns schemas into rules.

    `string(schema)` and `constant(text)` give the rule of a string that a schema allows and of one known string;
    `key(name)` that of a property's name, `any_key` that of one nobody named. Properties come in the schema's order,
    and only those it names unless it names none. Raises `RequestError` for a schema no rule can follow.
    """

    rules: Rules
    string: Callable[[Schema], str]
    constant: Callable[[str], str]
    key: Callable[[str], str]
    any_key: str
    root: Schema = field(factory=dict)
    _references: dict[str, str] = field(factory=dict, init=False)

    def value(self, schema: Any, depth: int = 0) -> str:
        """Return the name of the rule of one value."""
        if depth > MAX_DEPTH:
            raise RequestError(what="a tool's schema", got=f"nested more than {MAX_DEPTH} levels deep")
        schema = schema if isinstance(schema, Mapping) else {}
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]))
        if "const" in schema or "enum" in schema:
            allowed = [schema["const"]] if "const" in schema else schema["enum"]
            return self.rules.rule(" | ".join(self._fixed(value) for value in allowed))
        if branches := branches_of(schema, "anyOf", "oneOf"):
            rest = {name: part for name, part in schema.items() if name not in ("anyOf", "oneOf")}
            return self.rules.rule(" | ".join(self.value({**rest, **branch}, depth + 1) for branch in branches))
        if branches := branches_of(schema, "allOf"):
            return self.value(_joined(schema, branches), depth + 1)
        kinds = sorted(types_of(schema))
        if not kinds:
            return self._anything()
        return self.rules.rule(" | ".join(self._kind(kind, schema, depth) for kind in kinds))

    def _kind(self, kind: str, schema: Schema, depth: int) -> str:
        if kind in ("integer", "number"):
            bounds = {name: schema[name] for name in NUMERIC if name in schema}
            return (
                self.rules.rule(json_value({"type": kind, **bounds})) if bounds else self.rules.terminal(WRITTEN[kind])
            )
        if kind == "string":
            return self.string(schema)
        if kind == "object":
            return self.object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind not in SCALARS:
            raise RequestError(what="a type in a tool's schema", got=repr(kind), expected=", ".join(KINDS))
        return SCALARS[kind]

    def _anything(self) -> str:
        """Return the name of the rule of a value nobody described."""
        if "" not in self._references:
            name = self._references[""] = self.rules.reserve()
            scalars = [self.string({}), self.rules.terminal(WRITTEN["number"]), *SCALARS.values()]
            pair = f'{self.any_key} ":" {name}'
            some = [f'"{{" ({pair} ("," {pair})*)? "}}"', f'"[" ({name} ("," {name})*)? "]"']
            self.rules.define(name, " | ".join([*scalars, *some]))
        return self._references[""]

    def _fixed(self, value: Any) -> str:
        if isinstance(value, str):
            return self.constant(value)
        if isinstance(value, list):
            return " ".join(['"["', *_between([self._fixed(inner) for inner in value]), '"]"'])
        if isinstance(value, Mapping):
            pairs = [f'{self.key(name)} ":" {self._fixed(inner)}' for name, inner in value.items()]
            return " ".join(['"{"', *_between(pairs), '"}"'])
        return literal(json.dumps(value))

    def object(self, schema: Schema, depth: int = 0) -> str:
        """Return the name of the rule of an object."""
        properties = schema.get("properties") or {}
        if not properties:
            if schema.get("additionalProperties") is False:
                return self.rules.rule('"{" "}"')
            inner = schema.get("additionalProperties")
            pair = self.rules.rule(f'{self.any_key} ":" {self.value(inner, depth + 1)}')
            return self.rules.rule(f'"{{" ({pair} ("," {pair})*)? "}}"')
        required = set(schema.get("required") or ())
        pairs = [
            (self.rules.rule(f'{self.key(name)} ":" {self.value(inner, depth + 1)}'), name in required)
            for name, inner in properties.items()
        ]
        return self.rules.rule(f'"{{" {self._pairs(pairs)} "}}"')

    def _pairs(self, pairs: list[tuple[str, bool]]) -> str:
        """Return an expression for the pairs in order, commas between those that are there."""
        first, rest = "", ""
        for pair, needed in reversed(pairs):
            whole = f"{pair} {rest}".rstrip()
            first = whole if needed else f"({whole} | {first})" if first else f"({whole})?"
            rest = f'"," {pair} {rest}' if needed else f'("," {pair})? {rest}'
            first, rest = self.rules.rule(first), self.rules.rule(rest.rstrip())
        return first

    def _array(self, schema: Schema, depth: int) -> str:
        item = self.value(schema.get("items"), depth + 1)
        least, most = schema.get("minItems") or 0, schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        times = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        some = f'{item} ("," {item}){times}'
        return self.rules.rule(f'"[" ({some}){"" if least else "?"} "]"')

    def _reference(self, path: str) -> str:
        if path not in self._references:
            self._references[path] = self.rules.reserve()
            self.rules.define(self._references[path], self.value(resolve(path, self.root)))
        return self._references[path]


def resolve(path: str, root: Schema) -> Schema:
    """Return what a `$ref` names. Raises `RequestError` if that is nothing in the schema itself."""
    found: Any = root
    for part in path.removeprefix("#").strip("/").split("/") if path.startswith("#") else [path]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        raise RequestError(what="a $ref in a tool's schema", got=repr(path), expected="#/$defs/NAME of that schema")
    return found


def inlined(schema: Any, root: Schema, open_paths: tuple[str, ...] = ()) -> Any:
    """Return a schema with what each `$ref` names in its place; one that names itself again stays a reference."""
    if isinstance(schema, list):
        return [inlined(inner, root, open_paths) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    path = schema.get("$ref")
    if isinstance(path, str) and path not in open_paths:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return inlined({**resolve(path, root), **rest}, root, (*open_paths, path))
    return {
        key: inner if key in ("$defs", "definitions", "enum", "const", "default") else inlined(inner, root, open_paths)
        for key, inner in schema.items()
    }


def length(schema: Schema) -> str:
    """Return the repetition of a string's characters that `minLength` and `maxLength` ask for."""
    least, most = schema.get("minLength"), schema.get("maxLength")
    return "*" if least is None and most is None else f"{{{least or 0},{'' if most is None else most}}}"


def pattern(schema: Schema) -> str | None:
    """Return a regular expression that a whole string must match for the schema's `pattern` to be found in it."""
    asked = schema.get("pattern")
    if not isinstance(asked, str):
        return None
    ends_open = not asked.endswith("$") or re.search(r"(?<!\\)(?:\\\\)*\\\$$", asked) is not None
    core = asked.removeprefix("^") if ends_open else asked.removeprefix("^").removesuffix("$")
    head = "" if asked.startswith("^") else "(?s:.*)"
    return f"{head}(?:{core}){'(?s:.*)' if ends_open else ''}".replace("/", r"\/")


def _joined(schema: Schema, branches: list[Any]) -> dict[str, Any]:
    """Return one schema with what all of `allOf` ask: keys of objects together, the earlier wins elsewhere."""
    whole: dict[str, Any] = {}
    for part in ({key: value for key, value in schema.items() if key != "allOf"}, *branches):
        for key, value in part.items():
            if key == "properties" and key in whole:
                whole[key] = {**value, **whole[key]}
            elif key == "required" and key in whole:
                whole[key] = [*whole[key], *value]
            else:
                whole.setdefault(key, value)
    return whole


def _between(parts: list[str]) -> list[str]:
    return [part for at, text in enumerate(parts) for part in ([text] if at == 0 else ['","', text])]
