"""train.py that leaves the parameters of every rank: torchrun dump_ranks.py FOLDER TRAIN.PY [key=value ...]."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch

from asr.training.loop import Trainer

folder, script, *arguments = sys.argv[1:]
fit = Trainer.fit


def fit_and_dump(self):
    progress = fit(self)
    torch.save(dict(self.model.state_dict()), Path(folder) / f"rank{os.environ['RANK']}.pt")
    return progress


Trainer.fit = fit_and_dump  # type: ignore[method-assign]
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
