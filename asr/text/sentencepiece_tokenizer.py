"""SentencePiece models (Kudo and Richardson, 2018) behind the same table as every other tokenizer."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import Any

import sentencepiece
import torch

from asr.text.normalise import Normaliser
from asr.text.table import SPACE_MARK, TableTokenizer, escape, special_tokens

# Inside a model "▁" means space, so a written "▁" travels as this private-use character.
_WRITTEN_MARK = "\ue000"
# The trainer drops text that spells one of its own symbols; with a space inside, no text can.
_INNER_NAME = "{} "
_MOST_MERGED_PIECES = 500


class SentencePieceTokenizer(TableTokenizer):
    """Sub-word pieces; `kind` is "unigram" or "bpe".

    The ids of the model and of this tokenizer are the same where there is an unknown token; without one, special pieces
    of the model are left out of the table.
    """

    def __init__(
        self, kind: str, model: bytes, normaliser: Normaliser, unk: bool = True, sos_eos: bool = False
    ) -> None:
        self.kind = kind  # type: ignore[misc]
        self._model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError(f"this is not a SentencePiece model: {error}") from error
        tokens = special_tokens(unk, sos_eos)
        surfaces = [b""] * len(tokens)
        self._ids: list[int | None] = []
        for index in range(self._processor.get_piece_size()):
            if self._processor.is_control(index) or self._processor.is_unknown(index):
                self._ids.append(1 if unk and self._processor.is_unknown(index) else None)
                continue
            piece = self._processor.id_to_piece(index)
            self._ids.append(len(tokens))
            if self._processor.is_byte(index):
                tokens.append(piece)
                surfaces.append(bytes([int(piece[3:5], 16)]))
            else:
                tokens.append(escape(piece))
                surfaces.append(piece.replace(SPACE_MARK, " ").encode())
        super().__init__(tokens, surfaces, normaliser, unk, sos_eos)

    @classmethod
    def train(
        cls,
        texts: list[str],
        kind: str,
        vocab_size: int | str,
        unk: bool,
        sos_eos: bool,
        normaliser: Normaliser,
        byte_fallback: bool = False,
        character_coverage: float = 1.0,
    ) -> SentencePieceTokenizer:
        """A model of `vocab_size` tokens, special ones and all characters of the normalised texts included.

        "auto": the characters (and 256 bytes for byte_fallback) and one merged piece per square root of the number of
        characters in the text, at most 500; as many as the text gives where it gives fewer.
        Raises ValueError with the least or the largest possible size where a number does not fit the text.
        """
        specials = special_tokens(unk, sos_eos)
        if vocab_size == "auto":
            num_chars = sum(map(len, texts))
            base = len(specials) + len({char for text in texts for char in text} | {" "}) + 256 * byte_fallback
            size = base + min(_MOST_MERGED_PIECES, round(num_chars**0.5))
        else:
            size = int(vocab_size)
        model = _train_model(texts, kind, size, unk, sos_eos, byte_fallback, character_coverage)
        tokenizer = cls(kind, model, normaliser, unk, sos_eos)
        if vocab_size != "auto" and tokenizer.vocab_size != size:
            raise ValueError(
                f"tokenizer.vocab_size={size} is too large for this text: {kind} can make at most "
                f"{tokenizer.vocab_size} tokens of it; choose a smaller size or auto"
            )
        return tokenizer

    @property
    def model_bytes(self) -> bytes:
        return self._model

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"model": torch.frombuffer(bytearray(self._model), dtype=torch.uint8)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> SentencePieceTokenizer:
        model = bytes(state["model"].cpu().numpy())
        return cls(state["kind"], model, Normaliser.of(state["normaliser"]), state["unk"], state["sos_eos"])

    def decode(self, ids: Iterable[int]) -> str:
        return super().decode(ids).replace(_WRITTEN_MARK, SPACE_MARK)

    def encode_normalised(self, text: str) -> list[int]:
        pieces = self._processor.encode(text.replace(SPACE_MARK, _WRITTEN_MARK))
        return [index for index in (self._ids[piece] for piece in pieces) if index is not None]


def _train_model(
    texts: list[str], kind: str, size: int, unk: bool, sos_eos: bool, byte_fallback: bool, character_coverage: float
) -> bytes:
    """A serialised model of at most `size` tokens; the same for the same texts in any order.

    The model always has an unknown piece, which does not count as a token without `unk`.
    """
    num_hidden = 0 if unk else 1
    blank_piece, unk_piece, *rest = (_INNER_NAME.format(name) for name in special_tokens(True, sos_eos))
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sorted(text.replace(SPACE_MARK, _WRITTEN_MARK) for text in texts)),
            model_writer=written,
            model_type=kind,
            vocab_size=size + num_hidden,
            hard_vocab_limit=False,
            normalization_rule_name="identity",
            character_coverage=character_coverage,
            byte_fallback=byte_fallback,
            unk_id=1,
            unk_piece=unk_piece,
            control_symbols=[blank_piece, *rest],
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            max_sentence_length=1 << 24,
            num_threads=4,  # a fixed number: sums over threads differ with it
            minloglevel=2,
        )
    except RuntimeError as error:
        least = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
        if least:
            raise ValueError(
                f"tokenizer.vocab_size={size} is too small for this text: its characters and the special tokens alone "
                f"are {int(least.group(1)) - num_hidden}; choose at least that or auto, or a character_coverage below 1"
            ) from error
        raise ValueError(f"no {kind} tokenizer of {size} tokens can be made of this text: {error}") from error
    return written.getvalue()
