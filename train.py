"""Train a speech recogniser: `python train.py [+experiment=NAME] [key=value ...]`; without arguments, the demo."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asr.command import in_sweep, job_place, report_errors
from asr.config import ConfigError, check, check_overrides
from asr.settings import TrainSettings
from asr.training.run_folder import claimed, open_run_dir, versions, write_json

if TYPE_CHECKING:  # what imports torch stands in the functions, so that --help and a misspelt override answer at once
    from asr.training.distributed import World

log = logging.getLogger("train")


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    with report_errors():
        try:
            settings = check(cfg)
        except ConfigError as error:
            if in_sweep():  # the others go on; this one is found among them as a failed run
                place = job_place(str(cfg.get("name")), cfg.get("run_dir"))
                fail(open_run_dir(*place, resume="auto"), cfg, error)
            raise
        run(settings, cfg)


def run(settings: TrainSettings, cfg: DictConfig) -> None:
    """Find the run's folder and its place among other processes, train, and record how it ended."""
    from asr.training.distributed import connect, disconnect, share
    from asr.training.monitor import start_logging, stop_logging

    world, device = connect(settings.device)
    run_dir, claim = None, ExitStack()
    try:
        if world.is_main:
            opened = open_run_dir(*job_place(settings.name, settings.run_dir), settings.resume)
            claim.enter_context(claimed(opened))
        run_dir = Path(share(str(opened) if world.is_main else "", world))
        start_logging(run_dir if world.is_main else None)
        train(settings, run_dir, world, device)
    except BaseException as error:
        if run_dir and world.is_main:
            record_failure(run_dir, cfg, error)
            if isinstance(error, KeyboardInterrupt):
                log.info("the same command with run_dir=%s goes on from its last checkpoint, if it has one", run_dir)
        raise
    finally:
        stop_logging()
        claim.close()
        disconnect()


def train(settings: TrainSettings, run_dir: Path, world: World, device: Any) -> None:
    """The run, step by step. Everything it leaves behind lies in `run_dir`."""
    import torch

    from asr import build
    from asr.data.cuts import Manifest
    from asr.text.tokenizer import tokenizer_from_state
    from asr.training.checkpoint import CheckpointFolder
    from asr.training.cpu import keep_freed_memory, threads_to_use
    from asr.training.loop import Trainer
    from asr.training.mfu import peak_flops
    from asr.training.monitor import Monitor, forget_peak_memory
    from asr.training.pictures import Pictures
    from asr.training.precision import PrecisionMode, resolve_precision
    from asr.training.profile import profiled
    from asr.training.scan import scan_memory
    from asr.training.validate import validate

    forget_peak_memory()
    if device.type == "cpu":
        keep_freed_memory()
        threads = settings.trainer.num_threads or threads_to_use(settings.data.num_workers)
        torch.set_num_threads(threads or torch.get_num_threads())
    mode = resolve_precision(settings.precision.value, device)
    log.info("run folder %s  device %s  precision %s  processes %d", run_dir, device, mode, world.size)

    settings = build.with_whole_paths(settings)
    found = CheckpointFolder(run_dir / "checkpoints").load_newest()
    if found:
        build.check_resume(found[1], build.as_plain(settings), mode)
        settings = build.as_begun(settings, found[1])
    config = build.as_plain(settings)
    source = None if found else build.load_source(settings)
    build.check_sizes(settings)
    splits = build.prepare_data(settings, world)
    build.check_same_data(found[1] if found else None, settings)
    torch.manual_seed(settings.seed)
    train_cuts = Manifest(splits["train"])
    tokenizer = tokenizer_from_state(found[1]["tokenizer"]) if found else build.build_tokenizer(settings, train_cuts)

    model = build.build_model(settings, tokenizer)
    if source:
        build.start_from(source, model, settings, tokenizer, run_dir if world.is_main else None)
    if not found:
        build.fit_feature_norm(model, settings, train_cuts)
    model.freeze(settings.freeze)
    data = build.build_train_data(settings, splits, tokenizer, model, world, device.type == "cuda")
    precision = PrecisionMode(mode, device, settings.trainer.initial_grad_scale)
    model = precision.prepare(model.to(device))
    optimizer = build.build_optimizer(settings, model)
    steps_per_epoch, total_steps = build.count_steps(settings, data)
    search = build.build_search(settings.search)

    identity = {
        "config": config,
        "tokenizer": tokenizer.state_dict(),
        "versions": versions(),
        "data_fingerprint": build.data_fingerprint(settings),
    }
    if world.is_main:
        build.store_identity(run_dir, config, tokenizer, identity["versions"])
        build.report_tokens(splits, tokenizer, settings, run_dir)
    monitor = Monitor(
        run_dir if world.is_main else None, settings.trainer.log_every, total_steps, settings.trainer.progress,
        peak_flops(device, mode, world.size),
    )  # fmt: skip
    # Every process draws its own dropout and masks; the weights were drawn alike.
    torch.manual_seed(settings.seed + world.rank)
    trainer = Trainer(
        settings.name, run_dir, build.trainer_settings(settings, steps_per_epoch), model, optimizer,
        build.build_schedule(settings, total_steps), data.train,
        lambda model: validate(model, data.dev.epoch(0), search, tokenizer.decode, precision, world, device),
        precision, monitor, identity, world, build.reference_batches(settings, world),
        Pictures(monitor, data.dev, precision, tokenizer.tokens).draw
        if settings.trainer.pictures and world.is_main else None,
        build.build_adversary_optimizer(settings, model),
    )  # fmt: skip
    if found:
        path, state = found
        trainer.load_state_dict(state)
        for key in ("max_duration", "num_buckets"):
            before, now = state["config"]["data"][key], config["data"][key]
            if before != now:
                trainer.restart_epoch(f"data.{key}={now} (it was {before}) makes other batches")
        log.info("continuing from %s: epoch %d, step %d", path, trainer.progress.epoch, trainer.progress.step)
    scan = settings.trainer.scan_memory
    if scan or (scan is None and device.type == "cuda"):
        scan_memory(
            model, optimizer, data.train, trainer.progress.epoch, tokenizer.encode, precision, settings.data,
        )  # fmt: skip
    log.info(
        "%s with %s: %.2f M parameters, %d steps planned",
        type(model.encoder).__name__, type(model.head).__name__,
        sum(p.numel() for p in model.parameters()) / 1e6, total_steps,
    )  # fmt: skip
    traces = run_dir / "profile" if settings.trainer.profile and world.is_main else None
    try:
        with profiled(traces), torch.autograd.set_detect_anomaly(settings.trainer.detect_anomaly):
            progress = trainer.fit()
    finally:
        monitor.close()
    log.info("%s", progress.outcome())
    log.info("decode with: python decode.py run_dir=%s avg=%d", run_dir, max(1, min(5, progress.epoch - 1)))


def fail(run_dir: Path, cfg: DictConfig, error: BaseException) -> None:
    """Record the failure of a run that did not begin."""
    from asr.training.monitor import start_logging, stop_logging

    start_logging(run_dir)
    record_failure(run_dir, cfg, error)
    stop_logging()


def record_failure(run_dir: Path, cfg: DictConfig, error: BaseException) -> None:
    """Leave the traceback in the run's own log, and for the report the configuration and a mark of the failure.

    A run that has finished stays so: what failed is a command that it was not continued by.
    """
    log.error("the run failed: %s", error, exc_info=error, extra={"only_in_file": True})
    path = run_dir / "train.json"
    record = json.loads(path.read_text()) if path.exists() else {"name": str(cfg.get("name"))}
    if record.get("status") != "finished":
        write_json({**record, "status": "failed", "error": f"{type(error).__name__}: {error}"}, path)
    if not (run_dir / "config.yaml").exists():  # it failed before the settings were stored
        with suppress(OmegaConfBaseException):
            OmegaConf.resolve(cfg)
        OmegaConf.save(cfg, run_dir / "config.yaml")


if __name__ == "__main__":
    with report_errors():
        check_overrides(sys.argv[1:], TrainSettings, "train")
    main()
