"""What the family accepts, and how it speaks."""

from pathlib import Path
from typing import Any

import attrs
import pytest

from mference_core.arch import encode_arch
from mference_core.chat import render_text
from mference_core.errors import ArchMismatch, RequestError
from mference_core.plugins import load
from mference_core.tokens import Tokenizer
from mference_smollm2.arch import PINNED, Smollm2Arch, arch_from_config
from mference_smollm2.chat import chat_format
from mference_smollm2.convert import convert
from mference_smollm2.install import install_plan

CONFIG: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
}


@pytest.fixture
def tokenizer(tiny: Path, tmp_path: Path) -> Tokenizer:
    convert(tiny, tmp_path / "out")
    return attrs.evolve(Tokenizer.load(tmp_path / "out"), template=None)


def test_the_published_config_is_the_pinned_arch() -> None:
    contract = load("smollm2").contract
    newer = {k: v for k, v in CONFIG.items() if k != "rope_theta"}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 100000.0}
    for config in (CONFIG, newer):
        assert contract.accept(contract.from_config(config)) == PINNED
    assert contract.accept(encode_arch(PINNED)) == PINNED


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("rope_scaling", {"type": "linear"}),
        ("tie_word_embeddings", False),
        ("rms_norm_eps", 1e-6),
        ("hidden_act", "gelu"),
        ("hidden_size", None),
        ("rope_parameters", {"rope_type": "yarn"}),
    ],
)
def test_other_llamas_are_refused_by_key(key: str, value: Any) -> None:
    with pytest.raises(ArchMismatch, match=f"config {key} is"):
        arch_from_config(CONFIG | {key: value})


def test_every_tensor_of_the_plan_is_placed_under_its_own_name() -> None:
    plan = install_plan(PINNED)
    assert len(plan.residents) == 2 + 9 * 30
    assert plan.place("model.layers.30.mlp.up_proj.weight") is None
    assert isinstance(PINNED, Smollm2Arch)


def test_guidance_becomes_one_system_message(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert render_text(tokenizer, chat_format(), messages) == (
        "<|im_start|>system\nBe kind.\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_guidance_the_model_gets_its_own(tokenizer: Tokenizer) -> None:
    text = render_text(tokenizer, chat_format(), [{"role": "user", "content": "Hi"}], add_generation_prompt=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n")


def test_tools_are_refused_not_ignored(tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    user = {"role": "user", "content": "Hi"}
    with pytest.raises(RequestError, match="smollm2 does not call tools"):
        render_text(tokenizer, chat_format(), [user], tools=tools)
    with pytest.raises(RequestError, match=r"messages\[1\] is a tool call"):
        render_text(tokenizer, chat_format(), [user, {"role": "assistant", "tool_calls": [call]}])


def test_both_stop_tokens_are_known(tokenizer: Tokenizer) -> None:
    assert chat_format().stop_ids(tokenizer) == {2: "end_of_turn", 0: "eos"}
