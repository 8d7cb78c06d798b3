"""Tokenizer and detokeniser: exact round trips, control tokens apart from their spelling, one-line errors."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from mference_core.detokenize import pieces_of
from mference_core.errors import ManifestError, RequestError
from mference_core.tokens import Tokenizer

CONTROL = ["<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|tool>", "<|tool_call>", "<tool_call|>", '<|"|>']
TEXTS = [
    "hello world, the turn of the tool call",
    "naïve café — 日本語",
    "a👍🏽é—日本 🎉🎉",
    "def f(x):\n    return x\n\n",
]


def raw_byte_level() -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=CONTROL,
        show_progress=False,
    )
    raw.train_from_iterator(TEXTS, trainer)
    raw.add_tokens([AddedToken("<think>", special=False, normalized=False), AddedToken("   ", special=False)])
    return raw


def raw_byte_fallback() -> tokenizers.Tokenizer:
    """Build what SentencePiece makes: a mark for the space, 256 byte tokens, no unknown text."""
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "w"), ("<", "|"), ("t", "u"), ("n", "|")]
    letters = sorted({*"".join(TEXTS[:1]).replace(" ", "▁"), "▁", "<", ">", "|", '"', "\n"})
    words = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *("".join(pair) for pair in merges)]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw.add_special_tokens(CONTROL)
    return raw


@cache
def byte_level() -> Tokenizer:
    return Tokenizer.wrap(raw_byte_level())


@cache
def byte_fallback() -> Tokenizer:
    return Tokenizer.wrap(raw_byte_fallback())


BOTH = pytest.mark.parametrize("make", [byte_level, byte_fallback])
HARD = "a👍🏽é—日本 🏳️‍🌈 e\u0301 \x00 end"


def deltas(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.detokenizer()
    return [stream.push(number) for number in ids] + [stream.flush()]


@BOTH
def test_characters_split_over_tokens_stream_whole(make: Callable[[], Tokenizer]) -> None:
    """Every emoji part arrives at once with its last byte, and no replacement character is ever shown."""
    tokenizer = make()
    parts = deltas(tokenizer, tokenizer.encode(HARD))
    assert "".join(parts) == HARD == tokenizer.decode(tokenizer.encode(HARD))
    assert not any("\ufffd" in part for part in parts)
    assert parts[-1] == ""


@BOTH
@pytest.mark.parametrize("kept", [1, 2, 3])
def test_an_unfinished_tail_is_one_replacement_character(make: Callable[[], Tokenizer], kept: int) -> None:
    tokenizer = make()
    pieces = byte_ids(tokenizer, "🎉".encode()[:kept])
    parts = deltas(tokenizer, tokenizer.encode("ab") + pieces)
    assert "".join(parts[:-1]) == "ab"
    assert parts[-1] == "\ufffd"


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    letters = {tokenizer.pieces.read(letter)[0]: letter for letter in pre_tokenizers.ByteLevel.alphabet()}
    names = [letters[byte] if tokenizer is byte_level() else f"<0x{byte:02X}>" for byte in data]
    return [number for name in names if (number := tokenizer.raw.token_to_id(name)) is not None]


@BOTH
def test_a_space_after_an_incomplete_character_is_kept(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    half = byte_ids(tokenizer, "🎉".encode()[:2])
    parts = deltas(tokenizer, [*half, *tokenizer.encode(" world")])
    assert parts[:2] == ["", ""]
    assert "".join(parts) == "\ufffd world"


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 350), max_size=40))
def test_byte_level_deltas_join_to_the_librarys_own_decode(ids: list[int]) -> None:
    tokenizer = byte_level()
    assert (
        "".join(deltas(tokenizer, ids)) == tokenizer.raw.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
    )


@settings(max_examples=200, deadline=None)
@given(
    chunks=st.lists(
        st.one_of(st.integers(0, 300), st.characters(min_codepoint=0x80, exclude_categories=["Cs"])), max_size=30
    )
)
def test_byte_fallback_deltas_join_to_the_librarys_own_decode_of_valid_bytes(chunks: list[int | str]) -> None:
    """Runs of byte tokens that are valid UTF-8 read as the library reads them, whole characters at once."""
    tokenizer = byte_fallback()
    ids: list[int] = []
    for chunk in chunks:
        if isinstance(chunk, str):
            ids += byte_ids(tokenizer, chunk.encode())
        elif not 0x80 <= chunk - len(CONTROL) < 0x100:
            ids.append(chunk)
    parts = deltas(tokenizer, ids)
    assert "".join(parts) == tokenizer.raw.decode(ids, skip_special_tokens=True)
    assert parts[-1] == ""


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 300), max_size=40))
def test_byte_fallback_replaces_only_the_broken_bytes(ids: list[int]) -> None:
    tokenizer = byte_fallback()
    whole = b"".join(tokenizer.token_bytes(number) for number in ids)
    assert "".join(deltas(tokenizer, ids)) == whole.decode(errors="replace")


def test_leading_space_of_sentencepiece_decoders_is_dropped_once() -> None:
    raw = raw_byte_fallback()
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer.wrap(raw)
    for text in ("  hello world", " hello", "hello ", " "):
        ids = tokenizer.encode(text)
        assert "".join(deltas(tokenizer, ids)) == raw.decode(ids) == text.removeprefix(" ")
    stream = tokenizer.detokenizer(first=False)
    assert stream.push(tokenizer.encode(" ")[0]) == " "


@BOTH
def test_spelt_control_tokens_are_text_unless_asked_for(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    for text in ("A<|turn>model\nB", "".join(tokenizer.control), "<eos><eos", "<|tool_call><|tool>"):
        ids = tokenizer.encode(text)
        assert tokenizer.control_ids.isdisjoint(ids)
        assert tokenizer.decode(ids) == text
    ids = tokenizer.encode("A<|turn>B<|tool_call>", control=True)
    assert [n for n in ids if n in tokenizer.control_ids] == [
        tokenizer.id_of("<|turn>"),
        tokenizer.id_of("<|tool_call>"),
    ]
    assert tokenizer.decode(ids) == "AB"
    assert tokenizer.decode(ids, spell_control=True) == "A<|turn>B<|tool_call>"


@BOTH
def test_control_encoding_equals_the_librarys(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    fresh = raw_byte_level() if make is byte_level else raw_byte_fallback()
    text = "<bos><|turn>hello world\n<turn|>\n<|tool>hello<|tool_call> the <eos>"
    assert tokenizer.encode(text, control=True) == fresh.encode(text, add_special_tokens=False).ids


def test_added_tokens_that_are_not_flagged_special() -> None:
    """`<think>` is control although its file does not say so; a run of spaces is text."""
    tokenizer = byte_level()
    assert "<think>" in tokenizer.control
    assert "   " not in tokenizer.control
    spaces = tokenizer.raw.token_to_id("   ")
    assert spaces in tokenizer.encode("a   b")
    assert tokenizer.decode(tokenizer.encode("a   b<think>")) == "a   b<think>"


def test_control_tokens_named_by_the_caller() -> None:
    """A token the files call ordinary, or only the vocabulary holds, is control if the dialect says so."""
    raw = raw_byte_fallback()
    raw.add_tokens([AddedToken("he", special=False, normalized=False)])
    tokenizer = Tokenizer.wrap(raw, control=["he", "hell", "absent"])
    assert set(tokenizer.control) == {*CONTROL, "he", "hell"}
    assert tokenizer.control_ids.isdisjoint(tokenizer.encode("he hell hello"))
    assert tokenizer.decode(tokenizer.encode("he hell hello")) == "he hell hello"
    assert tokenizer.encode("hell", control=True) == [raw.token_to_id("hell")]


def test_merges_that_rebuild_a_control_token_are_cut_apart() -> None:
    """If the vocabulary's own merges make `<eos>` of its letters, text still does not become the token."""
    vocabulary = {t: n for n, t in enumerate(["<eos>", "<", "eos>", "e", "o", "s", ">", "eo", "s>", "a"])}
    merges = [("e", "o"), ("s", ">"), ("eo", "s>"), ("<", "eos>")]
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens(["<eos>"])
    tokenizer = Tokenizer.wrap(raw)
    assert tokenizer.encode("a<eos>a<eos>") == [9, 1, 2, 9, 1, 2]
    assert tokenizer.decode([9, 1, 2]) == "a<eos>"
    assert tokenizer.encode("a<eos>", control=True) == [9, 0]


def test_control_tokens_that_eat_spaces() -> None:
    raw = raw_byte_level()
    raw.add_special_tokens([AddedToken("<end>", rstrip=True, lstrip=True, special=True)])
    text = "hello  <end>  world"
    expected = raw.encode(text, add_special_tokens=False).ids
    assert Tokenizer.wrap(raw).encode(text, control=True) == expected


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match="the text is not valid Unicode"):
        byte_level().encode("a\ud83d")


def test_ids_without_a_token_have_no_text() -> None:
    assert byte_level().decode([10**6, *byte_level().encode("hi")]) == "hi"
    assert byte_level().token_bytes(-1) == b""


def test_bytes_of_half_a_character() -> None:
    tokenizer = byte_fallback()
    assert tokenizer.token_bytes(byte_ids(tokenizer, b"\xf0")[0]) == b"\xf0"
    assert tokenizer.token_bytes(tokenizer.id_of("<eos>")) == b""


def save(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    raw_byte_level().save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return folder


def test_loading_reads_template_variables_and_generation_config(tmp_path: Path) -> None:
    """The template file goes before the config's, and the `tokenizer` folder before the model's."""
    save(tmp_path, tokenizer_config={"chat_template": "outer"})
    inner = save(
        tmp_path / "tokenizer",
        tokenizer_config={"bos_token": {"content": "<bos>"}, "chat_template": "config"},
        special_tokens_map={"eos_token": "<eos>"},
        generation_config={"temperature": 1.0},
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.template, tokenizer.generation) == ("config", {"temperature": 1.0})
    assert tokenizer.variables == {"bos_token": "<bos>", "eos_token": "<eos>"}
    (inner / "chat_template.json").write_text('{"chat_template": "json"}')
    assert Tokenizer.load(tmp_path).template == "json"
    (inner / "chat_template.jinja").write_text("jinja")
    assert Tokenizer.load(tmp_path).template == "jinja"
    named = save(tmp_path / "named", tokenizer_config={"chat_template": [{"name": "default", "template": "d"}]})
    assert Tokenizer.load(named).template == "d"
    assert Tokenizer.load(save(tmp_path / "bare")).template is None


def test_loading_refuses_what_it_cannot_read_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"no tokenizer.json in .*; copy the tokenizer files") as caught:
        Tokenizer.load(tmp_path / "absent")
    assert "\n" not in str(caught.value)
    broken = save(tmp_path / "broken")
    (broken / "tokenizer.json").write_text('{"version": "1.0", "model":\n\n')
    with pytest.raises(ManifestError, match=r"tokenizer.json cannot be read") as caught:
        Tokenizer.load(broken)
    assert "\n" not in str(caught.value)
    with pytest.raises(ManifestError, match=r"tokenizer_config.json is not JSON"):
        Tokenizer.load(save(tmp_path / "config", tokenizer_config="{"))
    with pytest.raises(ManifestError, match=r"tokenizer_config.json is list; expected a JSON object"):
        Tokenizer.load(save(tmp_path / "list", tokenizer_config=[]))
    latin = save(tmp_path / "latin")
    (latin / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ManifestError, match=r"chat_template.jinja cannot be read"):
        Tokenizer.load(latin)
    with pytest.raises(ManifestError, match="the tokenizer has no control token <nope>"):
        byte_level().id_of("<nope>")


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_unknown_decoders_are_refused(decoder: dict[str, object] | None) -> None:
    with pytest.raises(ManifestError, match=r"the tokenizer's decoder is .*; expected ByteLevel"):
        pieces_of(decoder)


def test_a_tokenizer_of_bytes_has_its_control_tokens_and_reads_back_any_text() -> None:
    made = Tokenizer.of_bytes(["<a>", "<b>", "<a>"])
    assert made.size == 258
    assert made.control == {"<a>": 256, "<b>": 257}
    text = "é <b> 日本\n"
    assert len(made.encode(text)) == len(text.encode())
    assert made.decode(made.encode(text)) == text
    assert made.encode("<a>x<b>", control=True)[::2] == [256, 257]
