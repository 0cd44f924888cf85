"""Training a decoder on what it says itself, so that it does not drift when nobody tells it the truth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.layers.adversary import Adversary
from asr.layers.convolve import Conv1d
from asr.layers.masks import length_mask, zero_padding
from asr.layers.schedule import PiecewiseLinear, Scheduled
from asr.losses.optimal_completion import optimal_completion_loss
from asr.types import Encoded

if TYPE_CHECKING:
    from asr.heads.attention import Attention

MODES = ("off", "scheduled_sampling", "own_output", "professor_forcing")
# Of the discriminator's judgements that are right: as many as let it rest, and as few as let the decoder rest.
TOO_GOOD, TOO_BAD = 0.99, 0.75


@dataclass
class FreeRunning:
    """What the decoder is given in training; in evaluation it is always the truth.

    mode:
        off: the truth (teacher forcing).
        scheduled_sampling: the truth with some tokens replaced by what the decoder says there after the truth (Bengio
            et al., 2015; in two parallel passes as Mihaylova and Martins, 2019).
        own_output: for some utterances what the decoder says by itself, drawn step by step without gradients; then all
            go through one parallel pass. Targets are the tokens that best complete each prefix (Sabour et al., 2019).
        professor_forcing: the truth; and the decoder's states on its own output shall look to a discriminator like
            those on the truth (Lamb et al., 2016).
    share: a number, or points [reference batches, number] with lines between them. It is the probability that a token
        is the decoder's own, that an utterance is trained on its sample, or the weight of fooling the discriminator.
    every: batches from one sampling to the next (own_output, professor_forcing).
    buffer_size: samples that are kept, 0 for none. Batches between samplings then take the newest sample for the same
        transcript, whoever spoke it, where there is one; without a buffer they are trained on the truth alone.
    buffer_tokens: of a kept sample; longer ones are cut.
    gradient_checkpointing: compute the decoder's passes again for their gradients instead of keeping what is in them.
    adversary_dim, adversary_lr: width and learning rate of the discriminator.
    """

    mode: Literal["off", "scheduled_sampling", "own_output", "professor_forcing", False] = "off"
    share: float | list[list[float]] = 0.5
    every: int = 4
    buffer_size: int = 0
    buffer_tokens: int = 100
    gradient_checkpointing: bool = False
    adversary_dim: int = 128
    adversary_lr: float = 0.001

    def __post_init__(self) -> None:
        if self.mode is False:  # what YAML makes of a bare off
            self.mode = "off"
        if self.mode not in MODES:
            raise ValueError(f"head.free_running.mode={self.mode}: choose one of {', '.join(MODES)}")
        for key, least in (("every", 1), ("buffer_size", 0), ("buffer_tokens", 1), ("adversary_dim", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"head.free_running.{key}={getattr(self, key)}: must be at least {least}")
        highest = max(value for _, value in self.schedule().points)
        if self.mode in ("scheduled_sampling", "own_output") and highest > 1.0:
            raise ValueError(f"head.free_running.share={self.share}: a probability is at most 1")

    def schedule(self) -> PiecewiseLinear:
        """`share` as a function of the batch count."""
        given = self.share if isinstance(self.share, list) else [[0.0, self.share]]
        if not all(isinstance(point, list) and len(point) == 2 and all(map(_is_number, point)) for point in given):
            raise ValueError(f"head.free_running.share={self.share}: a number, or points as in [[0, 0], [50, 0.5]]")
        points = [(float(x), float(y)) for x, y in given]
        if any(value < 0 for _, value in points):
            raise ValueError(f"head.free_running.share={self.share}: must be at least 0")
        return PiecewiseLinear(*points)

    def make(self, dim: int) -> TeacherForcing:
        """What gives the parts of the loss in training. dim: width of the decoder's states."""
        if self.mode == "professor_forcing":
            return ProfessorForcing(self, dim)
        plain = {"off": TeacherForcing, "scheduled_sampling": ScheduledSampling, "own_output": OwnOutput}
        return plain[str(self.mode)](self)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Samples(NamedTuple):
    """Transcripts (B, S) of the decoder's own with their lengths (B,), and for which utterances there is one (B,)."""

    tokens: Tensor
    lens: Tensor
    there: Tensor


class TeacherForcing(Scheduled):
    """Callable: named parts (B,) of the loss of `head` on a batch in training."""

    def __init__(self, settings: FreeRunning):
        super().__init__()
        self.share = settings.schedule()
        self.recompute = settings.gradient_checkpointing

    def forward(self, head: Attention, encoded: Encoded, tokens_BU: Tensor, token_lens_B: Tensor) -> dict[str, Tensor]:
        logits = self.logits(head, encoded, tokens_BU)
        return {"attention": head.cross_entropy(logits, tokens_BU, token_lens_B)}

    def sample_next(self) -> None:
        """Have the next batch do all that any batch to come will do, as late in training as it may be."""
        self.batch_count = math.inf
        for module in self.modules():
            if isinstance(module, Sampler):
                module.num_batches.zero_()

    def logits(self, head: Attention, encoded: Encoded, tokens_BU: Tensor) -> Tensor:
        """`head.logits` in the pass that keeps gradients."""
        return head.decoder.output(head.hidden(encoded, tokens_BU, self.recompute))


class ScheduledSampling(TeacherForcing):
    def forward(self, head: Attention, encoded: Encoded, tokens_BU: Tensor, token_lens_B: Tensor) -> dict[str, Tensor]:
        share, given_BU = self.now(self.share), tokens_BU
        if share > 0.0:
            with torch.no_grad(), evaluating(head.decoder):
                logits = head.logits(encoded, tokens_BU)
            own_BU = draw_tokens(logits[:, :-1], (head.blank_id, head.sos_eos_id))
            given_BU = torch.where(torch.rand_like(own_BU, dtype=torch.float32) < share, own_BU, tokens_BU)
        logits = self.logits(head, encoded, given_BU)
        return {"attention": head.cross_entropy(logits, tokens_BU, token_lens_B)}


class OwnOutput(TeacherForcing):
    def __init__(self, settings: FreeRunning):
        super().__init__(settings)
        self.sampler = Sampler(settings)

    def forward(self, head: Attention, encoded: Encoded, tokens_BU: Tensor, token_lens_B: Tensor) -> dict[str, Tensor]:
        share = self.now(self.share)
        own = self.sampler(head, encoded, tokens_BU, token_lens_B, wanted=share > 0.0)
        chosen_B = own.there & (torch.rand_like(own.there, dtype=torch.float32) < share)
        if not chosen_B.any():
            losses_B = head.cross_entropy(self.logits(head, encoded, tokens_BU), tokens_BU, token_lens_B)
            return {"attention": losses_B, "own_output": torch.zeros_like(losses_B)}
        width = max(own.tokens.size(1), tokens_BU.size(1))
        truth, sampled = (F.pad(tokens, (0, width - tokens.size(1))) for tokens in (tokens_BU, own.tokens))
        given_BS = torch.where(chosen_B.unsqueeze(1), sampled, truth)
        given_lens_B = torch.where(chosen_B, own.lens, token_lens_B)
        logits = self.logits(head, encoded, given_BS)
        losses_B = optimal_completion_loss(
            logits, given_BS, given_lens_B, tokens_BU, token_lens_B, head.sos_eos_id, head.label_smoothing
        )
        return {
            "attention": losses_B.masked_fill(chosen_B, 0.0),
            "own_output": losses_B.masked_fill(~chosen_B, 0.0),
        }


class ProfessorForcing(TeacherForcing):
    """The parts "fooling", which trains the decoder, and "discriminator", which trains that alone, are 0 for utterances
    without a sample."""

    def __init__(self, settings: FreeRunning, dim: int):
        super().__init__(settings)
        self.sampler = Sampler(settings)
        self.discriminator = Discriminator(dim, settings.adversary_dim, settings.adversary_lr)

    def forward(self, head: Attention, encoded: Encoded, tokens_BU: Tensor, token_lens_B: Tensor) -> dict[str, Tensor]:
        share = self.now(self.share)
        own = self.sampler(head, encoded, tokens_BU, token_lens_B, wanted=share > 0.0)
        forced = head.hidden(encoded, tokens_BU, self.recompute)
        losses_B = head.cross_entropy(head.decoder.output(forced), tokens_BU, token_lens_B)
        fooling, telling = torch.zeros_like(losses_B), torch.zeros_like(losses_B)
        rows = (own.there & (encoded.lens > 0)).nonzero().squeeze(1)
        if len(rows):
            chosen = Encoded(encoded.frames[rows], encoded.lens[rows])
            free, free_lens = head.hidden(chosen, own.tokens[rows], self.recompute), own.lens[rows] + 1
            real = self.discriminator(forced.detach()[rows], token_lens_B[rows] + 1)
            fake = self.discriminator(free.detach(), free_lens)
            right = torch.cat([real > 0, fake < 0]).float().mean()
            told = (F.softplus(-real) + F.softplus(fake)) * (right < TOO_GOOD)
            fooled = F.softplus(-self.discriminator.frozen(free, free_lens)) * (right > TOO_BAD)
            telling = telling.index_copy(0, rows, told)
            fooling = fooling.index_copy(0, rows, share * fooled)
        return {"attention": losses_B, "fooling": fooling, "discriminator": telling}


class Discriminator(Adversary):
    """The logit (B,) that states (B, U, D) come from a decoder that was told the truth: two convolutions, a mean."""

    def __init__(self, dim: int, hidden_dim: int, lr: float):
        super().__init__(lr)
        self.conv1 = Conv1d(dim, hidden_dim, 5, padding=2)
        self.conv2 = Conv1d(hidden_dim, hidden_dim, 5, padding=2)
        self.output = nn.Linear(hidden_dim, 1)

    def forward(self, states_BUD: Tensor, lens_B: Tensor) -> Tensor:
        mask_BU = length_mask(lens_B, states_BUD.size(1))
        x = zero_padding(states_BUD, mask_BU)
        for convolution in (self.conv1, self.conv2):
            x = zero_padding(F.relu(convolution(x.transpose(1, 2))).transpose(1, 2), mask_BU)
        return self.output(x.float().sum(1).div(lens_B.unsqueeze(1)).to(self.output.weight.dtype)).squeeze(1).float()


class Sampler(nn.Module):
    """Samples of the decoder: drawn anew at every `every`-th batch, in between taken from those that were kept.

    What is kept is a buffer of the model, and so part of its checkpoints and undone by a step that is not finite.
    """

    num_batches: Tensor
    keys: Tensor
    tokens: Tensor
    lens: Tensor

    def __init__(self, settings: FreeRunning):
        super().__init__()
        self.every = settings.every
        size = settings.buffer_size
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("keys", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("tokens", torch.zeros(size, settings.buffer_tokens if size else 0, dtype=torch.int32))
        self.register_buffer("lens", torch.full((size,), -1))  # of no sample

    def forward(
        self, head: Attention, encoded: Encoded, tokens_BU: Tensor, token_lens_B: Tensor, wanted: bool
    ) -> Samples:
        due = int(self.num_batches) % self.every == 0
        self.num_batches += 1
        if wanted and due:
            tokens, lens = head.sample(encoded, tokens_BU.size(1) + 1)
            self._keep(_keys_of(tokens_BU, token_lens_B), tokens, lens)
            return Samples(tokens, lens, torch.ones_like(lens, dtype=torch.bool))
        if wanted and len(self.keys):
            keys_B = _keys_of(tokens_BU, token_lens_B)
            places_B = self._places(keys_B)
            there_B = (self.lens[places_B] >= 0) & (self.keys[places_B] == keys_B)
            lens_B = self.lens[places_B].masked_fill(~there_B, 0)
            return Samples(self.tokens[places_B, : int(lens_B.max())].long(), lens_B, there_B)
        return Samples(tokens_BU[:, :0], torch.zeros_like(token_lens_B), torch.zeros_like(token_lens_B).bool())

    def _places(self, keys_B: Tensor) -> Tensor:
        return (keys_B >> 32) % len(self.keys)  # the upper bits are the better mixed ones

    def _keep(self, keys_B: Tensor, tokens_BS: Tensor, lens_B: Tensor) -> None:
        if not len(self.keys):
            return
        width = self.tokens.size(1)
        tokens_BS = F.pad(tokens_BS[:, :width], (0, max(0, width - tokens_BS.size(1)))).int()
        # Of several utterances for one place the last is kept, on every device.
        last = {place: row for row, place in enumerate(self._places(keys_B).tolist())}
        places = torch.tensor(list(last), device=keys_B.device)
        rows = torch.tensor(list(last.values()), device=keys_B.device)
        self.keys[places] = keys_B[rows]
        self.tokens[places] = tokens_BS[rows]
        self.lens[places] = lens_B[rows].clamp(max=width)


def _keys_of(tokens_BU: Tensor, token_lens_B: Tensor) -> Tensor:
    """(B,) numbers that tell transcripts apart: a polynomial of their tokens, modulo 2^64."""
    mask_BU = length_mask(token_lens_B, tokens_BU.size(1))
    key_B = token_lens_B.clone()
    for token_B, valid_B in zip(tokens_BU.unbind(1), mask_BU.unbind(1), strict=True):
        key_B = torch.where(valid_B, key_B * 6364136223846793005 + token_B + 1442695040888963407, key_B)
    return key_B


def draw_tokens(logits: Tensor, never: tuple[int, ...] = ()) -> Tensor:
    """Tokens (...) drawn from the distributions of logits (..., V); `never` are not drawn.

    By the Gumbel trick, which takes a NaN for what it is and goes on, as a step that is not finite must.
    """
    logits = logits.float().clone()
    for token in never:
        logits[..., token] = -torch.inf
    return (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module without dropout; afterwards every part of it is as before, frozen ones included."""
    were_training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in were_training:
            part.training = True
