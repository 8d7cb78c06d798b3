"""Train the demo tokenizer: byte-level BPE with the marks of DeepSeek V4.

    python tokenizer.py --corpus corpus --out tokenizer

The marks of tool calls are no tokens of their own kind, but ordinary text that is split so that `<｜DSML｜` becomes one.
"""

from byte_level import Scheme, main
from config import VOCAB

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
MARK = "</?｜DSML｜"

SCHEME = Scheme(
    size=VOCAB,
    special=(BOS, EOS, PAD),
    added=("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    pieces=rf"{MARK}| ?[^\W\d_]+|\d| ?(?:(?!{MARK})[^\w\s])+|_|\n|\s",
    settings={"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "model_max_length": 1048576},
    sample=f'{BOS}<｜User｜>Hi, 27 + 45 is café 猫?<｜Assistant｜><think>So</think>\n\n<｜DSML｜x a="b"></｜DSML｜x>{EOS}',
)

if __name__ == "__main__":
    main(SCHEME)
