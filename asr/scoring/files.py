"""The files of one decoded and scored set: recogs.txt, errs.txt, result.json; and transcript files of `id text`."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from asr.scoring.wer import Alignment, Counts, Score, Utterance, count, score

DECODING_KEYS = ("method", "epoch", "avg", "rtf", "commit", "checksum", "extra")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_transcripts(path: Path | str) -> dict[str, str]:
    """Texts by id of a UTF-8 file with lines `id text`, the id ending at the first white space.

    A byte order mark, CRLF and blank lines are tolerated; an id alone has empty text.
    Raises ValueError naming file and line for a repeated id and for bytes that are not UTF-8.
    """
    texts: dict[str, str] = {}
    first_lines: dict[str, int] = {}
    for number, raw in enumerate(Path(path).read_bytes().removeprefix(BYTE_ORDER_MARK).split(b"\n"), start=1):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path}, line {number}: not UTF-8; save the file as UTF-8") from None
        fields = line.split(maxsplit=1)
        if not fields:
            continue
        id = fields[0]
        if id in texts:
            raise ValueError(f"{path}, line {number}: id {id} stands in line {first_lines[id]} already; keep one")
        texts[id] = fields[1].strip() if len(fields) > 1 else ""
        first_lines[id] = number
    return texts


def read_recogs(path: Path | str) -> list[Utterance]:
    """Utterances of a recogs.txt, without their speakers. Raises ValueError naming file and line if it is damaged."""
    utterances = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        if not line:
            continue
        fields = line.split("\t")
        if len(fields) != 3 or not fields[1].startswith("ref=") or not fields[2].startswith("hyp="):
            raise ValueError(f"{path}, line {number}: not `id<TAB>ref=...<TAB>hyp=...`; decode again")
        utterances.append(Utterance(fields[0], fields[1].removeprefix("ref="), fields[2].removeprefix("hyp=")))
    return utterances


def write_results(
    folder: Path | str, utterances: Iterable[Utterance], meta: Mapping[str, Any], unit: str = "word"
) -> dict[str, Any]:
    """Scores the utterances and writes recogs.txt, errs.txt and, last, result.json into `folder`, each atomically.

    meta: what the scores cannot tell: method, epoch, avg, rtf (seconds of decoding per second of audio), commit,
        checksum of the weights, extra (a mapping); whatever is left out is null, further keys are kept.
    unit: the unit that errs.txt aligns and reports count, "word" or "character"; result.json holds both rates.

    Returns the contents of result.json; rates are in percent and None without reference units.
    Raises ValueError for an id that occurs twice or that would break the lines of recogs.txt.
    """
    folder = Path(folder)
    ordered = sorted(utterances, key=lambda utterance: utterance.id)
    for utterance in ordered:
        if not utterance.id or any(character in utterance.id for character in "\t\n\r"):
            raise ValueError(f"utterance id {utterance.id!r} is empty or holds a tab or line break; rename it")
    by_word, by_character = score(ordered), score(ordered, unit="character")
    result = {
        **dict.fromkeys(DECODING_KEYS),
        **meta,
        "unit": unit,
        "num_utterances": len(ordered),
        "ref_words": by_word.counts.ref_units,
        **_errors(by_word.counts),
        "wer": by_word.counts.rate,
        "wer_ci95": _as_list(by_word),
        "ref_characters": by_character.counts.ref_units,
        "cer": by_character.counts.rate,
        "cer_ci95": _as_list(by_character),
        "per_speaker": {
            speaker: {
                "ref_words": counts.ref_units,
                **_errors(counts),
                "wer": counts.rate,
                "cer": by_character.per_speaker[speaker].rate,
            }
            for speaker, counts in by_word.per_speaker.items()
        },
    }
    text = json.dumps(result, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "recogs.txt", "".join(map(_recogs_line, ordered)))
    write_atomically(folder / "errs.txt", format_errors(by_word if unit == "word" else by_character, unit))
    write_atomically(folder / "result.json", text)
    return result


def write_atomically(path: Path, text: str) -> None:
    """Replaces the file at `path` in one step, so that a reader finds the old text or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def format_rate(rate: float | None) -> str:
    """A rate in percent with two decimals, "n/a" for None."""
    return "n/a" if rate is None else f"{rate:.2f}"


def format_summary(scored: Score, unit: str = "word") -> str:
    """One line with the rate, its counts and its interval."""
    counts = scored.counts
    name = "WER" if unit == "word" else "CER"
    rate = f"{format_rate(counts.rate)}{'' if counts.rate is None else ' %'}"
    interval = "" if scored.ci95 is None else f", 95% interval {scored.ci95[0]:.2f} to {scored.ci95[1]:.2f} %"
    return (
        f"{name} {rate} [{counts.errors} / {counts.ref_units}, {counts.insertions} ins, {counts.deletions} del, "
        f"{counts.substitutions} sub]{interval}"
    )


def format_errors(scored: Score, unit: str = "word") -> str:
    """The text of errs.txt: totals, speakers, marked alignments, confusions and figures per unit."""
    wrong = sum(count(alignment).errors > 0 for alignment in scored.alignments.values())
    lines = [
        format_summary(scored, unit),
        f"{len(scored.alignments)} utterances, {wrong} of them with errors",
        *_section("SPEAKERS: rate, errors / reference units", _speaker_lines(scored.per_speaker)),
        *_section(
            "UTTERANCES: (ref->hyp) substitution, (ref->*) deletion, (*->hyp) insertion",
            [f"{id}\t{_marked(alignment)}".rstrip() for id, alignment in scored.alignments.items()],
        ),
    ]
    confusions = confusion_counts(scored)
    for kind in ("substitution", "deletion", "insertion"):
        lines += _section(
            f"{kind.upper()}S: count, ref -> hyp",
            [f"{times}\t{ref or '*'} -> {hyp or '*'}" for (ref, hyp), times in confusions[kind]],
        )
    lines += _section(f"{unit.upper()}S: {unit}, correct, errors, in reference, in hypothesis", _unit_lines(scored))
    return "\n".join(lines) + "\n"


def confusion_counts(scored: Score) -> dict[str, list[tuple[tuple[str, str], int]]]:
    """Counts of every (ref, hyp) under "substitution", "deletion" and "insertion", the most frequent first."""
    pairs = Counter(pair for alignment in scored.alignments.values() for pair in alignment if pair[0] != pair[1])
    ordered = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))
    return {
        "substitution": [item for item in ordered if item[0][0] and item[0][1]],
        "deletion": [item for item in ordered if not item[0][1]],
        "insertion": [item for item in ordered if not item[0][0]],
    }


def _errors(counts: Counts) -> dict[str, int]:
    return {"ins": counts.insertions, "del": counts.deletions, "sub": counts.substitutions}


def _as_list(scored: Score) -> list[float] | None:
    return None if scored.ci95 is None else list(scored.ci95)


def _recogs_line(utterance: Utterance) -> str:
    """One line whatever white space the texts hold."""
    return f"{utterance.id}\tref={' '.join(utterance.ref.split())}\thyp={' '.join(utterance.hyp.split())}\n"


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", title, *lines] if lines else []


def _speaker_lines(per_speaker: dict[str, Counts]) -> list[str]:
    return [
        f"{speaker}\t{format_rate(counts.rate)}\t{counts.errors} / {counts.ref_units}"
        for speaker, counts in per_speaker.items()
    ]


def _marked(alignment: Alignment) -> str:
    return " ".join(ref if ref == hyp else f"({ref or '*'}->{hyp or '*'})" for ref, hyp in alignment)


def _unit_lines(scored: Score) -> list[str]:
    """Every unit with its figures, the one with most errors first."""
    correct, errors, in_ref, in_hyp = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for alignment in scored.alignments.values():
        for ref, hyp in alignment:
            if ref == hyp:
                correct[ref] += 1
            else:
                errors.update(filter(None, (ref, hyp)))
            in_ref[ref] += 1
            in_hyp[hyp] += 1
    units = sorted((in_ref.keys() | in_hyp.keys()) - {""}, key=lambda unit: (-errors[unit], unit))
    return [f"{unit}\t{correct[unit]}\t{errors[unit]}\t{in_ref[unit]}\t{in_hyp[unit]}" for unit in units]
