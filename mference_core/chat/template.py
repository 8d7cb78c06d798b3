"""Chat templates: rendered in a sandbox, and user text never becomes a control token.

Every character of the conversation that could begin a control token is followed by a marker, a private-use character
that occurs nowhere else, before the template sees it. A control token found in the rendered text was therefore
written by the template; everything between is text, encoded as text once the markers are out.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from mference_core.chat.format import ChatFormat
from mference_core.chat.messages import check_messages, check_tools
from mference_core.errors import RequestError
from mference_core.tokens import Tokenizer

MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_RENDERED_CHARACTERS = 1 << 25
MAX_EXPONENT = 1 << 12
MARKERS = range(0xE000, 0xF900)


class Refusal(Exception):
    """A template's own `raise_exception`."""


def _refuse(message: str) -> NoReturn:
    raise Refusal(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:  # noqa: FBT001, FBT002
    """Return JSON as templates expect it: letters as they are, nothing escaped for HTML."""

    def number(odd: Any) -> float:
        if isinstance(odd, Decimal):
            return float(odd)
        raise jinja2.TemplateRuntimeError(f"{type(odd).__name__} is not JSON")

    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, default=number, **options)


class Generation(Extension):
    """The `{% generation %}` block some templates put around answers: its body, unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        """Return the nodes of the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, which bounds ranges, with products bounded too."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Multiply or raise, unless the result would be huge."""
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        largest = MAX_EXPONENT if operator == "**" else MAX_TEMPLATE_CHARACTERS
        if (operator == "**" or not numbers) and _span(left) * _span(right) > largest:
            raise OverflowError("a product is too large")
        return super().call_binop(context, operator, left, right)


def _span(value: Any) -> float:
    """Return how far a factor can stretch a result: its length, or its own size if it is a number."""
    return abs(value) if isinstance(value, int | float) else len(value) if isinstance(value, str | list | tuple) else 1


@lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template. Raises `RequestError` if it is too long or not a template."""
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise RequestError(
            what="the chat template", got=f"{len(source)} characters", expected=f"up to {MAX_TEMPLATE_CHARACTERS}"
        )
    sandbox: SandboxedEnvironment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    try:
        return sandbox.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise RequestError(
            what=f"the chat template is broken: {error}", remedy="check the checkpoint's files"
        ) from error


def _texts(value: Any) -> list[str]:
    """Return every string in a JSON value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in _texts(part)]
    return [text for part in value for text in _texts(part)] if isinstance(value, list | tuple) else []


def _mark(value: Any, table: Mapping[int, str]) -> Any:
    """Return a JSON value with markers in all its strings."""
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, Mapping):
        return {_mark(key, table): _mark(inner, table) for key, inner in value.items()}
    return [_mark(inner, table) for inner in value] if isinstance(value, list | tuple) else value


def _marker(texts: Sequence[str]) -> str:
    """Return a private-use character none of `texts` holds, not even as a JSON escape."""
    used = {letter for text in texts for letter in text if 0xE000 <= ord(letter) < 0xF900}
    everything = "\n".join(text for text in texts if "\\u" in text).lower()
    for code in MARKERS:
        if chr(code) not in used and f"\\u{code:04x}" not in everything:
            return chr(code)
    raise RequestError(what="the conversation", got="full of private-use characters", expected="text")


def _render(
    tokenizer: Tokenizer,
    chat: ChatFormat,
    messages: Any,
    tools: Any,
    switches: Mapping[str, Any],
) -> tuple[str, str]:
    """Return the rendered text with markers, and the marker."""
    checked, offered = chat.normalize(check_messages(messages), check_tools(tools))
    source = tokenizer.template if tokenizer.template is not None and not chat.template_always else chat.template
    template = compile_template(source)
    marker = _marker([source, *_texts([checked, offered, switches])])
    table = {ord(spelling[0]): spelling[0] + marker for spelling in tokenizer.control}
    given = {**switches, "messages": checked, "tools": offered}
    variables = {**tokenizer.variables, **_mark(given, table)}  # the vocabulary's own names stay control
    try:
        text = _run(template, variables)
    except Refusal as refusal:
        reason = _clean(str(refusal), marker)
        raise RequestError(what=f"the chat template refuses this conversation: {reason}") from refusal
    except Exception as error:  # a template is a program: anything can go wrong in it
        reason = _clean(str(error), marker) or type(error).__name__
        raise RequestError(what=f"the chat template fails on this conversation: {reason}") from error
    return text.replace(f"\\u{ord(marker):04x}", marker), marker


def _run(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Render, giving up before the text fills the memory."""
    parts: list[str] = []
    size = 0
    for part in template.generate(**variables):
        size += len(part)
        if size > MAX_RENDERED_CHARACTERS:
            raise OverflowError(f"more than {MAX_RENDERED_CHARACTERS} characters come out")
        parts.append(part)
    return "".join(parts)


def _clean(text: str, marker: str) -> str:
    return text.replace(marker, "")


def render(
    tokenizer: Tokenizer,
    chat: ChatFormat,
    messages: Any,
    *,
    tools: Any = None,
    add_generation_prompt: bool = True,
    enable_thinking: bool = False,
    **switches: Any,
) -> list[int]:
    """Return the prompt ids of a conversation; `switches` are further variables of the template.

    Raises `RequestError` for messages or tools of the wrong shape, and for whatever the template refuses.
    """
    switches |= {"add_generation_prompt": add_generation_prompt, "enable_thinking": enable_thinking}
    text, marker = _render(tokenizer, chat, messages, tools, switches)
    return tokenizer.encode_marked(text, marker)


def render_text(tokenizer: Tokenizer, chat: ChatFormat, messages: Any, **options: Any) -> str:
    """Return what `render` encodes, as text: to read, not to encode again. Takes and raises what `render` does."""
    tools = options.pop("tools", None)
    switches = {"add_generation_prompt": True, "enable_thinking": False} | options
    text, marker = _render(tokenizer, chat, messages, tools, switches)
    return _clean(text, marker)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many leading ids two sequences share."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def kept_prefix(tokenizer: Tokenizer, chat: ChatFormat, messages: Any, **options: Any) -> int:
    """Return how many ids of `render(messages)` the next turn's prompt begins with, whatever the answer is.

    Where the dialect does not repeat its generation prompt in past turns this is less than the whole prompt: a
    session that keeps a snapshot of its state here goes on from it in the next turn. Takes what `render` does.
    """
    prompt = render(tokenizer, chat, messages, **options)
    answer, question = {"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}
    options |= {"add_generation_prompt": False}
    futures = ([*messages, answer], [*messages, answer, question])  # answers may be written otherwise once past
    return min(common_prefix(prompt, render(tokenizer, chat, later, **options)) for later in futures)
