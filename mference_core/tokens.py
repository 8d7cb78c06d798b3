"""The tokenizer of a checkpoint: text to ids and back, with control tokens kept apart from text that spells them.

Text is text: `<bos>` typed by a user becomes the ids of those five characters, unless the caller asks for control
tokens. A control token is an added token that is flagged special or that the model's own vocabulary does not hold
(such as `<think>` in some families, which is not flagged); other added tokens (runs of spaces) stay ordinary text.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import tokenizers
from attrs import define, field

from mference_core.detokenize import Detokenizer, Pieces, pieces_of
from mference_core.errors import ManifestError, RequestError

TOKENIZER_FILE = "tokenizer.json"
VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def tokenizer_directory(model: Path) -> Path:
    """Return the folder of `model` that holds its tokenizer: `tokenizer/`, else the model's own."""
    inner = model / "tokenizer"
    return inner if (inner / TOKENIZER_FILE).is_file() else model


def _read_text(path: Path) -> str | None:
    """Return the text of a file, or None if there is none; raises `ManifestError` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(what=f"{path} cannot be read: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, {} if there is no file; raises `ManifestError` if it is something else."""
    text = _read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(what=f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ManifestError(what=str(path), got=type(value).__name__, expected="a JSON object")
    return value


def _named(value: Any) -> str | None:
    """Return the spelling of a token that a config writes as a string or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template of a checkpoint: the .jinja file, then the .json file, then the tokenizer's config."""
    text = _read_text(directory / "chat_template.jinja")
    if text is not None:
        return text
    value = _read_object(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(value, list):  # named templates
        pairs = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = pairs.get("default")
    return value if isinstance(value, str) else None


@define(kw_only=True, eq=False)
class Tokenizer:
    """One checkpoint's vocabulary. `load` makes it; everything else only reads it.

    `control` maps the spelling of each control token to its id, `template` is the checkpoint's chat template if it
    has one, `variables` the token names templates may use, `generation` the checkpoint's generation_config.json.
    """

    raw: tokenizers.Tokenizer
    control: Mapping[str, int]
    template: str | None = None
    variables: Mapping[str, str] = field(factory=dict)
    generation: Mapping[str, Any] = field(factory=dict)
    pieces: Pieces
    control_ids: frozenset[int] = field(init=False)
    _eats_left: frozenset[str] = field(init=False)
    _eats_right: frozenset[str] = field(init=False)
    _lengths: Mapping[str, tuple[int, ...]] = field(init=False)
    _first: re.Pattern[str] = field(init=False)
    _bytes: dict[int, bytes] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        """Index the control tokens."""
        self.control_ids = frozenset(self.control.values())
        added = self.raw.get_added_tokens_decoder().values()
        self._eats_left = frozenset(t.content for t in added if t.lstrip)
        self._eats_right = frozenset(t.content for t in added if t.rstrip)
        lengths: dict[str, set[int]] = {}
        for spelling in self.control:
            lengths.setdefault(spelling[0], set()).add(len(spelling))
        self._lengths = {first: tuple(sorted(sizes, reverse=True)) for first, sizes in lengths.items()}
        letters = "".join(map(re.escape, lengths))
        self._first = re.compile(f"[{letters}]" if letters else r"(?!)")

    @classmethod
    def load(cls, directory: Path, *, control: Iterable[str] = ()) -> Self:
        """Read the tokenizer of a model directory. Raises `ManifestError` if it is missing or damaged.

        `control` names tokens that are control whatever the files say of them (`ChatFormat.control`).
        """
        folder = tokenizer_directory(Path(directory))
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise ManifestError(
                what=f"no {TOKENIZER_FILE} in {folder}", remedy="copy the tokenizer files of the checkpoint there"
            )
        try:
            raw = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ManifestError(what=f"{path} cannot be read: {error}") from error
        config = _read_object(folder / "tokenizer_config.json")
        names = _read_object(folder / "special_tokens_map.json") | config
        return cls.wrap(
            raw,
            template=_template(folder, config),
            variables={key: text for key in VARIABLES if (text := _named(names.get(key))) is not None},
            generation=_read_object(folder / "generation_config.json"),
            control=control,
        )

    @classmethod
    def wrap(
        cls,
        raw: tokenizers.Tokenizer,
        *,
        template: str | None = None,
        variables: Mapping[str, str] | None = None,
        generation: Mapping[str, Any] | None = None,
        control: Iterable[str] = (),
    ) -> Self:
        """Take over a tokenizer of the `tokenizers` library. Raises `ManifestError` if its decoder is not known."""
        added = {token.content: token for token in raw.get_added_tokens_decoder().values()}
        spellings = dict.fromkeys(
            text
            for text, token in added.items()
            if token.special or (raw.model.token_to_id(text) is None and not text.isspace())
        ) | dict.fromkeys(text for text in control if raw.token_to_id(text) is not None)
        unflagged = {text: added.get(text) for text in spellings if text not in added or not added[text].special}
        raw.add_special_tokens(
            [
                tokenizers.AddedToken(
                    text, special=True, normalized=False, lstrip=bool(t and t.lstrip), rstrip=bool(t and t.rstrip)
                )
                for text, t in unflagged.items()
            ]
        )
        raw.encode_special_tokens = True  # from here on the library reads spelt control tokens as text
        raw.no_padding()
        raw.no_truncation()
        decoder = json.loads(raw.decoder.__getstate__()) if raw.decoder is not None else None
        return cls(
            raw=raw,
            control={text: number for text in spellings if (number := raw.token_to_id(text)) is not None},
            template=template,
            variables=variables or {},
            generation=generation or {},
            pieces=pieces_of(decoder),
        )

    @classmethod
    def of_bytes(cls, control: Iterable[str]) -> Self:
        """Make a tokenizer with a token per byte and these control tokens: what tries a dialect without a vocabulary."""
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
        raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        raw.decoder = tokenizers.decoders.ByteLevel()
        raw.add_special_tokens(list(dict.fromkeys(control)))
        return cls.wrap(raw)

    @property
    def size(self) -> int:
        """Ids the vocabulary names, added tokens included; a model may have more rows."""
        return self.raw.get_vocab_size(with_added_tokens=True)

    def id_of(self, spelling: str) -> int:
        """Return the id of a control token. Raises `ManifestError` if the vocabulary has none of that spelling."""
        if spelling not in self.control:
            raise ManifestError(
                what=f"the tokenizer has no control token {spelling}", remedy="use the checkpoint's own tokenizer files"
            )
        return self.control[spelling]

    def find_control(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield (offset, spelling) of each control token spelt in `text`, left to right, longest first."""
        at = 0
        while found := self._first.search(text, at):
            at = found.start()
            sizes = self._lengths[found.group()]
            length = next((n for n in sizes if text[at : at + n] in self.control), 0)
            if length:
                yield at, text[at : at + length]
            at += length or 1

    def encode(self, text: str, *, control: bool = False) -> list[int]:
        """Return the ids of `text`; with `control` the control tokens spelt in it become their ids.

        No token is added at either end. Raises `RequestError` if the text holds half a surrogate pair.
        """
        return self.encode_marked(text) if control else self._plain(text)

    def encode_marked(self, text: str, marker: str = "") -> list[int]:
        """Return the ids of rendered text: control tokens as such, `marker` characters taken out of everything else.

        A spelling that a marker interrupts is text, which is how rendered user text stays text.
        """
        ids: list[int] = []
        start, eats = 0, False
        for at, spelling in [*self.find_control(text), (len(text), "")]:
            segment = text[start:at]
            segment = segment.lstrip() if eats else segment
            segment = segment.rstrip() if spelling in self._eats_left else segment
            ids += self._plain(segment.replace(marker, "") if marker else segment)
            if spelling:
                ids.append(self.control[spelling])
            start, eats = at + len(spelling), spelling in self._eats_right
        return ids

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(what="the text", got="not valid Unicode", expected="no half surrogate pairs") from error
        ids: list[int] = self.raw.encode(text, add_special_tokens=False).ids
        if self.control_ids.isdisjoint(ids):
            return ids
        # Merges put a control token together: cut each spelling after its first character.
        cuts = [at + 1 for at, _ in self.find_control(text)]
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return [number for part in parts for number in self.raw.encode(part, add_special_tokens=False).ids]

    def token_bytes(self, number: int) -> bytes:
        """Return the bytes an id adds to the text: none for control tokens and ids without a token."""
        known = self._bytes.get(number)
        if known is None:
            known = b"" if number in self.control_ids else self.spelling(number)
            self._bytes[number] = known
        return known

    def spelling(self, number: int) -> bytes:
        """Return the bytes of an id, control tokens spelt out."""
        token = self.raw.id_to_token(number) if number >= 0 else None
        if token is None:
            return b""
        return token.encode() if number in self.control_ids else self.pieces.read(token)

    def detokenizer(self, *, spell_control: bool = False, first: bool = True) -> Detokenizer:
        """Start turning ids into text; `first` False if they go on from earlier text (no leading space is dropped)."""
        read = self.spelling if spell_control else self.token_bytes
        return Detokenizer(token_bytes=read, strip=self.pieces.strip if first else 0)

    def decode(self, ids: Iterable[int], *, spell_control: bool = False) -> str:
        """Return the text of `ids`; broken bytes are U+FFFD, control tokens are left out unless `spell_control`."""
        stream = self.detokenizer(spell_control=spell_control)
        return "".join([stream.push(number) for number in ids] + [stream.flush()])
