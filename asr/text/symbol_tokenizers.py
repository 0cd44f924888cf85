"""Tokenizers whose tokens are plain symbols: characters, words, bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from asr.text.normalise import Normaliser
from asr.text.table import SPACE_MARK, TableTokenizer, escape, special_tokens, unescape


class CharTokenizer(TableTokenizer):
    r"""One token per character, ordered by code point. Space is the token "▁"; a written "▁" is the token "\▁"."""

    kind = "char"

    def __init__(self, tokens: list[str], normaliser: Normaliser, unk: bool = True, sos_eos: bool = False) -> None:
        num_special = len(special_tokens(unk, sos_eos))
        symbols = [self.symbol(token) for token in tokens[num_special:]]
        surfaces = [b""] * num_special + [symbol.encode() for symbol in symbols]
        super().__init__(tokens, surfaces, normaliser, unk, sos_eos)
        self._ids = {symbol: index for index, symbol in enumerate(symbols, start=num_special)}

    @staticmethod
    def token(symbol: str) -> str:
        """How a symbol is named in tokens.txt."""
        if symbol == " ":
            return SPACE_MARK
        return "\\" + symbol if symbol == SPACE_MARK else escape(symbol)

    @staticmethod
    def symbol(token: str) -> str:
        """The symbol that `token` names."""
        return " " if token == SPACE_MARK else unescape(token)

    @staticmethod
    def split(text: str) -> Iterable[str]:
        """The symbols of normalised text."""
        return text

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int | str, unk: bool, sos_eos: bool, normaliser: Normaliser
    ) -> CharTokenizer:
        """All symbols of normalised `texts`, or for a number `vocab_size` the most frequent ones.

        Raises ValueError where the text has too few symbols for `vocab_size`.
        """
        counts = Counter(symbol for text in texts for symbol in cls.split(text))
        specials = special_tokens(unk, sos_eos)
        most = len(counts) + len(specials)
        size = most if vocab_size == "auto" else int(vocab_size)
        if not len(specials) < size <= most:
            raise ValueError(
                f"tokenizer.vocab_size={vocab_size}: with {cls.kind} tokens this text allows {len(specials) + 1} to "
                f"{most}; choose a size in that range or auto"
            )
        by_frequency = sorted(counts, key=lambda symbol: (-counts[symbol], symbol))
        kept = sorted(by_frequency[: size - len(specials)])
        return cls([*specials, *map(cls.token, kept)], normaliser, unk, sos_eos)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> CharTokenizer:
        return cls(list(state["tokens"]), Normaliser.of(state["normaliser"]), state["unk"], state["sos_eos"])

    def encode_normalised(self, text: str) -> list[int]:
        ids = (self._ids.get(symbol, self.unk_id) for symbol in self.split(text))
        return [index for index in ids if index is not None]


class WordTokenizer(CharTokenizer):
    r"""One token per word between spaces. A word that spells a special token carries a backslash: "\<unk>"."""

    kind = "word"
    joint = b" "

    @staticmethod
    def split(text: str) -> Iterable[str]:
        return text.split()

    def units(self, text: str) -> Iterable[str]:
        return text.split()


class ByteTokenizer(TableTokenizer):
    """One token per byte of UTF-8: no text is ever unknown, so there is no unknown token."""

    kind = "byte"

    def __init__(self, normaliser: Normaliser, sos_eos: bool = False) -> None:
        specials = special_tokens(False, sos_eos)
        self._first = len(specials)
        super().__init__(
            [*specials, *(f"<0x{byte:02X}>" for byte in range(256))],
            [b""] * self._first + [bytes([byte]) for byte in range(256)],
            normaliser,
            False,
            sos_eos,
        )

    @classmethod
    def train(cls, vocab_size: int | str, sos_eos: bool, normaliser: Normaliser) -> ByteTokenizer:
        """Nothing to learn. Raises ValueError for a `vocab_size` other than "auto" and the one that bytes have."""
        tokenizer = cls(normaliser, sos_eos)
        if vocab_size not in ("auto", tokenizer.vocab_size):
            raise ValueError(
                f"tokenizer.vocab_size={vocab_size}: a byte tokenizer has {tokenizer.vocab_size} tokens; write auto"
            )
        return tokenizer

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> ByteTokenizer:
        return cls(Normaliser.of(state["normaliser"]), state["sos_eos"])

    def encode_normalised(self, text: str) -> list[int]:
        return [self._first + byte for byte in text.encode()]
