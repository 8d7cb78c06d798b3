"""The tokenizer that a GGUF file's metadata describes, as the files of a published checkpoint."""

import json
from typing import Any

from mference_smollm2.gguf import Gguf, GgufError

CONTROL, USER_DEFINED = 3, 4
SPECIALS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _added(number: int, content: str, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "special": special}


def tokenizer_json(gguf: Gguf) -> dict[str, Any]:
    """Return tokenizer.json: byte-level pairs, digits one by one.

    Raises `GgufError` for another kind of tokenizer.
    """
    kind = (gguf.get("tokenizer.ggml.model", str), gguf.get("tokenizer.ggml.pre", str))
    if kind != ("gpt2", "smollm"):
        got = f"{kind[0]} with {kind[1]}"
        raise GgufError(what=f"{gguf.path} tokenizer", got=got, expected="gpt2 with smollm")
    tokens, types = gguf.get("tokenizer.ggml.tokens", list), gguf.get("tokenizer.ggml.token_type", list)
    merges = [str(merge).split(" ") for merge in gguf.get("tokenizer.ggml.merges", list)]
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        raise GgufError(what=f"{gguf.path} tokens", got="repeated or untyped", expected="each once, with a type")
    if any(len(merge) != 2 for merge in merges):
        raise GgufError(what=f"{gguf.path} merges", got="not pairs", expected="two parts and a space between")
    added = [
        _added(number, token, special=types[number] == CONTROL)
        for number, token in enumerate(tokens)
        if types[number] in (CONTROL, USER_DEFINED)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def tokenizer_files(gguf: Gguf) -> dict[str, str]:
    """Return file name -> text: the tokenizer, its named tokens, and the chat template if there is one."""
    tokenizer = tokenizer_json(gguf)
    tokens = gguf.metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in SPECIALS.items():
        number = gguf.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            config[name] = tokens[number]
    files = {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(config, indent=1),
    }
    template = gguf.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        files["chat_template.jinja"] = template
    return files
