"""Shapes of JSON bodies: one declaration checks a value, names what is wrong in it, and describes it as JSON Schema.

Null means absent for every field, also for one that a declaration does not name; a value of such a field is refused by
name.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from attrs import field, frozen

from mference_core.server.errors import ApiError, refused

INVALID_TYPE, UNKNOWN, UNSUPPORTED = "invalid_type", "unknown_parameter", "unsupported_parameter"
Schema = dict[str, Any]


class Kind(Protocol):
    """What a value must be."""

    def read(self, path: str, value: Any) -> Any:
        """Return the checked value. Raises `ApiError` naming `path` or a part of it."""
        ...

    def schema(self) -> Schema:
        """Return the same as JSON Schema."""
        ...


def json_type(value: Any) -> str:
    """Return what a JSON value is, in words."""
    names = {type(None): "null", bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")


def wrong_type(path: str, value: Any, expected: str) -> ApiError:
    """Return the error of a value of another type."""
    return refused(path, f"{path} is {json_type(value)}; expected {expected}", INVALID_TYPE)


def inside(path: str, name: str) -> str:
    """Return the path of a field of the object at `path`."""
    shown = name[:100] if name.isprintable() else ascii(name[:100])[1:-1]
    return f"{path}.{shown}" if path else shown


@frozen(kw_only=True)
class Text:
    """A string, of `choices` if there are any, of `least` to `most` characters."""

    choices: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    pattern: str | None = None

    def read(self, path: str, value: Any) -> str:
        """Return the string."""
        if not isinstance(value, str):
            raise wrong_type(path, value, "a string")
        if self.choices and value not in self.choices:
            raise refused(path, f"{path} is {value[:100]!r}; expected {one_of(self.choices)}")
        if len(value) < self.least:
            raise refused(path, f"{path} is empty; expected at least {self.least} character")
        if self.most is not None and len(value) > self.most:
            raise refused(path, f"{path} has {len(value)} characters; expected at most {self.most}")
        if self.pattern is not None and not re.fullmatch(self.pattern, value):
            raise refused(path, f"{path} is {value[:100]!r}; expected a match of {self.pattern}")
        return value

    def schema(self) -> Schema:
        """Return the schema."""
        made: Schema = {"type": "string"}
        made |= {"enum": list(self.choices)} if self.choices else {}
        made |= {"minLength": self.least} if self.least else {}
        made |= {"maxLength": self.most} if self.most is not None else {}
        return made | ({"pattern": f"^{self.pattern}$"} if self.pattern else {})


def one_of(choices: Sequence[Any]) -> str:
    """Return alternatives in words."""
    words = [repr(choice) if isinstance(choice, str) else str(choice).lower() for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


@frozen(kw_only=True)
class Whole:
    """An integer from `low` to `high`; one written as a decimal fraction of zero is one too."""

    low: int | None = None
    high: int | None = None

    def read(self, path: str, value: Any) -> int:
        """Return the integer."""
        if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
            value = int(value)
        if type(value) is not int:
            raise wrong_type(path, value, "an integer")
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            raise refused(path, f"{path} is {shown(value)}; expected {bounds('an integer', self.low, self.high)}")
        return value

    def schema(self) -> Schema:
        """Return the schema."""
        return {"type": "integer"} | limits(self.low, self.high)


@frozen(kw_only=True)
class Number:
    """A finite number from `low` (itself excluded if `above`) to `high`."""

    low: float | None = None
    high: float | None = None
    above: bool = False

    def read(self, path: str, value: Any) -> float:
        """Return the number."""
        if isinstance(value, bool) or json_type(value) != "a number":
            raise wrong_type(path, value, "a number")
        too_low = self.low is not None and (value < self.low or (self.above and value == self.low))
        if too_low or (self.high is not None and value > self.high):
            word = "a number above" if self.above else "a number"
            text = bounds(word, self.low, self.high) if not self.above else f"{word} {self.low:g}"
            text += f" and up to {self.high:g}" if self.above and self.high is not None else ""
            raise refused(path, f"{path} is {shown(value)}; expected {text}")
        return float(value)

    def schema(self) -> Schema:
        """Return the schema."""
        made = limits(self.low, self.high)
        if self.above:
            made["exclusiveMinimum"] = made.pop("minimum")
        return {"type": "number"} | made


def shown(value: Any) -> str:
    """Return a number short enough to repeat."""
    text = str(value)
    return text if len(text) <= 40 else text[:40] + "..."


def limits(low: float | None, high: float | None) -> Schema:
    """Return the bounds a schema states."""
    return ({"minimum": low} if low is not None else {}) | ({"maximum": high} if high is not None else {})


def bounds(word: str, low: float | None, high: float | None) -> str:
    """Return bounds in words."""
    if low is None or high is None:
        return f"{word} of at least {low}" if low is not None else f"{word} of at most {high}"
    return f"{word} from {low:g} to {high:g}" if isinstance(low, float) else f"{word} from {low} to {high}"


@frozen(kw_only=True)
class Truth:
    """A boolean, `only` that one if given."""

    only: bool | None = None

    def read(self, path: str, value: Any) -> bool:
        """Return the boolean."""
        if not isinstance(value, bool):
            raise wrong_type(path, value, "a boolean")
        if self.only is not None and value != self.only:
            raise refused(
                path, f"{path} is {str(value).lower()}; this server supports only {str(self.only).lower()}", UNSUPPORTED
            )
        return value

    def schema(self) -> Schema:
        """Return the schema."""
        return {"type": "boolean"} if self.only is None else {"type": "boolean", "enum": [self.only]}


@frozen(kw_only=True)
class ListOf:
    """A list of `least` to `most` values of one kind."""

    kind: Kind
    least: int = 0
    most: int | None = None

    def read(self, path: str, value: Any) -> list[Any]:
        """Return the checked list."""
        if not isinstance(value, list):
            raise wrong_type(path, value, "a list")
        if len(value) < self.least:
            raise refused(path, f"{path} is empty; expected at least one entry")
        if self.most is not None and len(value) > self.most:
            raise refused(path, f"{path} has {len(value)} entries; expected at most {self.most}")
        return [self.kind.read(f"{path}[{n}]", entry) for n, entry in enumerate(value)]

    def schema(self) -> Schema:
        """Return the schema."""
        made: Schema = {"type": "array", "items": self.kind.schema()}
        made |= {"minItems": self.least} if self.least else {}
        return made | ({"maxItems": self.most} if self.most is not None else {})


@frozen(kw_only=True)
class Json:
    """A JSON object whose inside is not ours to check."""

    def read(self, path: str, value: Any) -> dict[str, Any]:
        """Return the object."""
        if not isinstance(value, dict):
            raise wrong_type(path, value, "an object")
        return value

    def schema(self) -> Schema:
        """Return the schema."""
        return {"type": "object", "additionalProperties": True}


@frozen(kw_only=True)
class MapOf:
    """An object of any keys that match `pattern`, at most `most`, with values of one kind."""

    kind: Kind
    pattern: str = ".*"
    what: str = "any key"
    most: int = 1024

    def read(self, path: str, value: Any) -> dict[str, Any]:
        """Return the checked object."""
        if not isinstance(value, dict):
            raise wrong_type(path, value, "an object")
        if len(value) > self.most:
            raise refused(path, f"{path} has {len(value)} entries; expected at most {self.most}")
        for key in value:
            if not re.fullmatch(self.pattern, key, re.DOTALL):
                raise refused(path, f"a key of {path} is {key[:100]!r}; expected {self.what}")
        return {key: self.kind.read(inside(path, key), inner) for key, inner in value.items()}

    def schema(self) -> Schema:
        """Return the schema."""
        names = {} if self.pattern == ".*" else {"propertyNames": {"pattern": f"^{self.pattern}$"}}
        return {
            "type": "object",
            "additionalProperties": self.kind.schema(),
            "maxProperties": self.most,
            **names,
        }


@frozen(kw_only=True)
class Either:
    """One of several kinds that differ in JSON type."""

    kinds: tuple[Kind, ...]
    what: str

    def read(self, path: str, value: Any) -> Any:
        """Return the value as the first kind that takes it; of several errors the one that is not about the type."""
        errors: list[ApiError] = []
        for kind in self.kinds:
            try:
                return kind.read(path, value)
            except ApiError as error:
                errors.append(error)
        deeper = [error for error in errors if error.code != INVALID_TYPE or error.param != path]
        raise deeper[-1] if deeper else wrong_type(path, value, self.what)

    def schema(self) -> Schema:
        """Return the schema."""
        return {"anyOf": [kind.schema() for kind in self.kinds]}


@frozen(kw_only=True)
class Field:
    """A field of a record. One without effect on the answer is `inert`: it is taken, and the response says so."""

    kind: Kind
    required: bool = False
    inert: bool = False
    note: str = ""


@frozen(kw_only=True)
class Record:
    """An object of named fields. `refuses` are fields of the protocol that this server does not do, with the reason."""

    fields: Mapping[str, Field]
    refuses: Mapping[str, str] = field(factory=dict)

    def read(self, path: str, value: Any) -> dict[str, Any]:
        """Return the fields that are given and not null, checked."""
        if not isinstance(value, dict):
            raise wrong_type(path or "the body", value, "an object")
        found: dict[str, Any] = {}
        for name, inner in value.items():
            where, known = inside(path, name), self.fields.get(name)
            if known is None and name in self.refuses:
                if inner not in (None, [], {}):
                    raise refused(where, f"{where} is not supported: {self.refuses[name]}", UNSUPPORTED)
            elif known is None and inner is not None:
                raise refused(where, f"{where} is no field of this request; leave it out", UNKNOWN)
            elif known is not None and inner is not None:
                found[name] = known.kind.read(where, inner)
        for name, known in self.fields.items():
            if known.required and name not in found:
                where = inside(path, name)
                raise refused(where, f"{where} is missing", "missing_required_parameter")
        return found

    def inert(self, given: Mapping[str, Any]) -> list[str]:
        """Return the given fields that change nothing."""
        return [name for name in given if name in self.fields and self.fields[name].inert]

    def schema(self) -> Schema:
        """Return the schema."""
        properties: Schema = {name: _property(known) for name, known in self.fields.items()}
        properties |= {
            name: {"type": "null", "description": f"Not supported: {why}."} for name, why in self.refuses.items()
        }
        required = [name for name, known in self.fields.items() if known.required]
        made: Schema = {"type": "object", "properties": properties, "additionalProperties": {"type": "null"}}
        return made | ({"required": required} if required else {})


def _property(known: Field) -> Schema:
    schema = known.kind.schema()
    schema = schema if known.required else {"anyOf": [schema, {"type": "null"}]}
    note = " ".join(filter(None, [known.note, "Taken, without effect on the answer." if known.inert else ""]))
    return schema | ({"description": note} if note else {})


@frozen(kw_only=True)
class Tagged:
    """An object whose field `tag` says which record it is; `usual` is meant where the tag is absent."""

    records: Mapping[str, Record]
    tag: str = "type"
    usual: str | None = None
    refuses: Mapping[str, str] = field(factory=dict)

    def read(self, path: str, value: Any) -> dict[str, Any]:
        """Return the fields as the tagged record reads them, the tag included."""
        if not isinstance(value, dict):
            raise wrong_type(path, value, "an object")
        tag, where = value.get(self.tag, self.usual), inside(path, self.tag)
        if tag is None:
            raise refused(where, f"{where} is missing", "missing_required_parameter")
        if not isinstance(tag, str):
            raise wrong_type(where, tag, "a string")
        if tag not in self.records:
            why = f" ({self.refuses[tag]})" if tag in self.refuses else ""
            code = UNSUPPORTED if tag in self.refuses else "invalid_value"
            raise refused(where, f"{where} is {tag[:100]!r}; expected {one_of(tuple(self.records))}{why}", code)
        rest = {name: inner for name, inner in value.items() if name != self.tag}
        return self.records[tag].read(path, rest) | {self.tag: tag}

    def schema(self) -> Schema:
        """Return the schema."""
        made = []
        for tag, record in self.records.items():
            schema = record.schema()
            schema["properties"] = {self.tag: {"type": "string", "enum": [tag]}} | schema["properties"]
            if tag != self.usual:
                schema["required"] = [self.tag, *schema.get("required", [])]
            made.append(schema)
        return {"anyOf": made} if len(made) > 1 else made[0]
