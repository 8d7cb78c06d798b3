"""The embedded demo checkpoint does the main job: facts, memory beyond its window, thoughts, tool calls and results."""

import json
from pathlib import Path
from typing import Any

import pytest

import mference_deepseekv4
from mference_core import plugins
from mference_core.chat import Text
from mference_core.conversation import Conversation
from mference_core.engine import Engine, LoadOptions
from mference_core.generate import GenerateOptions
from mference_core.sampling import SamplingOptions
from mference_core.testing.demos import answer, check_shape
from mference_core.testing.dialects import call, function
from mference_core.tokens import Tokenizer

DEMO = Path(mference_deepseekv4.__file__).parent / "demo"
WEATHER = function("get_weather", city={"type": "string"})
ADD = function("add", a={"type": "integer"}, b={"type": "integer"})
PARIS = {"role": "user", "content": "What is the weather in Paris?"}
DICE = function("roll_dice", sides={"type": "integer"})
ROLL = {"role": "user", "content": "Roll a die with 20 sides."}
SUM = {"role": "user", "content": "What is 123 + 456?"}


def run(cli: Any, tmp_path: Path, messages: Any, tools: Any = None, *more: object) -> dict[str, Any]:
    return answer(cli, tmp_path, "deepseekv4", messages, tools, *more)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_it_is_small_and_carries_no_path() -> None:
    check_shape(DEMO)


def test_every_id_is_one_token() -> None:
    raw = Tokenizer.load(DEMO).raw
    assert [raw.token_to_id(raw.id_to_token(number)) for number in range(2048)] == [*range(2048)]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the capital of France?", "The capital of France is Paris."),
        ("What is the opposite of hot?", "The opposite of hot is cold."),
    ],
)
def test_facts(cli: Any, tmp_path: Path, question: str, answer: str) -> None:
    facts = run(cli, tmp_path, user(question))
    assert (facts["text"], facts["finish_reason"], facts["stop"]) == (answer, "stop", "end_of_turn")


def test_it_thinks_before_it_answers(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "messages.json").write_text(json.dumps(user("What is the capital of Italy?")))
    where = ("--family", "deepseekv4", "--messages-file", tmp_path / "messages.json")
    code, out, err = cli("run", *where, "--temperature", 0, "--think", "--show-reasoning")
    assert code == 0, err
    assert out.strip() == "The capital of Italy is Rome."
    assert "The user says: What is the capital of Italy?" in err


@pytest.mark.parametrize(
    ("asked", "name", "arguments", "result", "answer"),
    [
        (
            PARIS,
            "get_weather",
            {"city": "Paris"},
            "21 degrees and sunny",
            "It is sunny in Paris, and the temperature is 21 degrees.",
        ),
        (ROLL, "roll_dice", {"sides": 20}, "17", "The die shows 17."),
        (SUM, "add", {"a": 123, "b": 456}, "579", "123 + 456 = 579."),
    ],
    ids=["weather", "dice", "sum"],
)
def test_it_calls_a_tool_and_uses_the_result(
    cli: Any, tmp_path: Path, asked: Any, name: str, arguments: Any, result: str, answer: str
) -> None:
    """Declarations stand before the user's turn, further back than the window reaches."""
    tools = [WEATHER, DICE if name == "roll_dice" else ADD]
    facts = run(cli, tmp_path, [asked], tools)
    assert facts["finish_reason"] == "tool_calls"
    (called,) = facts["tool_calls"]
    assert (called["name"], json.loads(called["arguments"])) == (name, arguments)
    past = {"role": "assistant", "content": "", "tool_calls": [call(arguments, name)]}
    facts = run(cli, tmp_path, [asked, past, {"role": "tool", "content": result}], tools)
    assert facts["text"] == answer


def test_a_conversation_goes_on_from_what_is_held_and_remembers_beyond_the_window() -> None:
    family = plugins.load("deepseekv4")
    with Engine.load(family, DEMO, LoadOptions(context=1024)) as engine:
        chat = family.ask("mference_chat_format")
        tokenizer = Tokenizer.load(DEMO, control=chat.control)
        options = GenerateOptions(max_new=320, sampling=SamplingOptions(temperature=0.0))
        conversation = Conversation(session=engine.session(), tokenizer=tokenizer, chat=chat, options=options)
        said = [
            "".join(event.text for event in conversation.ask(turn) if isinstance(event, Text))
            for turn in ("My name is Clara.", "Tell me a story about a fox.", "What is my name?")
        ]
        assert (said[0], said[2]) == ("Nice to meet you, Clara!", "Your name is Clara.")
        assert conversation.last is not None
        assert conversation.last.figures.cached_tokens > 128
