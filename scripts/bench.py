"""Speed and memory, measured. Each subcommand prints its figures; all but `loader` need no data.

python scripts/bench.py train-step --encoder conformer_s --head ctc --precision amp_bf16 [key=value ...]
python scripts/bench.py loss --batch 8 --tokens 40 --vocab 500
python scripts/bench.py search --head transducer --batch 8
python scripts/bench.py features --batch 16 --seconds 10
python scripts/bench.py attention --batch 16 --frames 400 --heads 4 --head-dim 64
python scripts/bench.py loader [+experiment=NAME] [key=value ...]
python scripts/bench.py recurrent --lengths 250 500 --batches 1 8
python scripts/bench.py free-running --tokens 100 --seconds 20
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from asr.command import report_errors
from scripts.benches import attention, recognition, training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (run, add_options) in COMMANDS.items():
        command = commands.add_parser(name, help=(run.__doc__ or "").splitlines()[0])
        add_options(command)
        command.set_defaults(run=run)
    arguments, overrides = parser.parse_known_args()
    with report_errors():
        arguments.run(arguments, overrides)


COMMANDS: dict[str, tuple[Callable[..., None], Callable[[argparse.ArgumentParser], None]]] = {
    "attention": (attention.bench_attention, attention.attention_options),
    "features": (recognition.bench_features, recognition.features_options),
    "free-running": (training.bench_free_running, training.free_running_options),
    "loader": (training.bench_loader, training.loader_options),
    "loss": (training.bench_loss, training.loss_options),
    "search": (recognition.bench_search, recognition.search_options),
    "recurrent": (attention.bench_recurrent, attention.recurrent_options),
    "train-step": (training.bench_train_step, training.train_step_options),
}


if __name__ == "__main__":
    main()
