"""The data report: what a prepared corpus holds and what was refused, as JSON and as a printed summary."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lhotse.cut import Cut

from asr.data.cuts import Rejection, simple_parts, source_sampling_rate, unreadable_reason

REPORT_NAME = "data_report.json"
MOST_LISTED = 50


@dataclass
class SplitStatistics:
    """Running figures of one split; holds counts only, so that its size does not grow with the hours."""

    utterances: int = 0
    seconds: float = 0.0
    shortest: float = float("inf")
    longest: float = 0.0
    words: int = 0
    empty_transcripts: int = 0
    unreadable: int = 0
    durations: Counter[int] = field(default_factory=Counter)
    text_lengths: Counter[int] = field(default_factory=Counter)
    characters: Counter[str] = field(default_factory=Counter)
    speakers: Counter[str] = field(default_factory=Counter)
    sample_rates: Counter[int] = field(default_factory=Counter)
    digest: Any = field(default_factory=hashlib.sha256)

    def add(self, cut: Cut) -> None:
        """Count a regular cut."""
        supervision = cut.supervisions[0]
        text = supervision.text or ""
        self.utterances += 1
        # Names of recordings, not their paths: the same corpus in another place is the same.
        parts = [part for part in simple_parts(cut) if getattr(part, "has_recording", False)]
        audio = " ".join(f"{part.recording_id}@{part.start:.4f}" for part in parts)
        self.digest.update(f"{cut.id}\t{text}\t{cut.duration:.6f}\t{audio}\n".encode())
        self.words += len(text.split())
        self.empty_transcripts += not text.strip()
        self.text_lengths[len(text) // 10 * 10] += 1
        self.characters.update(text)
        if supervision.speaker:
            self.speakers[supervision.speaker] += 1
        if unreadable_reason(cut):
            self.unreadable += 1
            return
        self.seconds += cut.duration
        self.shortest = min(self.shortest, cut.duration)
        self.longest = max(self.longest, cut.duration)
        self.durations[int(cut.duration)] += 1
        self.sample_rates[source_sampling_rate(cut)] += 1

    def to_dict(self) -> dict[str, Any]:
        """Figures for the report; histogram keys are ranges of seconds and of characters."""
        readable = self.utterances - self.unreadable
        return {
            "utterances": self.utterances,
            "hours": round(self.seconds / 3600, 4),
            "seconds": {
                "min": round(self.shortest, 3) if readable else 0.0,
                "mean": round(self.seconds / readable, 3) if readable else 0.0,
                "max": round(self.longest, 3),
            },
            "words": self.words,
            "empty_transcripts": self.empty_transcripts,
            "unreadable": self.unreadable,
            "duration_histogram": {f"{start}-{start + 1}": n for start, n in sorted(self.durations.items())},
            "text_length_histogram": {f"{start}-{start + 9}": n for start, n in sorted(self.text_lengths.items())},
            "num_speakers": len(self.speakers),
            "speakers": dict(sorted(self.speakers.items())),
            "sample_rates": {str(rate): n for rate, n in sorted(self.sample_rates.items())},
            "characters": dict(sorted(self.characters.items())),
            "fingerprint": self.digest.hexdigest(),
        }


def build_report(
    splits: Mapping[str, SplitStatistics],
    rejected: Iterable[Rejection],
    notes: Mapping[str, int],
    settings: Mapping[str, Any],
    sources: Mapping[str, list[int]],
) -> dict[str, Any]:
    """The whole report as plain JSON types.

    notes: counts that concern no single utterance, such as "audio without transcript"; settings: how the data was
    prepared; sources: files that were read, with size and time of change.
    """
    figures = {name: statistics.to_dict() for name, statistics in splits.items()}
    together = hashlib.sha256("".join(f"{name} {figures[name]['fingerprint']}\n" for name in sorted(figures)).encode())
    listed = [asdict(rejection) for rejection in rejected]
    by_reason: dict[str, Counter[str]] = {}
    for item in listed:
        by_reason.setdefault(item["split"], Counter())[item["reason"]] += 1
    return {
        "fingerprint": together.hexdigest(),
        "splits": figures,
        "notes": dict(notes),
        "rejected_by_reason": {split: dict(counts.most_common()) for split, counts in by_reason.items()},
        "rejected": listed,
        "settings": json.loads(json.dumps(settings)),
        "sources": dict(sources),
    }


def add_tokenizer_section(report: dict[str, Any], texts_by_split: Mapping[str, Iterable[str]], tokenizer: Any) -> None:
    """Add to `report` how a tokenizer sees the texts: token histogram, unknown words and characters.

    tokenizer: anything with `encode`, `decode`, `hash`, `vocab_size`, `blank_id`, `unk_id` and `tokens`.
    """
    special = {tokenizer.blank_id, tokenizer.unk_id, getattr(tokenizer, "sos_eos_id", None)}
    vocabulary = set("".join(token for index, token in enumerate(tokenizer.tokens) if index not in special))
    encoded: dict[str, tuple[int, bool]] = {}  # word -> number of tokens, known
    section: dict[str, Any] = {"hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size, "splits": {}}
    for split, texts in texts_by_split.items():
        lengths: Counter[int] = Counter()
        unknown_words: Counter[str] = Counter()
        outside: Counter[str] = Counter()
        num_words = num_tokens = 0
        for text in texts:
            ids = tokenizer.encode(text)
            lengths[len(ids) // 5 * 5] += 1
            num_tokens += len(ids)
            for word in text.split():
                num_words += 1
                if word not in encoded:
                    encoded[word] = _encode_word(tokenizer, word)
                if not encoded[word][1]:
                    unknown_words[word] += 1
                    outside.update(c for c in word if c not in vocabulary and not _encode_word(tokenizer, c)[1])
        section["splits"][split] = {
            "tokens": num_tokens,
            "token_histogram": {f"{start}-{start + 4}": n for start, n in sorted(lengths.items())},
            "unknown_word_share": round(sum(unknown_words.values()) / num_words, 6) if num_words else 0.0,
            "unknown_words": dict(unknown_words.most_common(MOST_LISTED)),
            "characters_outside_vocabulary": dict(outside.most_common()),
        }
    report["tokenizer"] = section


def _encode_word(tokenizer: Any, word: str) -> tuple[int, bool]:
    """Number of tokens of a word and whether none of it is unknown."""
    ids = tokenizer.encode(word)
    known = bool(ids) and (tokenizer.unk_id is None or tokenizer.unk_id not in ids)
    if known and tokenizer.unk_id is None:  # such a tokenizer leaves out what it does not know
        known = len(tokenizer.decode(ids).strip()) > 0
    return len(ids), known


def format_summary(report: Mapping[str, Any]) -> str:
    """The report as a few lines for the terminal; every rejected id is in the file."""
    lines = [
        f"{'split':<14}{'hours':>9}{'utterances':>12}{'speakers':>10}{'words':>10}  s (min/mean/max)         rates (Hz)"
    ]
    for name, split in report["splits"].items():
        seconds = "/".join(f"{split['seconds'][key]:.2f}" for key in ("min", "mean", "max"))
        lines.append(
            f"{name:<14}{split['hours']:>9.3f}{split['utterances']:>12}{split['num_speakers']:>10}{split['words']:>10}"
            f"  {seconds:<22}  {', '.join(split['sample_rates'])}"
        )
    for name, split in report["splits"].items():
        inventory = "".join(character for character in split["characters"] if not character.isspace())
        shown = inventory if len(inventory) <= 80 else inventory[:80] + " ..."
        lines.append(f"{name}: {len(inventory)} characters: {shown}")
        if split["empty_transcripts"]:
            lines.append(f"{name}: {split['empty_transcripts']} empty transcripts")
        if split["unreadable"]:
            lines.append(
                f"{name}: {split['unreadable']} utterances without usable audio stay, to be scored as deletions"
            )
    lines += [f"{note}: {count}" for note, count in report["notes"].items() if count]
    for split_name, reasons in report["rejected_by_reason"].items():
        for reason, count in reasons.items():
            found = [item for item in report["rejected"] if item["split"] == split_name and item["reason"] == reason]
            examples = ", ".join(
                f"{item['id']} ({item['path']})" if item["path"] else item["id"] for item in found[:10]
            )
            lines.append(f"{split_name}: {count} x {reason}: {examples}{' ...' if count > 10 else ''}")
    for split_name, split in report.get("tokenizer", {}).get("splits", {}).items():
        outside = split["characters_outside_vocabulary"]
        lines.append(
            f"{split_name}: {100 * split['unknown_word_share']:.1f} % of the words hold unknown tokens"
            + (f"; characters outside the vocabulary: {' '.join(list(outside)[:40])}" if outside else "")
        )
    lines.append(f"fingerprint {report['fingerprint']}")
    return "\n".join(lines)


def write_report(report: Mapping[str, Any], prepared_dir: str | Path) -> None:
    """Write data_report.json atomically."""
    path = Path(prepared_dir) / REPORT_NAME
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_report(prepared_dir: str | Path) -> dict[str, Any] | None:
    """The report of a prepared folder, or None where it has none that can be read."""
    try:
        return json.loads((Path(prepared_dir) / REPORT_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
