"""A picture of training curves from run folders."""

from __future__ import annotations

from pathlib import Path

from asr.scoring.runs import Run


def plot_runs(runs: list[Run], labels: list[str], path: Path) -> None:
    """Draws training loss, validation loss and validation WER by epoch, one line per run, into the file at `path`.

    The ending of `path` names the format. Runs without a record are named in the legend without a line.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (("train_loss", "loss", "training loss"), ("valid", "loss", "validation loss"), ("valid", "wer", "WER, %"))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(14, 4), layout="constrained")
    for axis, (record, figure_key, title) in zip(axes, panels, strict=True):
        for run, label in zip(runs, labels, strict=True):
            points = [
                (entry["epoch"], entry[figure_key])
                for entry in run.training.get(record, [])
                if entry.get("epoch") is not None and entry.get(figure_key) is not None
            ]
            axis.plot([epoch for epoch, _ in points], [value for _, value in points], marker=".", label=label)
        axis.set(title=title, xlabel="epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
