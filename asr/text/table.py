"""What every tokenizer is underneath: a table of tokens with the text that each one stands for."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from asr.text.normalise import Normaliser

BLANK, UNK, SOS_EOS = "<blk>", "<unk>", "<sos/eos>"
SPACE_MARK = "▁"


def special_tokens(unk: bool, sos_eos: bool) -> list[str]:
    """The tokens before those of the text; the blank is always id 0."""
    return [BLANK, *([UNK] if unk else []), *([SOS_EOS] if sos_eos else [])]


def escape(text: str) -> str:
    r"""`text` as a token that cannot be taken for a special one: "<unk>" -> "\<unk>", "\ab" -> "\\ab"."""
    return "\\" + text if text in (BLANK, UNK, SOS_EOS) or (len(text) > 1 and text[0] == "\\") else text


def unescape(token: str) -> str:
    return token[1:] if len(token) > 1 and token[0] == "\\" else token


def write_tokens(path: Path, tokens: Sequence[str]) -> None:
    """One line `token id` per token. ValueError for a token that appears twice or holds a line end."""
    for token, count in Counter(tokens).items():
        if count > 1 or "\n" in token:
            raise ValueError(f"{path}: token {token!r} {'appears twice' if count > 1 else 'holds a line end'}")
    path.write_text("".join(f"{token} {index}\n" for index, token in enumerate(tokens)), encoding="utf-8", newline="\n")


def read_tokens(path: Path) -> list[str]:
    """The tokens of a file of `token id` lines. ValueError, with the line, unless ids are 0, 1, 2, ... without gaps."""
    tokens: list[str] = []
    # Neither splitlines() nor split() will do: a token may be a space or a Unicode line separator.
    for number, line in enumerate(path.read_bytes().decode("utf-8").removesuffix("\n").split("\n"), start=1):
        token, separator, index = line.removesuffix("\r").rpartition(" ")
        if not separator or not token or index != str(number - 1):
            raise ValueError(f"{path}:{number}: expected `token {number - 1}`, found {line!r}")
        tokens.append(token)
    twice = [token for token, count in Counter(tokens).items() if count > 1]
    if twice:
        raise ValueError(f"{path}: tokens appear twice: {', '.join(map(repr, twice[:10]))}")
    return tokens


class TableTokenizer:
    """Shared by all tokenizers; a kind adds `encode_normalised`.

    tokens: names of all tokens in the order of their ids, special tokens first.
    surfaces: for each token the UTF-8 bytes that it stands for, b"" for special tokens.
    joint: what stands between two tokens in text.
    """

    kind: ClassVar[str]
    joint: ClassVar[bytes] = b""
    blank_id = 0

    def __init__(
        self, tokens: list[str], surfaces: list[bytes], normaliser: Normaliser, unk: bool, sos_eos: bool
    ) -> None:
        assert len(tokens) == len(surfaces) == len(set(tokens)), "tokens must be unique, each with its surface"
        self.tokens = tokens
        self.normaliser = normaliser
        self.unk_id: int | None = 1 if unk else None
        self.sos_eos_id: int | None = 1 + unk if sos_eos else None
        self._surfaces = surfaces

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    def encode_normalised(self, text: str) -> list[int]:
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` after normalisation. What the table lacks becomes `unk_id`, or vanishes without one."""
        return self.encode_normalised(self.normaliser(text))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; special tokens, the unknown one included, and broken UTF-8 leave nothing."""
        surfaces = filter(None, (self._surfaces[index] for index in ids))
        return " ".join(self.joint.join(surfaces).decode("utf-8", errors="ignore").split())

    def units(self, text: str) -> Iterable[str]:
        """What `unknown_share` counts: here the characters of normalised text without spaces."""
        return text.replace(" ", "")

    def unknown_share(self, texts: Iterable[str]) -> tuple[float, Counter[str]]:
        """Share (0 to 1) of the units of `texts` that no token spells, and how often each such unit occurs.

        A unit is a character other than space; for words, a word. Without any text the share is 0.
        """
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(self.units(self.normaliser(text)))
        unknown = Counter({unit: count for unit, count in counts.items() if not self._knows(unit)})
        return unknown.total() / max(counts.total(), 1), unknown

    def _knows(self, unit: str) -> bool:
        return self.decode(self.encode_normalised(unit)) == unit

    def state_dict(self) -> dict[str, Any]:
        """All that defines this tokenizer, in types that torch.load(weights_only=True) accepts."""
        return {
            "kind": self.kind,
            "tokens": list(self.tokens),
            "normaliser": self.normaliser.as_dict(),
            "unk": self.unk_id is not None,
            "sos_eos": self.sos_eos_id is not None,
        }

    @property
    def model_bytes(self) -> bytes:
        """A serialised model besides the table, where the kind has one."""
        return b""

    @cached_property
    def hash(self) -> str:
        """sha256 over everything that defines this tokenizer."""
        state = {key: value for key, value in self.state_dict().items() if key != "model"}
        text = json.dumps(state, sort_keys=True)
        return hashlib.sha256(text.encode() + b"\0" + self.model_bytes).hexdigest()

    def save(self, folder: Path) -> None:
        """Write tokens.txt, tokenizer.json and, where there is a model, bpe.model into `folder`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_tokens(folder / "tokens.txt", self.tokens)
        if self.model_bytes:
            (folder / "bpe.model").write_bytes(self.model_bytes)
        settings = {k: v for k, v in self.state_dict().items() if k not in ("tokens", "model")} | {"hash": self.hash}
        (folder / "tokenizer.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
