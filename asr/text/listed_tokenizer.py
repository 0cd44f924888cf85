"""A tokenizer of a given list of tokens, as other systems publish it: special tokens under any id, any order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import sentencepiece
import torch

from asr.text.normalise import Normaliser
from asr.text.table import SPACE_MARK, TableTokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class ListedTokenizer(TableTokenizer):
    """Tokens as listed; "▁" in a token stands for a space, "<0xE4>" for a byte, the special ones for nothing.

    Text is encoded by `model`, a serialised SentencePiece model whose pieces are in the list, or without one by as few
    tokens as will do. A space that no token spells is left out; any other such character becomes `unk_id`, or
    vanishes where that is None.

    Raises ValueError where tokens appear twice or an id lies outside the list.
    """

    kind = "listed"

    def __init__(
        self,
        tokens: list[str],
        blank_id: int = 0,
        unk_id: int | None = None,
        sos_eos_id: int | None = None,
        model: bytes = b"",
        normaliser: Normaliser | Mapping[str, Any] | None = None,
    ) -> None:
        specials = {index for index in (blank_id, unk_id, sos_eos_id) if index is not None}
        if any(not 0 <= index < len(tokens) for index in specials):
            raise ValueError(f"special tokens {sorted(specials)} do not all lie in a list of {len(tokens)} tokens")
        if len(set(tokens)) < len(tokens):
            twice = sorted({token for token in tokens if tokens.count(token) > 1})
            raise ValueError(f"tokens appear twice: {', '.join(map(repr, twice[:10]))}")
        surfaces = [b"" if index in specials else _surface(token) for index, token in enumerate(tokens)]
        super().__init__(list(tokens), surfaces, Normaliser.of(normaliser), False, False)
        self.blank_id, self.unk_id, self.sos_eos_id = blank_id, unk_id, sos_eos_id
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model) if model else None
        self._ids = {token: index for index, token in enumerate(tokens)}
        # Where tokens begin with the space before their word, so does the first word of a text.
        self._leading = any(len(token) > 1 and token.startswith(SPACE_MARK) for token in tokens)
        # A character with a token of its own is not spelled as a byte.
        order = sorted(range(len(tokens)), key=lambda index: not _BYTE.fullmatch(tokens[index]))
        self._by_surface = {surfaces[index]: index for index in order if surfaces[index]}
        self._longest = max(map(len, self._by_surface), default=0)

    @property
    def model_bytes(self) -> bytes:
        return self._model

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "kind": self.kind,
            "tokens": list(self.tokens),
            "normaliser": self.normaliser.as_dict(),
            "blank_id": self.blank_id,
            "unk_id": self.unk_id,
            "sos_eos_id": self.sos_eos_id,
        }
        return state | ({"model": torch.frombuffer(bytearray(self._model), dtype=torch.uint8)} if self._model else {})

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> ListedTokenizer:
        model = bytes(state["model"].cpu().numpy()) if "model" in state else b""
        ids = {name: state[name] for name in ("blank_id", "unk_id", "sos_eos_id")}
        return cls(state["tokens"], model=model, normaliser=state["normaliser"], **ids)

    def encode_normalised(self, text: str) -> list[int]:
        if self._processor is not None:
            pieces = self._processor.encode(text, out_type=str)
            found = [self._ids.get(piece, self.unk_id) for piece in pieces]
        else:
            found = self._fewest(text)
        return [index for index in found if index is not None]

    def _fewest(self, text: str) -> list[int | None]:
        """The least number of tokens that spell `text`; of equal numbers, the one with longer tokens at the end."""
        units = (" " + text if text and self._leading else text).encode()
        # For every end of a beginning of the text: how many tokens it takes, and how the last of them looks.
        cost: list[float] = [0.0]
        last: list[tuple[int, int | None]] = [(0, None)]
        for end in range(1, len(units) + 1):
            # What nothing spells costs more than any spelling of the rest.
            best, choice = cost[end - 1] + len(units) + 1, (end - 1, self._unspelled(units, end - 1))
            for start in range(max(0, end - self._longest), end):
                index = self._by_surface.get(units[start:end])
                if index is not None and cost[start] + 1 < best:
                    best, choice = cost[start] + 1, (start, index)
            cost.append(best)
            last.append(choice)
        found: list[int | None] = []
        end = len(units)
        while end:
            end, index = last[end]
            found.append(index)
        return found[::-1]

    def _unspelled(self, units: bytes, at: int) -> int | None:
        """What stands for a byte that no token spells: the unknown token, once for each character but spaces."""
        continues_character = units[at] & 0xC0 == 0x80
        return None if continues_character or units[at : at + 1] == b" " else self.unk_id


def _surface(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE_MARK, " ").encode()
