"""Scores two files of `id text` lines: python scripts/score.py REF HYP [--cer] [--out DIR]."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from asr.scoring.files import confusion_counts, format_summary, read_transcripts, write_results
from asr.scoring.wer import pair_up, score

NUM_SHOWN = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Word or character error rate of two UTF-8 files with lines `id text`. Hypotheses that are missing "
        "count as deletions. Every Chinese or Japanese character is a unit of its own; spaces do not count in CER."
    )
    parser.add_argument("ref", type=Path, metavar="REF", help="reference transcripts")
    parser.add_argument("hyp", type=Path, metavar="HYP", help="hypotheses, in any order")
    parser.add_argument("--cer", action="store_true", help="score characters instead of words")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write recogs.txt, errs.txt and result.json there")
    arguments = parser.parse_args()

    unit = "character" if arguments.cer else "word"
    try:
        refs, hyps = read_transcripts(arguments.ref), read_transcripts(arguments.hyp)
        utterances = pair_up(refs, hyps)
        scored = score(utterances, unit)
        if arguments.out:
            write_results(arguments.out, utterances, {}, unit)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")

    missing = sorted(refs.keys() - hyps.keys())
    if missing:
        shown = ", ".join(missing[:NUM_SHOWN])
        print(f"warning: {len(missing)} of {len(refs)} hypotheses are missing: {shown}", file=sys.stderr)
    print(format_summary(scored, unit))
    for kind, pairs in confusion_counts(scored).items():
        shown = ", ".join(f"{ref or '*'} -> {hyp or '*'} ({times})" for (ref, hyp), times in pairs[:NUM_SHOWN])
        if shown:
            print(f"most frequent {kind}s: {shown}")
    print(f"alignments: {arguments.out / 'errs.txt'}" if arguments.out else "alignments: add --out DIR")


if __name__ == "__main__":
    main()
