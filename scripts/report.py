"""Makes Markdown tables from run folders: python scripts/report.py RUN_DIR... [--by KEY] [--out RESULTS.md]."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from asr.scoring.files import write_atomically
from asr.scoring.plot import plot_runs
from asr.scoring.report import group_runs, make_report
from asr.scoring.runs import find_runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Tables of error rates, memory and time from run folders. Two runs are also compared by paired "
        "bootstrap. Runs that failed or were not decoded are listed as such."
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="run folders, or folders that hold them")
    parser.add_argument("--by", metavar="KEY", help="config key that leads the rows; seeds become mean and spread")
    parser.add_argument("--loss", action="store_true", help="add the mean training loss of epochs 1 and 2")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the tables there, replacing the file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw loss and WER by epoch (png, svg, pdf)")
    arguments = parser.parse_args()

    try:
        runs = find_runs(arguments.runs)
        report = make_report(runs, arguments.by, arguments.loss)
        if arguments.plot:
            plot_runs(runs, [group.label for group in group_runs(runs)], arguments.plot)
        if arguments.out:
            command = shlex.join(["python", "scripts/report.py", *sys.argv[1:]])
            write_atomically(arguments.out, f"Made by `{command}`.\n\n{report}")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{len(runs)} runs: {arguments.out}" if arguments.out else report, end="\n" if arguments.out else "")


if __name__ == "__main__":
    main()
