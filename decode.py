"""Decode and score with a trained run: `python decode.py run_dir=... [--epoch N] [--avg M] [--method NAME]`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra

from asr.command import report_errors
from asr.config import check, check_overrides
from asr.settings import DecodeSettings
from asr.targets import nearest

if TYPE_CHECKING:  # see train.py
    from omegaconf import DictConfig

    from asr.scoring.wer import Utterance
    from asr.search.decode import DecodedSet
    from asr.training.select import Selection

log = logging.getLogger("decode")

# Options of other toolkits' decode scripts are taken as they are typed there.
FLAGS = {"run_dir", "epoch", "iter", "avg", "use_averaged_model", "method", "precision", "device", "select"}
HYDRA_FLAGS = {
    "help", "hydra_help", "version", "cfg", "resolve", "package", "run", "multirun", "shell_completion", "config_path",
    "config_name", "config_dir", "experimental_rerun", "info",
}  # fmt: skip


@hydra.main(version_base="1.3", config_path="conf", config_name="decode")
def main(cfg: DictConfig) -> None:
    with report_errors():
        settings = check(cfg, DecodeSettings)
        from asr.training.monitor import start_logging, stop_logging

        run_dir = Path(settings.run_dir)
        if not run_dir.is_dir():
            raise ValueError(f"run_dir={run_dir}: no such folder")
        start_logging(run_dir, "decode.log")
        try:
            decode(settings, run_dir)
        finally:
            stop_logging()


def decode(settings: DecodeSettings, run_dir: Path) -> list[dict[str, Any]]:
    """Decode every set that was asked for; results lie in `run_dir`/decode. Returns what result.json holds of each."""
    from asr import build
    from asr.scoring.files import format_rate, write_results
    from asr.search.decode import decode_set
    from asr.text.tokenizer import tokenizer_from_state
    from asr.training.checkpoint import load_weights
    from asr.training.distributed import connect
    from asr.training.precision import PrecisionMode
    from asr.training.run_folder import git_commit, safe_name
    from asr.training.select import averages_to_try, select_weights

    _, device = connect(settings.device)
    precision = PrecisionMode(settings.precision.value, device)
    best = settings.select.value == "best"
    newest = select_weights(run_dir, settings.epoch, settings.iter, use_averaged_model=False)
    trained = build.settings_of_run(newest.checkpoint, settings.encoder)
    tokenizer = tokenizer_from_state(newest.checkpoint["tokenizer"])
    model = build.build_model(trained, tokenizer)
    method = settings.method or model.head.searches[0]
    if method not in model.head.searches:
        raise ValueError(f"method={method}: this run's head offers {', '.join(model.head.searches)}")
    search = build.build_search(build.search_settings(method, settings.search))
    model.to(device)
    named = ",".join([method, *build.unusual(settings)])

    def use(avg: int) -> Selection:
        chosen = select_weights(run_dir, settings.epoch, settings.iter, avg, settings.use_averaged_model, best)
        load_weights(model, chosen.weights, str(run_dir))
        return chosen

    def recognise(name: str, cuts: list[Any]) -> tuple[list[Utterance], DecodedSet]:
        data = settings.data
        loader = build.build_decode_loader(trained, tokenizer, cuts, data.max_duration, data.num_workers)
        decoded = decode_set(model, loader.epoch(0), search, precision.autocast, device, len(cuts), name)
        return build.pair_with_references(cuts, decoded.hypotheses, tokenizer), decoded

    avg = settings.avg
    if avg == "auto":
        avg = best_average(
            averages_to_try(run_dir, settings.epoch, settings.iter, settings.use_averaged_model, best),
            use, lambda: recognise("dev", build.dev_cuts(trained))[0],
        )  # fmt: skip
    if not settings.data.test and build.data_has_changed(newest.checkpoint, trained):
        log.warning("%s has changed since this run was trained", build.prepared_folder(trained))
    chosen = use(avg)
    log.info("decoding by %s with the %s", named, chosen.how)
    results = []
    for name, cuts in build.sets_to_decode(settings, trained).items():
        folder = run_dir / "decode" / f"{name}-{safe_name(named)}-{chosen.label}"
        build.check_same_set(folder, settings.data.test)
        utterances, decoded = recognise(name, cuts)
        meta = {
            "set": name,
            "method": named,
            "epoch": chosen.number if chosen.kind == "epoch" else None,
            "iter": chosen.number if chosen.kind == "step" else None,
            "avg": chosen.avg,
            "rtf": decoded.real_time_factor,
            "commit": git_commit(),
            "checksum": chosen.checksum(),
            "extra": {"averaging": chosen.how, "search": settings.search, "encoder": settings.encoder,
                      "precision": settings.precision.value, "unreadable": decoded.unreadable,
                      "test": settings.data.test and str(Path(settings.data.test).resolve()),
                      "audio_seconds": decoded.audio_seconds},
        }  # fmt: skip
        result = write_results(folder, utterances, meta, build.scoring_unit(utterances))
        results.append(result)
        log.info(
            "%s: WER %s%%  CER %s%%  (%d utterances, %d words)  real-time factor %.4f  -> %s",
            name, format_rate(result["wer"]), format_rate(result["cer"]), result["num_utterances"],
            result["ref_words"], result["rtf"] or 0.0, folder,
        )  # fmt: skip
    return results


def best_average(candidates: list[int], use: Callable[[int], Any], recognise: Callable[[], list[Utterance]]) -> int:
    """The number of epochs to average that gives the lowest WER on the dev set; the smaller one of equals."""
    from asr.scoring.wer import count_errors

    errors = {}
    for avg in candidates:
        use(avg)
        utterances = recognise()
        counts = count_errors([u.ref for u in utterances], [u.hyp for u in utterances])
        errors[avg] = counts.errors
        log.info("avg=%d: dev WER %.2f%%", avg, counts.rate if counts.rate is not None else float("nan"))
    return min(candidates, key=lambda avg: (errors[avg], avg))


def flags_to_overrides(arguments: list[str]) -> list[str]:
    """Turn `--epoch 30 --avg=9 --use-averaged-model false` into `epoch=30 avg=9 ...`; whatever else stays as it is."""
    turned: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        flag, equals, value = argument.partition("=")
        key = flag[2:].replace("-", "_") if flag.startswith("--") else ""
        if key in FLAGS and not equals:
            value = next(waiting, "")
            if not value or value.startswith("--"):
                sys.exit(f"error: {flag}: give a value, as in {flag} VALUE")
        elif key and key not in FLAGS | HYDRA_FLAGS:
            known = [f"--{name.replace('_', '-')}" for name in FLAGS]
            sys.exit(f"error: {flag}: no such option{nearest(flag, known)}")
        if argument.startswith(("search.", "encoder.")):
            argument = f"++{argument}"  # which options there are depends on the method and on the run
        turned.append(f"{key}={value}" if key in FLAGS else argument)
    return turned


if __name__ == "__main__":
    sys.argv[1:] = flags_to_overrides(sys.argv[1:])
    with report_errors():
        check_overrides(sys.argv[1:], DecodeSettings, "decode")
    main()
