"""The demo is trained on conversations written exactly as the family renders them at run time."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mference_core import plugins
from mference_core.chat import render_text
from mference_core.tokens import Tokenizer

TRAINING = Path(__file__).parents[3] / "families" / "training"
DRAW = """
import json, random
import chats, dialect, tools
rng = random.Random(5)
for number in range(200):
    drawn = tools.conversation(rng) if number % 2 else (rng.choice((chats.memory, chats.follow_up, chats.styled))(rng), None)
    messages = [m if isinstance(m["content"], str) else {**m, "content": json.dumps(m["content"])} for m in drawn[0]]
    thinking = number % 3 == 0
    shown = dialect._with_thoughts(messages) if thinking else messages
    end = next(i for i in reversed(range(len(shown))) if shown[i]["role"] == "assistant")
    prompt, answer = dialect._answered(shown[:end + 1], drawn[1], thinking=thinking)
    print(json.dumps([shown, drawn[1], thinking, end, prompt, answer]))
"""


@pytest.fixture(scope="module")
def drawn() -> list[list[Any]]:
    paths = os.pathsep.join(map(str, (TRAINING / "deepseekv4", TRAINING)))
    command = [sys.executable, "-P", "-c", DRAW]
    made = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in made.stdout.splitlines()]


def test_prompts_and_answers_are_as_rendered(drawn: list[list[Any]]) -> None:
    chat = plugins.load("deepseekv4").ask("mference_chat_format")
    tokenizer = Tokenizer.of_bytes(chat.control)
    assert len(drawn) == 200
    for messages, tools, thinking, end, prompt, answer in drawn:
        options = {"tools": tools, "enable_thinking": thinking}
        assert render_text(tokenizer, chat, messages[:end], **options) == prompt
        whole = render_text(tokenizer, chat, messages[: end + 1], **options, add_generation_prompt=False)
        past = answer if thinking or tools else f"</think>{answer}"
        assert whole == prompt + past
