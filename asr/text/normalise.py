"""One form of writing for training transcripts, references and hypotheses."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

_ALLOWED = {
    "unicode_form": ("NFC", "NFD", "NFKC", "NFKD"),
    "case": ("keep", "lower", "upper"),
    "width": ("keep", "half"),
    "punctuation": ("keep", "remove"),
}
_FULL_WIDTH_ASCII = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_APOSTROPHES = "'\u2019\u02bc"
_NOT_SPACE_OR_ASCII = re.compile(r"[^\x20-\x7e]")
_INVISIBLE = ("Cc", "Cf", "Cs")


@dataclass(frozen=True)
class Normaliser:
    """Callable str -> str; applying it twice changes nothing more.

    unicode_form: "NFC", "NFD", "NFKC" or "NFKD".
    case: "keep", "lower" or "upper".
    width: "half" turns full-width ASCII (U+FF01 to U+FF5E) into ASCII, "keep" leaves it.
    punctuation: "remove" turns every character of Unicode category P into a space, except an apostrophe between two
        letters or digits, which stays and is written "'" ("don’t" -> "don't", "'tis" -> "tis"). "$" and "+" stay.

    Always: BOM, zero-width, other format and control characters and lone surrogates (Unicode categories Cf, Cc, Cs)
    vanish; every run of Unicode white space, line ends included, becomes one space; the ends are trimmed.

    Raises ValueError for a value that is not listed above.
    """

    unicode_form: str = "NFC"
    case: str = "keep"
    width: str = "keep"
    punctuation: str = "keep"

    def __post_init__(self) -> None:
        for field, allowed in _ALLOWED.items():
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"normaliser.{field}={value!r}: choose one of {', '.join(allowed)}")

    @classmethod
    def of(cls, settings: Normaliser | Mapping[str, Any] | None) -> Normaliser:
        """A Normaliser from itself, from a mapping of its fields, or the default from None."""
        if isinstance(settings, Normaliser):
            return settings
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(settings or {}) - set(known))
        if unknown:
            raise ValueError(f"normaliser has no key {', '.join(unknown)}: choose among {', '.join(known)}")
        return cls(**(settings or {}))

    def as_dict(self) -> dict[str, str]:
        return asdict(self)

    def __call__(self, text: str) -> str:
        if _NOT_SPACE_OR_ASCII.search(text):
            text = "".join(char for char in text if char.isspace() or unicodedata.category(char) not in _INVISIBLE)
            if self.width == "half":
                text = text.translate(_FULL_WIDTH_ASCII)
            text = self._in_form(text)
        if self.case != "keep":
            # Changing case may undo the Unicode form, and NFKC may bring new capitals: each needs the other.
            text = self._in_form(text.lower() if self.case == "lower" else text.upper())
        if self.punctuation == "remove":
            text = _without_punctuation(text)
        return " ".join(text.split())

    def _in_form(self, text: str) -> str:
        return unicodedata.normalize(self.unicode_form, text)  # type: ignore[arg-type]


def _is_word_char(char: str) -> bool:
    return unicodedata.category(char)[0] in "LNM"


def _without_punctuation(text: str) -> str:
    kept = []
    for position, char in enumerate(text):
        if char in _APOSTROPHES:
            inside = 0 < position < len(text) - 1 and all(
                _is_word_char(neighbour) and neighbour not in _APOSTROPHES
                for neighbour in (text[position - 1], text[position + 1])
            )
            kept.append("'" if inside else " ")
        else:
            kept.append(" " if unicodedata.category(char).startswith("P") else char)
    return "".join(kept)
