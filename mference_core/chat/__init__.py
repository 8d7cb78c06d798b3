"""Conversations: checked messages, templates, and the events of an answer."""

from mference_core.chat.format import (
    ChatFormat,
    Event,
    Malformed,
    Reasoning,
    StreamDecoder,
    Text,
    TextDecoder,
    ToolCall,
    starts_hidden,
)
from mference_core.chat.messages import Message, check_messages, check_tools, read_messages, read_tools
from mference_core.chat.schema import NUMBER, branches_of, fit, inner_schema, types_of
from mference_core.chat.template import common_prefix, kept_prefix, render, render_text
from mference_core.chat.values import MAX_DEPTH, dump_json, exact_number, load_json

__all__ = [
    "MAX_DEPTH",
    "NUMBER",
    "ChatFormat",
    "Event",
    "Malformed",
    "Message",
    "Reasoning",
    "StreamDecoder",
    "Text",
    "TextDecoder",
    "ToolCall",
    "branches_of",
    "check_messages",
    "check_tools",
    "common_prefix",
    "dump_json",
    "exact_number",
    "fit",
    "inner_schema",
    "kept_prefix",
    "load_json",
    "read_messages",
    "read_tools",
    "render",
    "render_text",
    "starts_hidden",
    "types_of",
]
