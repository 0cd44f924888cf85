"""Markdown tables from run folders, in the two forms in which results are published."""

from __future__ import annotations

import difflib
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from asr.scoring.files import format_rate, read_recogs
from asr.scoring.runs import Decoded, Run, Setting, settings_of
from asr.scoring.wer import compare

SEED_KEY = "seed"
MAX_SHOWN_KEYS = 4
NO_RESULTS = "no decode results"
RATES = {"word": "WER", "character": "CER"}


@dataclass(frozen=True)
class Group:
    """Runs that share a row: one run, or several that differ by seed alone."""

    label: str
    runs: list[Run]

    def settings(self) -> list[Setting | None]:
        """How its sets were decoded, in a fixed order; [None] where nothing was."""
        found = {decoded.setting for run in self.runs for decoded in run.decoded}
        return sorted(found, key=str) or [None]

    def results(self, set_name: str, setting: Setting | None) -> list[dict[str, Any]]:
        return [
            decoded.result
            for run in self.runs
            for decoded in run.decoded
            if decoded.set_name == set_name and decoded.setting == setting
        ]


def make_report(runs: list[Run], by: str | None = None, loss: bool = False) -> str:
    """The report of `runs` in Markdown: both tables, the comparison of two runs, and notes on what is missing.

    by: dotted config key that leads the rows; runs that differ by seed alone share a row as mean and spread. A table of
        losses pools all runs of one value.
    loss: adds the mean training loss of epochs 1 and 2.
    Raises ValueError for a key that no run's config holds, naming near ones.
    """
    groups = group_runs(runs, by)
    sections = [training_table(groups, loss), model_table(groups)]
    if by is not None:
        sections.append(loss_table(runs, by))
    if len(runs) == 2:
        sections.append(compare_runs(*runs))
    sections.append(notes(runs))
    return "\n\n".join(filter(None, sections)) + "\n"


def group_runs(runs: list[Run], by: str | None = None) -> list[Group]:
    """One group per run, or with `by` one per configuration apart from the seed, in the order of that key's values."""
    if by is None:
        return _labelled([[run] for run in runs], None)
    values = {id(run): _value_at(run.config, by) for run in runs}
    keys = sorted({key for run in runs for key in settings_of(run)})
    if not any(key == by or key.startswith(f"{by}.") for key in keys):
        near = difflib.get_close_matches(by, keys, n=3) or keys[:10]
        raise ValueError(f"--by {by}: no run's config.yaml holds this key; near ones: {', '.join(near) or 'none'}")
    members: dict[str, list[Run]] = {}
    for run in runs:
        flat = settings_of(run)
        if by != SEED_KEY:
            flat.pop(SEED_KEY, None)
        identity = repr((run.name, sorted((key, repr(value)) for key, value in flat.items())))
        members.setdefault(identity if run.config else str(run.folder), []).append(run)
    ordered = sorted(members.values(), key=lambda group: _sort_key(values[id(group[0])]))
    return _labelled(ordered, by)


def training_table(groups: list[Group], loss: bool = False) -> str:
    """Training config, error rate of every set, peak memory, time per epoch, and on request the first losses."""
    sets, shared = _set_names(groups), _shared_setting(groups)
    units = _units(groups)
    rates = [f"{RATES[units[name]]} {name}" for name in sets] or ["WER"]
    header = ["training config", *rates, "peak memory", "time per epoch"]
    header += ["train loss, epoch 1", "train loss, epoch 2"] if loss else []
    rows = []
    for group in groups:
        seconds = [value for run in group.runs for value in run.training.get("seconds_per_epoch", [])]
        memory = max(_numbers(group.runs, "peak_memory_bytes"), default=None)
        facts = [_format_bytes(memory), _format_seconds(statistics.fmean(seconds) if seconds else None)]
        facts += [_loss_cell(group, epoch) for epoch in (1, 2)] if loss else []
        for setting in group.settings():
            label = group.label if shared or setting is None else f"{group.label} ({setting})"
            rows.append([label, *_rate_cells(group, sets, setting), *facts])
    named = " and ".join(sorted({RATES[unit] for unit in units.values()}, reverse=True)) or "WER"
    caption = (
        f"{named} in percent with its 95% interval; of several seeds mean ± standard deviation and the mean's interval."
    )
    return f"{_table(header, rows)}\n\n{caption}{f' Decoded with {shared}.' if shared else ''}"


def model_table(groups: list[Group]) -> str:
    """Model, error rate of every set, and how it was decoded."""
    sets, units = _set_names(groups), _units(groups)
    header = [name if units[name] == "word" else f"{RATES[units[name]]} {name}" for name in sets]
    rows = []
    for group in groups:
        parameters = max(_numbers(group.runs, "num_parameters"), default=None)
        label = group.label if parameters is None else f"{group.label}, {parameters / 1e6:.2f} M parameters"
        for setting in group.settings():
            rows.append([label, *_rate_cells(group, sets, setting), str(setting or "")])
    return _table(["model", *(header or ["WER"]), "comment"], rows)


def loss_table(runs: list[Run], by: str) -> str:
    """Losses of epochs 1 and 2 of all runs with one value of the key `by`, whatever else they differ in."""
    pooled: dict[tuple[str, str], list[Run]] = {}
    for run in sorted((run for run in runs if run.config), key=lambda run: _sort_key(_value_at(run.config, by))):
        pooled.setdefault((run.name, _show(_value_at(run.config, by))), []).append(run)
    columns = [(record, epoch) for record in ("train_loss", "valid") for epoch in (1, 2)]
    header = [by, "runs", *(f"{'dev' if record == 'valid' else 'train'} loss, epoch {n}" for record, n in columns)]
    several = len({name for name, _ in pooled}) > 1
    rows = [
        [
            f"{name}, {value}" if several else value,
            str(len(members)),
            *(_pooled_cell(_losses(members, record, epoch), len(members)) for record, epoch in columns),
        ]
        for (name, value), members in pooled.items()
    ]
    caption = (
        "Mean loss of an utterance ± standard deviation over runs, and the 95% interval of the mean (Student's t)."
    )
    return f"{_table(header, rows)}\n\n{caption} The loss on dev is that after the epoch."


def compare_runs(a: Run, b: Run) -> str:
    """Paired bootstrap of two runs on every set that both decoded in the same way.

    Where a set was decoded by one method in both runs, but once each and from other checkpoints, these are compared.
    """
    label_a, label_b = (group.label for group in group_runs([a, b]))
    lines = []
    for first, second in _common(a, b):
        title = f"{first.set_name}, {first.setting}"
        if first.setting != second.setting:
            title += f" against {second.setting}"
        try:
            one, other = (read_recogs(side.folder / "recogs.txt") for side in (first, second))
            found = compare(one, other, first.unit)
        except (ValueError, OSError) as error:
            lines.append(f"- {title}: not comparable: {error}")
            continue
        low, high = found.ci95
        lines.append(
            f"- {title}: A {found.rate_a:.2f}, B {found.rate_b:.2f}, difference {found.difference:+.2f} "
            f"[{low:+.2f}, {high:+.2f}], probability that A is better {found.probability_a_better:.3f}"
        )
    lines = lines or ["- no set was decoded in the same way by both"]
    return "\n".join([f"Paired bootstrap, A = {label_a}, B = {label_b}:", "", *lines])


def notes(runs: Iterable[Run]) -> str:
    """What a reader of the tables must know of single runs: failures, missing results, damaged files, skipped steps."""
    lines = []
    for run in runs:
        remarks = [] if run.status == "finished" else [run.status]
        remarks += [] if run.decoded else [NO_RESULTS]
        skipped = run.training.get("skipped_steps")
        remarks += [f"{skipped} skipped steps"] if skipped else []
        remarks += run.faults
        if remarks:
            lines.append(f"- {run.folder}: {'; '.join(remarks)}")
    return "\n".join(["Notes:", "", *lines]) if lines else ""


def _labelled(groups: list[list[Run]], by: str | None) -> list[Group]:
    """Names every group by experiment, by the key asked for, and by the settings in which the groups differ."""
    flats = [settings_of(group[0]) for group in groups if group[0].config]
    keys = sorted({key for flat in flats for key in flat})
    differing = [key for key in keys if len({repr(flat.get(key)) for flat in flats}) > 1]
    if by is not None:
        leading = [_value_at(group[0].config, by) for group in groups if group[0].config]
        differing = [
            key
            for key in differing
            if key not in (by, SEED_KEY)
            and not key.startswith(f"{by}.")
            and [flat.get(key) for flat in flats] != leading  # a key that only repeats the leading one says nothing
        ]
    labels = []
    for group in groups:
        run = group[0]
        flat = settings_of(run)
        parts = [run.name]
        if by is not None:
            parts.append(f"{by}={_show(_value_at(run.config, by))}")
        if run.config:
            parts += [f"{key}={_show(flat.get(key))}" for key in differing[:MAX_SHOWN_KEYS]]
            parts += ["..."] if len(differing) > MAX_SHOWN_KEYS else []
        labels.append(", ".join(parts))
    made = []
    for label, group in zip(labels, groups, strict=True):
        unique = label if labels.count(label) == 1 else f"{label}, {group[0].folder.name}"
        made.append(Group(unique + _standing(group), group))
    return made


def _standing(group: list[Run]) -> str:
    """How many runs stand in the row, and which of them did not finish."""
    unfinished = [run.status for run in group if run.status != "finished"]
    if len(group) == 1:
        return f" ({unfinished[0]})" if unfinished else ""
    counts = [f"{unfinished.count(status)} {status}" for status in sorted(set(unfinished))]
    missing = sum(not run.decoded for run in group)
    counts += [f"{missing} without decode results"] if missing else []
    return f" ({', '.join([f'{len(group)} runs', *counts])})"


def _rate_cells(group: Group, sets: list[str], setting: Setting | None) -> list[str]:
    if setting is None:
        return [NO_RESULTS] * max(len(sets), 1)
    return [_rate_cell(group.results(name, setting), len(group.runs)) for name in sets]


def _rate_cell(results: list[dict[str, Any]], num_runs: int) -> str:
    key = "cer" if any(result.get("unit") == "character" for result in results) else "wer"
    rates = [result[key] for result in results if result.get(key) is not None]
    if not results:
        return "-"
    if len(rates) > 1:
        mean, deviation, half = _mean_and_interval(rates)
        of_mean = f"[{max(0.0, mean - half):.2f}, {mean + half:.2f}]"
        return f"{format_rate(mean)} ± {format_rate(deviation)} {of_mean} (n={len(rates)})"
    if not rates:
        return format_rate(None)
    interval = next((result.get(f"{key}_ci95") for result in results if result.get(key) is not None), None)
    cell = format_rate(rates[0]) + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")
    return cell if num_runs == 1 else f"{cell} (n=1)"


def _loss_cell(group: Group, epoch: int) -> str:
    losses = _losses(group.runs, "train_loss", epoch)
    return _spread(losses, "{:.4f}".format) if losses else "n/a"


def _losses(runs: list[Run], record: str, epoch: int) -> list[float]:
    """The loss of an epoch, of each run that has one; where it was taken several times, the last."""
    found = [
        [entry["loss"] for entry in run.training.get(record, []) if entry.get("epoch") == epoch and _known(entry)]
        for run in runs
    ]
    return [losses[-1] for losses in found if losses]


def _known(entry: dict[str, Any]) -> bool:
    return entry.get("loss") is not None and math.isfinite(entry["loss"])


def _pooled_cell(losses: list[float], num_runs: int) -> str:
    missing = f" (n={len(losses)})" if len(losses) < num_runs else ""
    if len(losses) < 2:
        return f"{losses[0]:.2f}{missing}" if losses else "n/a"
    mean, deviation, half = _mean_and_interval(losses)
    return f"{mean:.2f} ± {deviation:.2f} [{mean - half:.2f}, {mean + half:.2f}]{missing}"


def _mean_and_interval(values: list[float]) -> tuple[float, float, float]:
    """Mean, standard deviation, and half the width of the mean's 95% interval, by Student's t."""
    deviation = statistics.stdev(values)
    half = _student_t(len(values) - 1) * deviation / math.sqrt(len(values))
    return statistics.fmean(values), deviation, half


def _student_t(freedom: int) -> float:
    """The 97.5% quantile of Student's t, to three digits."""
    exact = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
    return exact[freedom - 1] if freedom <= len(exact) else 1.96 + 2.372 / freedom + 2.822 / freedom**2


def _spread(values: list[float], form: Callable[[float], str]) -> str:
    if len(values) == 1:
        return form(values[0])
    return f"{form(statistics.fmean(values))} ± {form(statistics.stdev(values))}"


def _common(a: Run, b: Run) -> list[tuple[Decoded, Decoded]]:
    pairs = [(x, y) for x in a.decoded for y in b.decoded if (x.set_name, x.setting) == (y.set_name, y.setting)]
    paired = {(x.set_name, x.setting.method) for x, _ in pairs}
    for key in sorted({(x.set_name, x.setting.method) for x in a.decoded} - paired):
        ones, others = ([x for x in run.decoded if (x.set_name, x.setting.method) == key] for run in (a, b))
        if len(ones) == len(others) == 1:
            pairs.append((ones[0], others[0]))
    return pairs


def _set_names(groups: list[Group]) -> list[str]:
    return sorted({decoded.set_name for group in groups for run in group.runs for decoded in run.decoded})


def _units(groups: list[Group]) -> dict[str, str]:
    """What the error rate of each set counts."""
    return {decoded.set_name: decoded.unit for group in groups for run in group.runs for decoded in run.decoded}


def _shared_setting(groups: list[Group]) -> Setting | None:
    """The setting of all decode results, if there is only one."""
    settings = {setting for group in groups for setting in group.settings() if setting is not None}
    return settings.pop() if len(settings) == 1 else None


def _value_at(config: dict[str, Any], key: str) -> Any:
    """The value of a dotted key; a component stands for the last part of its `_target_`; None where absent."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, dict):
        return str(value["_target_"]).rsplit(".", 1)[-1] if "_target_" in value else str(value)
    return value


def _sort_key(value: Any) -> tuple[int, float, str]:
    """Numbers by size, then texts, then what is absent."""
    if isinstance(value, (int, float)):
        return (0, value, "")
    return (1, 0, str(value)) if value is not None else (2, 0, "")


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _numbers(runs: list[Run], key: str) -> list[float]:
    return [run.training[key] for run in runs if run.training.get(key) is not None]


def _format_bytes(number: float | None) -> str:
    if number is None:
        return "n/a"
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


def _format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "n/a"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
