"""Prepares a corpus and reports on it without training: python scripts/prepare.py data=NAME [key=value ...].

The keys are those of train.py, so what is prepared is what training with the same keys will find.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import hydra

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from asr.command import report_errors
from asr.config import check, check_overrides
from asr.settings import TrainSettings

if TYPE_CHECKING:
    from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(cfg: DictConfig) -> None:
    with report_errors():
        settings = check(cfg)
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        prepare(settings)


def prepare(settings: TrainSettings) -> None:
    """Prepare the data, train the tokenizer on it, and complete and print data_report.json."""
    from asr import build
    from asr.data.cuts import Manifest
    from asr.training.distributed import World

    settings = build.with_whole_paths(settings)
    splits = build.prepare_data(settings, World())
    tokenizer = build.build_tokenizer(settings, Manifest(splits["train"]))
    build.report_tokens(splits, tokenizer, settings, build.prepared_folder(settings))
    print(f"prepared: {build.prepared_folder(settings)}")


if __name__ == "__main__":
    with report_errors():
        check_overrides(sys.argv[1:], TrainSettings, "train")
    main()
