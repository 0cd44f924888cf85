"""Looks into a run or an experiment, before it goes wrong or after.

python scripts/doctor.py precision +experiment=NAME [key=value ...] [run_dir=RUN_DIR] [num_batches=N] [out=FOLDER]
python scripts/doctor.py precision run_dir=RUN_DIR [key=value ...]
python scripts/doctor.py init +experiment=NAME [key=value ...] [modes=null,xavier_uniform,...] [out=FOLDER]

precision: how large activations, attention scores and gradients become on real training batches; what overflows first
in fp16, what bf16 weights would lose, and the keys that help. With run_dir on that run's newest weights, by its own
settings unless an experiment is named. Prints the verdict and a table; they, all figures in JSON and a picture go to
`out` (RUN_DIR/doctor, else runs/doctor).

init: of every layer the fan-in, how wide its weights are beside what each init_mode would make of them, and how signals
and gradients get through the depth of the model on a real training batch; then the settings' own initialisation and
`modes` (null, xavier_uniform and kaiming_uniform unless given) side by side. With init_from, of what is not loaded.
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from asr.command import report_errors

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(COMMANDS))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    arguments = parser.parse_args()
    with report_errors():
        COMMANDS[arguments.what](arguments.overrides)


def examine_precision(overrides: list[str]) -> None:
    """Examine real batches, print the verdict, leave a report."""
    import torch

    from asr import build
    from asr.data.cuts import Manifest
    from asr.text.tokenizer import tokenizer_from_state
    from asr.training.checkpoint import load_weights
    from asr.training.distributed import connect
    from asr.training.doctor import examine, lost_updates
    from asr.training.doctor_report import verdict, write_report
    from asr.training.precision import PrecisionMode, resolve_precision
    from asr.training.select import select_weights

    overrides, own = taken_out(overrides, {"run_dir": None, "num_batches": "2", "out": None})
    run_dir = Path(own["run_dir"]) if own["run_dir"] else None
    if not str(own["num_batches"]).isdigit() or int(own["num_batches"] or 0) < 1:
        raise ValueError(f"num_batches={own['num_batches']}: a number of batches from 1 is wanted")
    saved = select_weights(run_dir, use_averaged_model=False) if run_dir else None
    settings = settings_of(overrides, saved.checkpoint["config"] if saved else None)

    world, device = connect(settings.device)
    splits = build.prepare_data(settings, world)
    train_cuts = Manifest(splits["train"])
    torch.manual_seed(settings.seed)
    if saved:
        tokenizer = tokenizer_from_state(saved.checkpoint["tokenizer"])
    else:
        tokenizer = build.build_tokenizer(settings, train_cuts)
    model = build.build_model(settings, tokenizer)
    if saved:
        load_weights(model, saved.weights, str(run_dir))
    else:
        build.fit_feature_norm(model, settings, train_cuts)
    model.to(device)
    batches = real_batches(settings, splits, tokenizer, model, world, int(own["num_batches"] or 0))

    plain = settings_of([*overrides, "precision=fp32"], saved.checkpoint["config"] if saved else None)
    lost = lost_updates(model, batches[0], build.build_optimizer(plain, model), device)
    mode = resolve_precision(settings.precision.value, device)
    precision = PrecisionMode(mode, device, settings.trainer.initial_grad_scale)
    readings = examine(precision.prepare(model), batches, precision)
    lines = verdict(readings, lost, model, mode, precision.scale)
    folder = Path(own["out"]) if own["out"] else (run_dir or Path("runs")) / "doctor"
    print(write_report(folder, f"precision-{mode}", lines, readings, lost))
    print(f"{folder}/precision-{mode}.md, .json, .png")


def examine_initialisation(overrides: list[str]) -> None:
    """Look at the model as it would start to train, under several modes; print the tables, leave a report."""
    import dataclasses

    import torch

    from asr import build
    from asr.data.cuts import Manifest
    from asr.layers.init import NONE, mode_named
    from asr.settings import InitMode
    from asr.training.distributed import connect
    from asr.training.init_doctor import InitReading, examine_init
    from asr.training.init_doctor_report import write_init_report

    overrides, own = taken_out(overrides, {"modes": "null,xavier_uniform,kaiming_uniform", "out": "runs/doctor"})
    modes = [mode_named(mode.strip()) for mode in str(own["modes"]).strip("[]").split(",")]
    settings = settings_of(overrides, None)
    world, device = connect(settings.device)
    source = build.load_source(settings)
    splits = build.prepare_data(settings, world)
    train_cuts = Manifest(splits["train"])
    tokenizer = build.build_tokenizer(settings, train_cuts)
    batches: list[Any] = []

    def reading_of(settings: Any) -> InitReading:
        torch.manual_seed(settings.seed)
        model = build.build_model(settings, tokenizer)
        if source:
            build.start_from(source, model, settings, tokenizer, None)
        build.fit_feature_norm(model, settings, train_cuts)
        if not batches:
            batches.extend(real_batches(settings, splits, tokenizer, model, world, 1))
        return examine_init(model.to(device), batches[0], device)

    own_mode = settings.init_mode.value if settings.init_mode else "null"
    readings = {f"{own_mode} (the settings)": reading_of(settings)}
    for mode in modes:
        chosen = None if mode == NONE else InitMode(mode)
        readings[mode if chosen else "null"] = reading_of(dataclasses.replace(settings, init_mode=chosen, init={}))
    folder = Path(str(own["out"]))
    print(write_init_report(folder, readings))
    print(f"{folder}/init.md, .json, .png")


def real_batches(settings: Any, splits: Any, tokenizer: Any, model: Any, world: Any, count: int) -> list[Any]:
    """The first training batches that hold an utterance. Raises ValueError where there is none."""
    from asr import build

    loader = build.build_train_data(settings, splits, tokenizer, model, world, gpu=False).train
    batches = list(islice((batch for batch in loader.epoch(1) if len(batch)), count))
    if not batches:
        raise ValueError("not one training batch could be read")
    return batches


def settings_of(overrides: list[str], saved: dict[str, Any] | None) -> Any:
    """Checked settings: those of a saved run with changes, or those that train.py would take from the same words."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from asr.config import check

    if saved is not None and not any(word.startswith("+experiment=") for word in overrides):
        return check(OmegaConf.merge(OmegaConf.create(saved), OmegaConf.from_dotlist(overrides)))
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return check(compose("train", overrides))


def taken_out(words: list[str], own: dict[str, str | None]) -> tuple[list[str], dict[str, str | None]]:
    """The words that are not about one of the keys of `own`, and the values that these have."""
    pairs = [word.partition("=") for word in words]
    found = {key: value for key, _, value in pairs if key in own}
    return [word for word, (key, _, _) in zip(words, pairs, strict=True) if key not in own], own | found


COMMANDS = {"precision": examine_precision, "init": examine_initialisation}

if __name__ == "__main__":
    main()
