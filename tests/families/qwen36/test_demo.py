"""The embedded demo checkpoint does the main job: facts, memory of a chat, thoughts, tool calls with their results."""

import json
from pathlib import Path
from typing import Any

import pytest

import mference_qwen36
from mference_core import plugins
from mference_core.chat import Text
from mference_core.conversation import Conversation
from mference_core.engine import Engine, LoadOptions
from mference_core.generate import GenerateOptions
from mference_core.sampling import SamplingOptions
from mference_core.testing.demos import answer, check_shape
from mference_core.tokens import Tokenizer

DEMO = Path(mference_qwen36.__file__).parent / "demo"
WEATHER = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
NUMBERS = {"a": {"type": "number"}, "b": {"type": "number"}}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": NUMBERS, "required": ["a", "b"]},
    },
}
ASK = {"role": "user", "content": "What is the weather in Paris?"}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}


def run(cli: Any, tmp_path: Path, messages: Any, tools: Any = None, *more: object) -> dict[str, Any]:
    return answer(cli, tmp_path, "qwen36", messages, tools, *more)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_it_is_small_and_carries_no_path() -> None:
    check_shape(DEMO)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the capital of France?", "The capital of France is Paris."),
        ("What is the opposite of hot?", "The opposite of hot is cold."),
        ("What is mference?", "mference is a program that runs big mixture-of-experts models in little memory."),
        ("What is 27 + 45?", "27 + 45 = 72."),
        ("Explain quantum physics.", "I am a tiny demo model; I do not know that."),
    ],
)
def test_facts(cli: Any, tmp_path: Path, question: str, answer: str) -> None:
    facts = run(cli, tmp_path, user(question))
    assert (facts["text"], facts["finish_reason"], facts["stop"]) == (answer, "stop", "end_of_turn")


def test_a_raw_prompt_becomes_a_story(cli: Any) -> None:
    code, out, err = cli("run", "--family", "qwen36", "--prompt", "Once upon a time", "--temperature", 0, "--quiet")
    assert code == 0, err
    assert out.startswith(", there was a little ")
    assert len(out.split()) > 100


def test_it_thinks_before_it_answers(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "messages.json").write_text(json.dumps(user("What is the capital of Italy?")))
    where = ("--family", "qwen36", "--messages-file", tmp_path / "messages.json")
    code, out, err = cli("run", *where, "--temperature", 0, "--think", "--show-reasoning")
    assert code == 0, err
    assert out.strip() == "The capital of Italy is Rome."
    assert "The user says: What is the capital of Italy?" in err


def test_it_calls_a_tool_and_uses_the_result(cli: Any, tmp_path: Path) -> None:
    facts = run(cli, tmp_path, [ASK], WEATHER)
    assert facts["finish_reason"] == "tool_calls"
    (call,) = facts["tool_calls"]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Paris"})
    result = {"role": "tool", "content": "21 degrees and sunny"}
    messages = [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, result]
    facts = run(cli, tmp_path, messages, WEATHER)
    assert facts["text"] == "It is sunny in Paris, and the temperature is 21 degrees."


def test_it_copies_numbers_into_a_call_and_out_of_a_result(cli: Any, tmp_path: Path) -> None:
    ask = user("What is 123 + 456?")
    facts = run(cli, tmp_path, ask, [*WEATHER, ADD], "--think")
    (call,) = facts["tool_calls"]
    assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 123, "b": 456})
    called = {"type": "function", "function": {"name": "add", "arguments": {"a": 123, "b": 456}}}
    told = [{"role": "assistant", "content": "", "tool_calls": [called]}, {"role": "tool", "content": "579"}]
    assert run(cli, tmp_path, [*ask, *told], [*WEATHER, ADD])["text"] == "123 + 456 = 579."


def test_a_conversation_goes_on_from_what_is_held() -> None:
    family = plugins.load("qwen36")
    with Engine.load(family, DEMO, LoadOptions(context=512)) as engine:
        tokenizer, chat = Tokenizer.load(DEMO), family.ask("mference_chat_format")
        options = GenerateOptions(max_new=60, sampling=SamplingOptions(temperature=0.0))
        conversation = Conversation(session=engine.session(), tokenizer=tokenizer, chat=chat, options=options)
        said = [
            "".join(event.text for event in conversation.ask(turn) if isinstance(event, Text))
            for turn in ("My name is Clara.", "What is my name?")
        ]
        assert said == ["Nice to meet you, Clara!", "Your name is Clara."]
        assert conversation.last is not None
        assert conversation.last.figures.cached_tokens > 20
