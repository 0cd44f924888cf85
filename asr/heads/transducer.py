"""Transducer (Graves, 2012) with a stateless decoder (Ghodsi et al., 2020), trained with pruned RNN-T as in icefall."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.heads.head import Head, check_tokens
from asr.layers.balancer import Balancer
from asr.layers.convolve import Conv1d
from asr.layers.masks import length_mask, zero_padding
from asr.losses.full_rnnt import full_loss
from asr.losses.lattice import Topology
from asr.losses.pruned_rnnt import Transcripts, keep_rows, pruned_loss, pruning_ranges, simple_loss
from asr.types import Encoded

# Channels that the decoder's convolution mixes with one another.
GROUP_SIZE = 4


class Transducer(Head):
    """Decoder, joiner, and the two projections of the trivial joiner that pruning goes by.

    decoder_dim, joiner_dim: widths. context_size: last tokens that the decoder sees.
    loss: "pruned", or "full" for the loss over the whole lattice, without the trivial joiner.
    topology: "regular", where a frame may emit any number of tokens, so that one frame suffices for all; or
        "modified", at most one.
    prune_range: rows of the lattice that a frame keeps, at least 2.
    lm_scale, am_scale: see `simple_loss`.
    simple_loss_scale: weight of the trivial joiner's loss after warm-up.
    warmup_batches: reference batches over which that weight falls from 1, and the weight of the pruned loss rises from
        0.1 to 1: pruning by an untrained trivial joiner keeps the wrong rows. 0 is without warm-up.

    An utterance without frames, or in the modified topology with fewer than tokens, has loss 0 and no gradient. An
    empty transcript is trained as all blank. Raises ValueError for impossible sizes and scales.
    """

    searches = ("greedy_search", "modified_beam_search")

    def __init__(
        self,
        input_dim: int,
        vocab_size: int,
        blank_id: int = 0,
        decoder_dim: int = 512,
        joiner_dim: int = 512,
        context_size: int = 2,
        loss: Literal["pruned", "full"] = "pruned",
        topology: Topology = "regular",
        prune_range: int = 5,
        lm_scale: float = 0.25,
        am_scale: float = 0.0,
        simple_loss_scale: float = 0.5,
        warmup_batches: float = 2000.0,
    ):
        super().__init__()
        if prune_range < 2:
            raise ValueError(f"head.prune_range={prune_range}: at least 2, or no frame could emit a token")
        if min(lm_scale, am_scale) < 0 or lm_scale + am_scale > 1:
            raise ValueError(f"head.lm_scale={lm_scale}, head.am_scale={am_scale}: from 0, and 1 at most together")
        if simple_loss_scale < 0 or warmup_batches < 0:
            raise ValueError(f"head.simple_loss_scale={simple_loss_scale}, warmup_batches={warmup_batches}: from 0")
        if loss == "full" and topology != "regular":
            raise ValueError(f"head.topology={topology}: head.loss=full knows the regular topology only")
        self.vocab_size = vocab_size
        self.blank_id = blank_id
        self.loss_kind = loss
        self.topology = topology
        self.prune_range = prune_range
        self.lm_scale = lm_scale
        self.am_scale = am_scale
        self.simple_loss_scale = simple_loss_scale
        self.warmup_batches = warmup_batches
        self.batch_count = 0.0
        self.decoder = StatelessDecoder(vocab_size, decoder_dim, context_size, blank_id)
        self.joiner = Joiner(input_dim, decoder_dim, joiner_dim, vocab_size)
        if loss == "pruned":
            self.simple_am_proj = _small_linear(input_dim, vocab_size)
            self.simple_lm_proj = _small_linear(decoder_dim, vocab_size)

    def loss_parts(self, encoded: Encoded, tokens_BU: Tensor, token_lens_B: Tensor) -> dict[str, Tensor]:
        """Parts "simple" and "pruned", or "full". Raises ValueError where a transcript holds blank or a wrong id."""
        check_tokens(tokens_BU, token_lens_B, self.vocab_size, self.blank_id)
        feasible_B = self.feasible(encoded.lens, tokens_BU, token_lens_B)
        transcripts = Transcripts(
            tokens_BU.masked_fill(~length_mask(token_lens_B, tokens_BU.size(1)), self.blank_id),
            torch.where(feasible_B, token_lens_B, 0),
            torch.where(feasible_B, encoded.lens, 0),
            self.blank_id,
            self.topology,
        )
        frames = zero_padding(encoded.frames, length_mask(transcripts.frame_lens_B, encoded.frames.size(1)))
        decoded = self.decoder(transcripts.tokens_BU, transcripts.token_lens_B)
        joiner = self.joiner
        if self.loss_kind == "full":
            logits_BTUV = joiner(joiner.encoder_proj(frames)[:, :, None], joiner.decoder_proj(decoded)[:, None])
            return {"full": full_loss(logits_BTUV, transcripts)}

        simple_B, emit_share, blank_share = simple_loss(
            self.simple_am_proj(frames), self.simple_lm_proj(decoded), transcripts, self.lm_scale, self.am_scale
        )
        ranges = pruning_ranges(emit_share, blank_share, transcripts, self.prune_range)
        kept_BTRD = keep_rows(joiner.decoder_proj(decoded), ranges)
        pruned_B = pruned_loss(joiner(joiner.encoder_proj(frames)[:, :, None], kept_BTRD), transcripts, ranges)
        warmth = min(1.0, self.batch_count / self.warmup_batches) if self.warmup_batches else 1.0
        return {
            "simple": (1.0 - warmth * (1.0 - self.simple_loss_scale)) * simple_B,
            "pruned": (0.1 + 0.9 * warmth) * pruned_B,
        }

    def feasible(self, lens_B: Tensor, tokens_BU: Tensor, token_lens_B: Tensor) -> Tensor:
        """(B,) mask: at least one frame, in the modified topology one for each token."""
        needed_B = token_lens_B if self.topology == "modified" else torch.ones_like(token_lens_B)
        return lens_B >= needed_B.clamp(min=1)

    def min_frames(self, tokens: list[int]) -> int:
        return max(1, len(tokens)) if self.topology == "modified" else 1


class StatelessDecoder(nn.Module):
    """A token's embedding, mixed by a grouped convolution and ReLU with those of the tokens before it.

    With a context of 1 the embedding is all there is. Before the first token stands blank, before that zeros.
    Embeddings and output are kept in range by their gradients, as in icefall: drift would spoil averages of models.
    """

    def __init__(self, vocab_size: int, dim: int, context_size: int, blank_id: int):
        super().__init__()
        if context_size < 1:
            raise ValueError(f"head.context_size={context_size}: must be at least 1")
        if context_size > 1 and dim % GROUP_SIZE:
            raise ValueError(f"head.decoder_dim={dim}: a multiple of {GROUP_SIZE} is needed where context_size > 1")
        self.context_size = context_size
        self.blank_id = blank_id
        self.embedding = nn.Embedding(vocab_size, dim)
        self.balance_embedding = _range_balancer()
        if context_size > 1:
            self.conv = Conv1d(dim, dim, context_size, groups=dim // GROUP_SIZE, bias=False)
            self.balance_output = _range_balancer()

    def forward(self, tokens_BU: Tensor, token_lens_B: Tensor) -> Tensor:
        """(B, U + 1, D): after none, one, ..., all of the tokens (B, U); those from `token_lens_B` on only fill up."""
        mask_BU = length_mask(token_lens_B + 1, tokens_BU.size(1) + 1)
        embedded = self.embedding(F.pad(tokens_BU, (1, 0), value=self.blank_id))
        embedded = self.balance_embedding(embedded, mask_BU)
        if self.context_size == 1:
            return embedded
        padded = F.pad(embedded, (0, 0, self.context_size - 1, 0))
        mixed = F.relu(self.conv(padded.transpose(1, 2)).transpose(1, 2))
        return self.balance_output(mixed, mask_BU)

    def tables(self) -> Tensor:
        """(C, V + 1, D) what every token adds at each of the C places of the context, the last place being the newest.

        The output after a context is the sum over its places, through ReLU where C > 1. Row V stands for no token.
        """
        embedded = F.pad(self.embedding.weight, (0, 0, 0, 1))
        if self.context_size == 1:
            return embedded[None]
        # As matrix products: PyTorch's grouped convolution takes ten times as long on a CPU here.
        grouped = embedded.unflatten(1, (-1, GROUP_SIZE))
        kernels = self.conv.weight.unflatten(0, (-1, GROUP_SIZE))
        return torch.einsum("vgi,goic->cvgo", grouped, kernels).flatten(2)


def _range_balancer() -> Balancer:
    return Balancer(min_positive=0.0, max_positive=1.0, min_abs=0.5, max_abs=1.0, probability=0.05)


class Joiner(nn.Module):
    """Projections of frames and decoder to one width, tanh of their sum, and logits."""

    def __init__(self, encoder_dim: int, decoder_dim: int, joiner_dim: int, vocab_size: int):
        super().__init__()
        self.encoder_proj = _small_linear(encoder_dim, joiner_dim)
        self.decoder_proj = _small_linear(decoder_dim, joiner_dim)
        self.output_linear = nn.Linear(joiner_dim, vocab_size)

    def forward(self, frames: Tensor, decoded: Tensor) -> Tensor:
        """Logits (..., V) of projected frames and projected decoder output, of shapes that broadcast."""
        return self.output_linear(torch.tanh(frames + decoded))


def _small_linear(input_dim: int, output_dim: int, scale: float = 0.25) -> nn.Linear:
    """A linear layer that starts near zero, so that early on neither side of a joiner outweighs the other.

    | parameter | drawn                                      |
    |-----------|--------------------------------------------|
    | weight    | as PyTorch does, times `scale`             |
    | bias      | uniform within 0.1 * `scale`               |
    """
    layer = nn.Linear(input_dim, output_dim)
    with torch.no_grad():
        layer.weight *= scale
        nn.init.uniform_(layer.bias, -0.1 * scale, 0.1 * scale)
    return layer
