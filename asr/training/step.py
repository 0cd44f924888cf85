"""One optimiser step: forward and backward over a group of batches, then an update or none at all."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asr.heads.head import add_parts
from asr.model import AsrModel
from asr.training.distributed import World, gather, sum_gradients, totals
from asr.training.precision import PrecisionMode
from asr.types import Batch


@dataclass
class StepResult:
    """What one step did, on all ranks together.

    loss: mean over feasible utterances.
    loss_parts: weighted parts of this rank's own mean, which needs no message between ranks.
    grad_norm: before clipping; NaN where no utterance was feasible.
    suspects: of a step that was not finite, the utterances whose losses were not, or all where only the gradient was.
    """

    loss: float
    loss_parts: dict[str, float]
    grad_norm: float
    finite: bool
    clipped: bool
    num_utterances: int
    num_infeasible: int
    audio_seconds: float
    padding_share: float
    suspects: list[str] = field(default_factory=list)


def train_step(
    model: AsrModel,
    batches: list[Batch],
    optimizer: torch.optim.Optimizer,
    precision: PrecisionMode,
    clip_norm: float | None,
    world: World,
    device: torch.device,
    adversary: torch.optim.Optimizer | None = None,
) -> StepResult:
    """Train on `batches` as on one batch that holds all their utterances, on all ranks.

    The loss is the sum over feasible utterances divided by their number. A step whose loss or gradient is not finite
    changes nothing: the gradients of the whole group are dropped and the buffers are put back.

    adversary: the optimiser of the model's adversaries, which steps when `optimizer` does; their gradients are not
        clipped and no part of the norm.
    """
    batches = [batch.to(device) for batch in batches if len(batch)]
    figures = [
        sum(int(count_feasible(model, batch)) for batch in batches),
        sum(len(batch) for batch in batches),
        sum(batch.audio_seconds for batch in batches),
        sum(int(batch.feature_lens.sum()) for batch in batches),
        sum(batch.features.shape[0] * batch.features.shape[1] for batch in batches),
    ]
    num_utterances, num_read, audio_seconds, frames, room = totals(figures, world, device)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    optimizers = [optimizer] if adversary is None else [optimizer, adversary]
    model.zero_grad(set_to_none=True)
    part_sums: dict[str, float] = {}
    suspects: list[str] = []
    for batch in batches:
        with precision.autocast():
            parts = model(batch)
            losses_B = add_parts(parts)
        precision.backward(losses_B.sum() / max(1, num_utterances))
        own = losses_B.detach()
        for name, part_B in parts.items():
            part_sums[name] = part_sums.get(name, 0.0) + float(part_B.detach().sum())
        suspects += [batch.ids[i] for i in torch.nonzero(~own.isfinite()).flatten().tolist()]
    sum_gradients(model.parameters(), world)
    loss = totals([sum(part_sums.values())], world, device)[0] / max(1, num_utterances)

    norm, clipped = math.nan, False
    if num_utterances:
        precision.unscale(*optimizers)
        foreign = {id(p) for group in adversary.param_groups for p in group["params"]} if adversary else set()
        parameters = [p for p in model.parameters() if p.grad is not None and id(p) not in foreign]
        norm_tensor = _norm(parameters)
        norm = float(norm_tensor)
        clipped = clip_norm is not None and norm > clip_norm
        finite = math.isfinite(loss) and math.isfinite(norm)
        if adversary is not None:
            finite = finite and bool(_norm([p for p in model.parameters() if id(p) in foreign]).isfinite())
        if finite and clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm_tensor)
        precision.step(*optimizers, finite=finite)
        clipped = clipped or (finite and getattr(optimizer, "clipped", False))
    else:
        finite = math.isfinite(loss)
    if not (finite and num_utterances):
        _restore(buffers)
    if not finite:
        suspects = [name for names in gather(suspects, world) for name in names]
        suspects = suspects or [name for names in gather([i for b in batches for i in b.ids], world) for name in names]
    return StepResult(
        loss=loss,
        loss_parts={name: value / max(1, figures[0]) for name, value in part_sums.items()},
        grad_norm=norm,
        finite=finite,
        clipped=clipped,
        num_utterances=int(num_utterances),
        num_infeasible=int(num_read - num_utterances),
        audio_seconds=audio_seconds,
        padding_share=1 - frames / room if room else 0.0,
        suspects=suspects,
    )


def count_feasible(model: AsrModel, batch: Batch) -> Tensor:
    """How many utterances of the batch have frames enough for their transcripts."""
    lens_B = model.encoder.output_lens(batch.feature_lens)
    return model.head.feasible(lens_B, batch.tokens, batch.token_lens).sum()


def _norm(parameters: list[torch.nn.Parameter]) -> Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


@torch.no_grad()
def _restore(buffers: list[tuple[Tensor, Tensor]]) -> None:
    for buffer, before in buffers:
        buffer.copy_(before)
