"""Forced tool calls: whatever the dialect's grammar lets a model write is read back as calls that fit their schemas."""

import json
import re
from random import Random
from typing import Any, cast

from mference_acceptance.case import Figures, require
from mference_acceptance.context import Context
from mference_acceptance.speech import Speech, speech
from mference_core.chat import check_tools
from mference_core.grammar.answers import Grammars
from mference_core.grammar.constraint import GrammarConstraint
from mference_core.grammar.notation import json_value
from mference_core.tokens import Tokenizer

SEED, ANSWERS, ANSWER_TOKENS = 1, 24, 1000
STOP_SHARE, FREE_SHARE, TRIED = 0.5, 0.3, 12
LITERAL = re.compile(r'/(?:[^/\\]|\\.)*/|("(?:[^"\\]|\\.)*")')
COLOR = {"type": "string", "enum": ["red", "back\\slash", 'a "word"']}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "paint",
            "description": "Paints.",
            "parameters": {
                "type": "object",
                "properties": {
                    "area": {"type": "integer", "minimum": -3, "maximum": 500},
                    "borders": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
                    "color": {"$ref": "#/$defs/color"},
                    "dry": {"type": "boolean"},
                    "label": {"type": "string", "maxLength": 6},
                    "note": {"type": "string"},
                    "other": {"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]},
                    "spot": {
                        "type": "object",
                        "properties": {"x": {"type": "number"}, "y": {"type": ["integer", "null"]}},
                        "required": ["x"],
                        "additionalProperties": False,
                    },
                },
                "required": ["area", "color", "note"],
                "additionalProperties": False,
                "$defs": {"color": COLOR},
            },
        },
    },
    {"type": "function", "function": {"name": "rest", "description": "Rests.", "parameters": {"type": "object"}}},
]


def forced_calls(context: Context) -> Figures:
    """Read what the grammar of forced calls lets a model write, at random, as calls that fit their tools' schemas."""
    spoken = speech(context)
    if spoken.chat.call_grammar is None or not spoken.calls_tools(TOOLS):
        return {"tokenizer": spoken.source, "grammar": "none"}
    grammars = Grammars(chat=spoken.chat, tokenizer=spoken.tokenizer, vocab_size=spoken.tokenizer.size)
    tools, random, finished, calls = check_tools(TOOLS), Random(SEED), 0, 0  # noqa: S311  not a secret
    assert tools is not None
    for number in range(ANSWERS):
        several = number % 2 == 0
        literals = _literals(grammars.call_rules(tools, [], parallel=several), spoken)
        ids = _walk(grammars.tool_calls(tools, [], parallel=several), spoken, literals, random)
        if ids is None:
            continue
        shown = spoken.tokenizer.decode(ids, spell_control=True)[:200]
        finished += 1
        heard = spoken.decode(ids, TOOLS, reason=next(iter(spoken.stops.values())))
        require(not heard.reasons, f"a forced call cannot be read ({heard.reasons[:1]}): {shown!r}")
        require(not heard.text.strip(), f"a forced call leaves text {heard.text[:40]!r}: {shown!r}")
        require(bool(heard.calls), f"a forced answer has no call: {shown!r}")
        require(several or len(heard.calls) == 1, f"one call was asked for, {len(heard.calls)} came: {shown!r}")
        for call in heard.calls:
            require(_fits(call.arguments, call.name), f"{call.name}({call.arguments}) breaks its schema: {shown!r}")
        calls += len(heard.calls)
    require(finished * 2 >= ANSWERS, f"only {finished} of {ANSWERS} forced answers came to their end")
    return {"tokenizer": spoken.source, "answers": finished, "calls": calls}


def _fits(arguments: str, name: str) -> bool:
    """Say whether the arguments of a call are what its tool's schema allows."""
    schema = next(tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == name)
    byte = Tokenizer.of_bytes(["<end>"])
    judge = GrammarConstraint.of(f"start: {json_value(schema)}", name, byte, byte.size, {byte.id_of("<end>"): "eos"})
    return judge.matcher.consume_tokens(byte.encode(arguments)) and judge.matcher.is_accepting()


def _literals(grammar: str, spoken: Speech) -> list[list[int]]:
    """Return the ids of every text that stands in a grammar, and of what ends JSON's strings, objects and lists."""
    texts = [*dict.fromkeys(json.loads(found) for found in LITERAL.findall(grammar) if found), *'"}],']
    return [spoken.tokenizer.encode(text) for text in texts if text]


def _walk(constraint: GrammarConstraint, spoken: Speech, literals: list[list[int]], random: Random) -> list[int] | None:
    """Return ids that the grammar allows up to where it may stop, or None if that was not reached.

    Text could go on for ever: it is steered to literals of the grammar, some of which end it.
    """
    ids: list[int] = []
    while len(ids) < ANSWER_TOKENS:
        allowed = cast("list[bool]", constraint.allowed().tolist())
        may = [number for number, fits in enumerate(allowed) if fits]
        stops = [number for number in may if number in spoken.stops]
        require(bool(may), f"the grammar is stuck after {spoken.tokenizer.decode(ids, spell_control=True)[-80:]!r}")
        if stops and (len(stops) == len(may) or random.random() < STOP_SHARE):
            return ids
        ahead = [
            part
            for part in random.sample(literals, min(TRIED, len(literals)))
            if constraint.matcher.validate_tokens(part) == len(part)
        ]
        controls = [[number] for number in may if number in spoken.tokenizer.control_ids and number not in spoken.stops]
        free = [[number] for number in may if number not in spoken.stops]
        steered = [*ahead, *controls]
        for number in random.choice(steered if steered and random.random() > FREE_SHARE else free):
            constraint.accept(number)
            ids.append(number)
    return None
