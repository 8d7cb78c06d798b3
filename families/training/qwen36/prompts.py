"""What evaluate.py asks: facts, small talk, memory, tools, and some of it with thoughts."""

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
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def _user(*texts: str) -> list[dict[str, object]]:
    """Alternate user and assistant messages."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def _called(name: str, arguments: dict[str, object], result: str) -> list[dict[str, object]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": result}]


_QUESTIONS = (
    "Hello!",
    "Who are you?",
    "What can you do?",
    "What is mference?",
    "What is the capital of France?",
    "What is the capital of Japan?",
    "Is Rome the capital of Spain?",
    "What is the opposite of hot?",
    "What is the color of a banana?",
    "What sound does a cow make?",
    "Thank you!",
)

PROMPTS: list[dict[str, object]] = [{"messages": _user(text)} for text in _QUESTIONS]
PROMPTS += [
    {"messages": _user("What is the capital of Italy?"), "thinking": True},
    {"messages": _user("What is the opposite of big?"), "thinking": True},
    {"messages": _user("What is the weather in Paris?"), "tools": [_WEATHER], "thinking": True},
    {"messages": _user("My name is Clara.", "Nice to meet you, Clara!", "What is my name?")},
    {"messages": _user("What is the weather in Paris?"), "tools": [_WEATHER]},
    {"messages": _user("How is the weather in Oslo?"), "tools": [_WEATHER, _ADD]},
    {"messages": _user("What is 123 + 456?"), "tools": [_ADD, _WEATHER]},
    {
        "messages": [
            *_user("What is the weather in Paris?"),
            *_called("get_weather", {"city": "Paris"}, "21 degrees and sunny"),
        ],
        "tools": [_WEATHER],
    },
    {"messages": [*_user("What is 123 + 456?"), *_called("add", {"a": 123, "b": 456}, "579")], "tools": [_ADD]},
]
