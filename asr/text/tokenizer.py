"""Text to token ids and back: what every tokenizer offers, and how one is trained, stored and loaded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from asr.text.listed_tokenizer import ListedTokenizer
from asr.text.normalise import Normaliser
from asr.text.sentencepiece_tokenizer import SentencePieceTokenizer
from asr.text.symbol_tokenizers import ByteTokenizer, CharTokenizer, WordTokenizer
from asr.text.table import read_tokens

KINDS = ("char", "bpe", "unigram", "byte", "word")


class Tokenizer(Protocol):
    """Ids run from 0 to vocab_size - 1; 0 is the blank unless another system's list says otherwise. Every text passes
    `normaliser` before it is encoded.

    Special tokens cannot be written: text that spells "<blk>" or "<unk>" is encoded as text.
    """

    tokens: list[str]
    normaliser: Normaliser
    unk_id: int | None
    sos_eos_id: int | None

    @property
    def blank_id(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def hash(self) -> str:
        """sha256 over everything that defines the tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. What no token spells becomes `unk_id`, or vanishes where that is None."""

    def decode(self, ids: Iterable[int]) -> str:
        """Normalised text of token ids. Special tokens, the unknown one included, leave nothing."""

    def unknown_share(self, texts: Iterable[str]) -> tuple[float, Counter[str]]:
        """Share (0 to 1) of the characters (without spaces; for words: the words) of `texts` that no token spells,
        and how often each of them occurs."""

    def state_dict(self) -> dict[str, Any]:
        """All that defines the tokenizer, in types that torch.load(weights_only=True) accepts."""

    def save(self, folder: Path) -> None:
        """Write tokens.txt, tokenizer.json and, where there is a SentencePiece model, bpe.model into `folder`."""


def train_tokenizer(
    texts: Iterable[str],
    kind: str = "char",
    vocab_size: int | str = "auto",
    byte_fallback: bool = False,
    character_coverage: float = 1.0,
    sos_eos: bool = False,
    unk: bool = True,
    normaliser: Normaliser | Mapping[str, Any] | None = None,
) -> Tokenizer:
    """Make a tokenizer from transcripts; the same for the same transcripts in any order.

    kind: "char", "word" (each symbol of the text is a token), "bpe", "unigram" (SentencePiece), "byte" (UTF-8).
    vocab_size: number of tokens, special ones included, or "auto". For char and word a number keeps the most frequent
        symbols and auto keeps all; for SentencePiece auto is the rule of `SentencePieceTokenizer.train`.
    byte_fallback: bpe and unigram spell characters without a piece as UTF-8 bytes.
    character_coverage: bpe and unigram leave the rarest characters, up to a share of 1 - this, without a piece.
    sos_eos: reserve the token <sos/eos>, for attention decoders.
    unk: have the token <unk>; without it unknown characters vanish. Ignored for bytes.

    Raises ValueError for an unknown kind, for texts without a character, and for a size that the text cannot give.
    """
    if kind not in KINDS:
        raise ValueError(f"tokenizer.kind={kind!r}: choose one of {', '.join(KINDS)}")
    if vocab_size != "auto" and (isinstance(vocab_size, str) or vocab_size < 1):
        raise ValueError(f"tokenizer.vocab_size={vocab_size!r}: give a positive number or auto")
    if kind not in ("bpe", "unigram") and (byte_fallback or character_coverage != 1.0):
        raise ValueError(f"tokenizer.byte_fallback and character_coverage are for bpe and unigram, not for kind={kind}")
    normaliser = Normaliser.of(normaliser)
    if kind == "byte":
        return ByteTokenizer.train(vocab_size, sos_eos, normaliser)
    normalised = [text for text in map(normaliser, texts) if text]
    if not normalised:
        raise ValueError(f"no {kind} tokenizer can be made: every training transcript is empty after normalisation")
    if kind in ("bpe", "unigram"):
        return SentencePieceTokenizer.train(
            normalised, kind, vocab_size, unk, sos_eos, normaliser, byte_fallback, character_coverage
        )
    symbols = WordTokenizer if kind == "word" else CharTokenizer
    return symbols.train(normalised, vocab_size, unk, sos_eos, normaliser)


def tokenizer_from_state(state: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer whose `state_dict()` was stored. ValueError for a state of another kind of thing."""
    classes: dict[str, type[CharTokenizer | ByteTokenizer | SentencePieceTokenizer | ListedTokenizer]] = {
        "char": CharTokenizer,
        "word": WordTokenizer,
        "byte": ByteTokenizer,
        "bpe": SentencePieceTokenizer,
        "unigram": SentencePieceTokenizer,
        "listed": ListedTokenizer,
    }
    kind = str(state.get("kind"))
    if kind not in classes:
        raise ValueError(f"this is no tokenizer's state: kind={kind!r} is none of {', '.join(classes)}")
    return classes[kind].from_state(dict(state))


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer that `save(folder)` wrote. ValueError names a file that is missing or was changed since."""
    folder = Path(folder)
    for name in ("tokenizer.json", "tokens.txt"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no tokenizer: {name} is missing")
    try:
        settings = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / 'tokenizer.json'} is broken: {error}") from error
    state = settings | {"tokens": read_tokens(folder / "tokens.txt")}
    if state.get("kind") in ("bpe", "unigram") and not (folder / "bpe.model").is_file():
        raise ValueError(f"{folder} holds no tokenizer: bpe.model is missing")
    if (folder / "bpe.model").is_file():
        state["model"] = torch.frombuffer(bytearray((folder / "bpe.model").read_bytes()), dtype=torch.uint8)
    try:
        tokenizer = tokenizer_from_state(state)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    if tokenizer.hash != settings.get("hash") or tokenizer.tokens != state["tokens"]:
        raise ValueError(
            f"{folder}: the tokenizer's files do not belong together (tokens.txt, bpe.model or tokenizer.json was "
            "changed after they were written); restore them from the run's checkpoint or train the tokenizer again"
        )
    return tokenizer


def saved_tokenizer(folder: str, texts: Iterable[str] = (), vocab_size: int | str = "auto") -> Tokenizer:
    """The tokenizer of a run (its folder, or `tokenizer` in it), whatever the training `texts` are.

    A `vocab_size` other than "auto", as experiments have it, must be the one it has.
    Raises ValueError as `load_tokenizer` does and where the size is another.
    """
    inside = Path(folder) / "tokenizer"
    tokenizer = load_tokenizer(inside if inside.is_dir() else folder)
    if vocab_size not in ("auto", tokenizer.vocab_size):
        raise ValueError(
            f"{folder}: its tokenizer has {tokenizer.vocab_size} tokens; set tokenizer.vocab_size to that or to auto"
        )
    return tokenizer
