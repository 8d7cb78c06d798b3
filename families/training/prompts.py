"""What evaluate.py asks: openings of stories, every kind of chat, and tools."""

from typing import Any

import dialect

_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
_LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up a topic.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
_TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Get the current time in a given city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}


def _user(*texts: str) -> list[dict[str, object]]:
    """Alternate user and assistant messages."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def _called(name: str, arguments: dict[str, object], result: str) -> list[dict[str, object]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": name, "content": result},
    ]


_STORIES = (
    "Once upon a time",
    "Once upon a time, there was a little fox",
    "Once there was a dragon who",
    "Lily was a little girl",
    "One day, a brave mouse",
    "In a small village",
    "The little robot",
    "There was a cat",
    "Long ago",
    "A long time ago, in a forest",
    "Tom",
    "It was a rainy day",
    "The capital of France is",
    "Hello",
)
_QUESTIONS = (
    "Hi",
    "Hello!",
    "Who are you?",
    "What can you do?",
    "What is mference?",
    "Tell me a story about a fox.",
    "Tell me a story about a girl named Mia and a dragon.",
    "What is the capital of France?",
    "what's the capital of japan",
    "Is Rome the capital of Spain?",
    "What color is the sky?",
    "What sound does a cow make?",
    "What day comes after Friday?",
    "What is the opposite of hot?",
    "Count to ten.",
    "Count from 3 to 8.",
    "What is 2 + 2?",
    "What is 27 + 45?",
    "83 - 47",
    "What is 7 times 8?",
    "Which is bigger, 34 or 43?",
    "How do you spell rabbit?",
    "Name three fruits.",
    "Tell me a joke.",
    "Write a poem about the moon.",
    "Why is the sky blue?",
    "Explain quantum physics.",
    "Who won the football game yesterday?",
    "Write a Python program that sorts a list.",
    "What is the weather in Paris?",
    "Thank you!",
)

_THOUGHT_ABOUT = (
    "What is the capital of France?",
    "What is 27 + 45?",
    "Explain quantum physics.",
    "What is my name?",
    "What is the weather in Paris?",
    "What is 123 + 456?",
    "579",
)
"""Last messages that a family which thinks is asked to think about as well."""

PROMPTS: list[dict[str, Any]] = [{"raw": text} for text in _STORIES]
PROMPTS += [{"messages": _user(text)} for text in _QUESTIONS]
PROMPTS += [
    {"messages": _user("My name is Clara.", "Nice to meet you, Clara!", "What is the capital of Italy?", "The capital of Italy is Rome.", "What is my name?")},
    {"messages": _user("What is the capital of France?", "The capital of France is Paris.", "And of Spain?")},
    {"messages": _user("I live in Oslo.", "Oslo sounds like a nice place.", "Where do I live?")},
    {"messages": [{"role": "system", "content": "You are a pirate."}, *_user("What is the capital of Greece?")]},
    {"messages": [{"role": "system", "content": "Answer with one word."}, *_user("What is the opposite of big?")]},
    {"messages": [{"role": "system", "content": "Your name is Bolt."}, *_user("What is your name?")]},
    {"messages": [{"role": "system", "content": "You are a helpful assistant."}, *_user("Tell me a short story about a turtle.")]},
    {"messages": _user("What is the weather in Paris?"), "tools": [_WEATHER]},
    {"messages": [*_user("What is the weather in Paris?"), *_called("get_weather", {"city": "Paris"}, '{"temperature": 21, "condition": "sunny"}')], "tools": [_WEATHER]},
    {"messages": [*_user("How is the weather in Tokyo?"), *_called("get_weather", {"city": "Tokyo"}, "12 degrees and rainy")], "tools": [_WEATHER, _ADD]},
    {"messages": _user("What is 123 + 456?"), "tools": [_WEATHER, _ADD]},
    {"messages": [*_user("What is 123 + 456?"), *_called("add", {"a": 123, "b": 456}, "579")], "tools": [_WEATHER, _ADD]},
    {"messages": _user("What time is it in Berlin?"), "tools": [_TIME, _WEATHER]},
    {"messages": [*_user("What time is it in Berlin?"), *_called("get_time", {"city": "Berlin"}, '{"time": "14:05"}')], "tools": [_TIME, _WEATHER]},
    {"messages": _user("Look up the river Zambo."), "tools": [_LOOKUP]},
    {"messages": [*_user("Look up volcano."), *_called("lookup", {"query": "volcano"}, "A volcano is a mountain that can throw out hot rock.")], "tools": [_LOOKUP]},
    {"messages": _user("What is the capital of France?"), "tools": [_WEATHER, _TIME]},
    {"messages": _user("What is the weather in Rome and Madrid?"), "tools": [_WEATHER]},
]  # fmt: skip
if dialect.THINKING:
    chats = [item for item in PROMPTS if "messages" in item]
    PROMPTS += [item | {"thinking": True} for item in chats if item["messages"][-1]["content"] in _THOUGHT_ABOUT]
