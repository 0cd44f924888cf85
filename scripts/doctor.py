"""Looks into a run or an experiment, before it goes wrong or after.

python scripts/doctor.py precision +experiment=NAME [key=value ...] [run_dir=RUN_DIR] [num_batches=N] [out=FOLDER]
python scripts/doctor.py precision run_dir=RUN_DIR [key=value ...]
python scripts/doctor.py init +experiment=NAME [key=value ...] [modes=null,xavier_uniform,...] [out=FOLDER]
python scripts/doctor.py init run_dir=RUN_DIR [modes=...]

precision: how large activations, attention scores and gradients become on real training batches; what overflows first
in fp16, what bf16 weights would lose, and the keys that help. With run_dir on that run's newest weights, by its own
settings unless an experiment is named. Prints the verdict and a table; they, all figures in JSON and a picture go to
`out` (RUN_DIR/doctor, else runs/doctor).

init: of every layer the fans, how wide its weights are beside what each init_mode would make of them, and how signals
and gradients get through the depth of the model on a real training batch; layers that are dead or explode, and the key
that mends them. The settings' own initialisation, or the weights that a run has come to, stand beside `modes` (null,
xavier_uniform and kaiming_uniform unless given), all from the same seed on the same batch. With init_from, modes are of
what is not loaded; with run_dir, of the whole model. To draw a loaded layer anew, init_from.exclude has to name it too.
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from asr.command import report_errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(COMMANDS))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    arguments = parser.parse_args()
    with report_errors():
        COMMANDS[arguments.what](arguments.overrides)


def examine_precision(overrides: list[str]) -> None:
    """Examine real batches, print the verdict, leave a report."""
    from asr import build
    from asr.training.doctor import examine, lost_updates
    from asr.training.doctor_report import verdict, write_report
    from asr.training.precision import PrecisionMode, resolve_precision

    overrides, own = taken_out(overrides, {"run_dir": None, "num_batches": "2", "out": None})
    if not str(own["num_batches"]).isdigit() or int(own["num_batches"] or 0) < 1:
        raise ValueError(f"num_batches={own['num_batches']}: a number of batches from 1 is wanted")
    patient = Patient(overrides, own["run_dir"])
    settings, device = patient.settings, patient.device
    model = patient.trained_model() if patient.saved else patient.new_model(settings)
    batches = patient.batches(model, int(own["num_batches"] or 0))

    plain = patient.settings_with("precision=fp32")
    lost = lost_updates(model, batches[0], build.build_optimizer(plain, model), device)
    mode = resolve_precision(settings.precision.value, device)
    precision = PrecisionMode(mode, device, settings.trainer.initial_grad_scale)
    readings = examine(precision.prepare(model), batches, precision)
    lines = verdict(readings, lost, model, mode, precision.scale)
    folder = patient.folder(own["out"])
    print(write_report(folder, f"precision-{mode}", lines, readings, lost))
    print(f"{folder}/precision-{mode}.md, .json, .png")


def examine_initialisation(overrides: list[str]) -> None:
    """Look at the model as it would start to train, or as a run left it, beside several modes; leave a report."""
    import dataclasses

    from asr.layers.init import NONE, mode_named
    from asr.rules import by_place
    from asr.settings import InitMode
    from asr.training.init_doctor import examine_init
    from asr.training.init_doctor_report import write_init_report

    words = {"run_dir": None, "modes": "null,xavier_uniform,kaiming_uniform", "out": None}
    overrides, own = taken_out(overrides, words)
    modes = [mode_named(mode.strip()) for mode in str(own["modes"]).strip("[]").split(",")]
    patient = Patient(overrides, own["run_dir"])
    settings, device = patient.settings, patient.device
    own_mode = settings.init_mode.value if settings.init_mode else None
    if patient.saved:
        name, model = f"{own['run_dir']}, trained", patient.trained_model()
    else:
        name, model = f"{own_mode or 'null'} (the settings)", patient.new_model(settings)
        if all(mode == own_mode for mode in by_place(settings.init).values()):
            modes = [mode for mode in modes if mode != mode_named(own_mode)]
    (batch,) = patient.batches(model, 1)
    readings = {name: examine_init(model, batch, device)}
    for mode in modes:
        chosen = None if mode == NONE else InitMode(mode)
        model = patient.new_model(dataclasses.replace(settings, init_mode=chosen, init={}))
        readings[mode if chosen else "null"] = examine_init(model, batch, device)
    folder = patient.folder(own["out"])
    print(write_init_report(folder, readings))
    print(f"{folder}/init.md, .json, .png")


class Patient:
    """An experiment, or a run with its newest weights: settings, model and training batches.

    Raises ValueError where the run or the data cannot be read.
    """

    def __init__(self, overrides: list[str], run_dir: str | None):
        from asr import build
        from asr.data.cuts import Manifest
        from asr.text.tokenizer import tokenizer_from_state
        from asr.training.distributed import connect
        from asr.training.select import select_weights

        self.overrides = overrides
        self.run_dir = Path(run_dir) if run_dir else None
        self.saved = select_weights(self.run_dir, use_averaged_model=False) if self.run_dir else None
        self.settings = self.settings_with()
        self.world, self.device = connect(self.settings.device)
        self.source = None if self.saved else build.load_source(self.settings)
        self.splits = build.prepare_data(self.settings, self.world)
        self.train_cuts = Manifest(self.splits["train"])
        if self.saved:
            self.tokenizer = tokenizer_from_state(self.saved.checkpoint["tokenizer"])
        else:
            self.tokenizer = build.build_tokenizer(self.settings, self.train_cuts)

    def settings_with(self, *words: str) -> Any:
        return settings_of([*self.overrides, *words], self.saved.checkpoint["config"] if self.saved else None)

    def new_model(self, settings: Any) -> Any:
        """The model as train.py would start with it: always from the same seed, and from `init_from` if that is set."""
        import torch

        from asr import build

        torch.manual_seed(settings.seed)
        model = build.build_model(settings, self.tokenizer)
        if self.source:
            build.start_from(self.source, model, settings, self.tokenizer, None)
        build.fit_feature_norm(model, settings, self.train_cuts)
        return model.to(self.device)

    def trained_model(self) -> Any:
        from asr import build
        from asr.training.checkpoint import load_weights

        assert self.saved
        model = build.build_model(self.settings, self.tokenizer)
        load_weights(model, self.saved.weights, str(self.run_dir))
        return model.to(self.device)

    def batches(self, model: Any, count: int) -> list[Any]:
        """The first training batches that hold an utterance. Raises ValueError where there is none."""
        from asr import build

        data = build.build_train_data(self.settings, self.splits, self.tokenizer, model, self.world, gpu=False)
        batches = list(islice((batch for batch in data.train.epoch(1) if len(batch)), count))
        if not batches:
            raise ValueError("not one training batch could be read")
        return batches

    def folder(self, out: str | None) -> Path:
        return Path(out) if out else (self.run_dir or Path("runs")) / "doctor"


def settings_of(overrides: list[str], saved: dict[str, Any] | None) -> Any:
    """Checked settings: those of a saved run with changes, or those that train.py would take from the same words."""
    from omegaconf import OmegaConf

    from asr.build import with_whole_paths
    from asr.config import check, composed

    if saved is not None and not any(word.startswith("+experiment=") for word in overrides):
        return check(OmegaConf.merge(OmegaConf.create(saved), OmegaConf.from_dotlist(overrides)))
    return with_whole_paths(check(composed("train", overrides)))


def taken_out(words: list[str], own: dict[str, str | None]) -> tuple[list[str], dict[str, str | None]]:
    """The words that are not about one of the keys of `own`, and the values that these have."""
    pairs = [word.partition("=") for word in words]
    found = {key: value for key, _, value in pairs if key in own}
    return [word for word, (key, _, _) in zip(words, pairs, strict=True) if key not in own], own | found


COMMANDS = {"precision": examine_precision, "init": examine_initialisation}

if __name__ == "__main__":
    main()
