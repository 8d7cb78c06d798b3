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
from mference_core.chat.messages import Message, check_messages, check_tools, read_messages
from mference_core.chat.template import common_prefix, kept_prefix, render, render_text

__all__ = [
    "ChatFormat",
    "Event",
    "Malformed",
    "Message",
    "Reasoning",
    "StreamDecoder",
    "Text",
    "TextDecoder",
    "ToolCall",
    "check_messages",
    "check_tools",
    "common_prefix",
    "kept_prefix",
    "read_messages",
    "render",
    "render_text",
    "starts_hidden",
]
