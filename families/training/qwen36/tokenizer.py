"""Train the demo tokenizer: byte-level BPE with the marks of Qwen 3.6.

python tokenizer.py --corpus corpus --out tokenizer
"""

from byte_level import Scheme, main
from config import VOCAB

SCHEME = Scheme(
    size=VOCAB,
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    added=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    settings={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "model_max_length": 4096},
    sample="<|im_start|>user\nHi, 27 + 45 is caf\u00e9 \u732b?<|im_end|>\n<think>",
)

if __name__ == "__main__":
    main(SCHEME)
