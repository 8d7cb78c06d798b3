"""Tokens to text, one at a time: what each token adds in bytes, and a decoder that shows only finished characters.

The text is that of the tokenizer's own decoder, with one difference in the byte-fallback kind: where a run of byte
tokens is no valid UTF-8 the library replaces every byte of the run, good characters included; here only the broken
part becomes U+FFFD, as in the byte-level kind, so a character can be shown as soon as it is complete.
"""

import codecs
import json
from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field, frozen

from mference_core.errors import ManifestError

Piece = Callable[[str], bytes]


def _byte_letters() -> dict[str, int]:
    """Return the letter-to-byte table of byte-level tokenizers: printable Latin-1 as itself, the rest from U+0100."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(own)]
    return {chr(b): b for b in own} | {chr(0x100 + n): b for n, b in enumerate(others)}


BYTE_OF = _byte_letters()


def byte_level(token: str) -> bytes:
    """Return the bytes of a byte-level token; one with a letter outside the table stands for itself."""
    if all(letter in BYTE_OF for letter in token):
        return bytes(BYTE_OF[letter] for letter in token)
    return token.encode()


def _fallback_byte(token: str) -> bytes | None:
    """Return the byte a token like `<0xE2>` stands for."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return None
    return None


@frozen(kw_only=True)
class Pieces:
    """How tokens of one vocabulary become text: `read` gives a token's bytes, `strip` the leading spaces to drop."""

    read: Piece
    strip: int = 0


def _unsupported(what: str) -> ManifestError:
    return ManifestError(
        what="the tokenizer's decoder", got=what, expected="ByteLevel, or Replace, ByteFallback, Fuse, Strip, Metaspace"
    )


def _word_piece(swaps: list[tuple[str, str]], *, fallback: bool) -> Piece:
    """Make the reader of tokens that are words with a stand-in for the space."""

    def read(token: str) -> bytes:
        byte = _fallback_byte(token) if fallback else None
        if byte is not None:
            return byte
        for old, new in swaps:
            token = token.replace(old, new)
        return token.encode()

    return read


def pieces_of(decoder: Mapping[str, Any] | None) -> Pieces:
    """Read the `decoder` object of a tokenizer.json. Raises `ManifestError` for a kind that is not known."""
    if not decoder:
        raise _unsupported("missing")
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        if set(kinds) - {"ByteLevel", "Fuse"}:
            raise _unsupported(json.dumps(decoder))
        return Pieces(read=byte_level)
    swaps: list[tuple[str, str]] = []
    strip = 0
    for at, step in enumerate(steps):
        fused = "Fuse" in kinds[:at]
        match step:
            case {"type": "ByteFallback"} | {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
                swaps.append((old, new))
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                strip += start
            case {"type": "Metaspace", "replacement": str(old)}:
                swaps.append((old, " "))
                strip += step.get("prepend_scheme", "always") != "never"
            case _:
                raise _unsupported(json.dumps(step))
    return Pieces(read=_word_piece(swaps, fallback="ByteFallback" in kinds), strip=strip)


@define(kw_only=True, eq=False)
class Detokenizer:
    """Text of a growing token sequence; the deltas joined are the text of the whole, however it was cut.

    Nothing shown is ever taken back: bytes of an unfinished character wait, and `flush` ends them with one U+FFFD.
    Each push costs the bytes of its token, not of the history.
    """

    token_bytes: Callable[[int], bytes]
    strip: int = 0
    _decoder: codecs.IncrementalDecoder = field(
        init=False, factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def push(self, token: int) -> str:
        """Return the text that `token` completes; control tokens and unknown ids have none."""
        return self._trim(self._decoder.decode(self.token_bytes(token)))

    def flush(self) -> str:
        """Return what an unfinished character leaves behind, and start the next character afresh."""
        return self._trim(self._decoder.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        while self.strip and text:
            if text[0] != " ":
                self.strip = 0
                break
            text, self.strip = text[1:], self.strip - 1
        return text
