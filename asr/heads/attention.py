"""Attention decoder: predicts a transcript token by token, from the left and, in U2++, from the right as well."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from asr.heads.free_running import FreeRunning, draw_tokens, evaluating
from asr.heads.head import Head, check_tokens
from asr.layers.transformer_decoder import DecoderState, TransformerDecoder
from asr.losses.label_smoothing import label_smoothing_loss
from asr.types import Encoded


class Attention(Head):
    """Transformer decoder over the frames; the loss is label-smoothed cross-entropy, summed over tokens and the end.

    One symbol starts and ends a transcript: the tokenizer's <sos/eos> where it has one (`tokenizer.sos_eos=true`), else
    blank, which no transcript holds. An utterance without a frame is infeasible.

    num_layers, num_heads, feed_forward_dim, dropout, self_attention_dropout, cross_attention_dropout: of the decoder,
        which is as wide as the encoder.
    attention: "full", or "linear" (Katharopoulos et al., 2020), whose steps cost the same however long the transcript.
    label_smoothing: probability that targets leave to all other tokens.
    reverse_layers: of a second decoder that reads from right to left (U2++, Wu et al., 2021); 0 for none.
    reverse_weight: share of its loss in the sum.
    free_running: what the decoder that reads from the left is given in training, see `FreeRunning`.
    """

    searches = ("attention",)

    def __init__(
        self,
        input_dim: int,
        vocab_size: int,
        blank_id: int = 0,
        sos_eos_id: int | None = None,
        num_layers: int = 6,
        num_heads: int = 4,
        feed_forward_dim: int = 2048,
        dropout: float = 0.1,
        self_attention_dropout: float = 0.0,
        cross_attention_dropout: float = 0.0,
        label_smoothing: float = 0.1,
        reverse_layers: int = 0,
        reverse_weight: float = 0.0,
        attention: Literal["full", "linear"] = "full",
        free_running: FreeRunning | dict[str, Any] | None = None,
    ):
        super().__init__()
        if not 0.0 <= label_smoothing < 1.0 or not 0.0 <= reverse_weight < 1.0:
            raise ValueError(f"label_smoothing {label_smoothing} and reverse_weight {reverse_weight}: within [0, 1)")
        if (reverse_layers > 0) != (reverse_weight > 0):
            raise ValueError(f"reverse_layers {reverse_layers} and reverse_weight {reverse_weight}: give both or none")
        self.vocab_size = vocab_size
        self.blank_id = blank_id
        self.sos_eos_id = blank_id if sos_eos_id is None else sos_eos_id
        self.label_smoothing = label_smoothing
        self.reverse_weight = reverse_weight

        def decoder(layers: int) -> TransformerDecoder:
            return TransformerDecoder(
                vocab_size, input_dim, layers, num_heads, feed_forward_dim, dropout, self_attention_dropout,
                cross_attention_dropout, attention,
            )  # fmt: skip

        self.decoder = decoder(num_layers)
        self.reverse_decoder = decoder(reverse_layers) if reverse_layers else None
        settings = FreeRunning(**free_running) if isinstance(free_running, dict) else free_running or FreeRunning()
        self.free_running = settings.make(input_dim)

    def loss_parts(self, encoded: Encoded, tokens_BU: Tensor, token_lens_B: Tensor) -> dict[str, Tensor]:
        """Raises ValueError where a transcript holds blank or an id outside the vocabulary."""
        check_tokens(tokens_BU, token_lens_B, self.vocab_size, self.blank_id)
        if self.training:
            parts = self.free_running(self, encoded, tokens_BU, token_lens_B)
        else:
            parts = {"attention": self.cross_entropy(self.logits(encoded, tokens_BU), tokens_BU, token_lens_B)}
        parts = {name: (1 - self.reverse_weight) * losses_B for name, losses_B in parts.items()}
        if self.reverse_decoder is not None:
            backward_BU = reverse_tokens(tokens_BU, token_lens_B)
            losses_B = self.cross_entropy(self.logits(encoded, backward_BU, reverse=True), backward_BU, token_lens_B)
            parts["reverse"] = self.reverse_weight * losses_B
        feasible = self.feasible(encoded.lens, tokens_BU, token_lens_B)
        return {name: torch.where(feasible, losses_B, 0.0) for name, losses_B in parts.items()}

    def cross_entropy(self, logits_BUV: Tensor, tokens_BU: Tensor, token_lens_B: Tensor) -> Tensor:
        """(B,) label-smoothed cross-entropies of the tokens and the end, for what `logits` gives."""
        targets = self._targets(tokens_BU, token_lens_B)
        return label_smoothing_loss(logits_BUV, targets, token_lens_B + 1, self.label_smoothing)

    def feasible(self, lens_B: Tensor, tokens_BU: Tensor, token_lens_B: Tensor) -> Tensor:
        return lens_B > 0

    def min_frames(self, tokens: list[int]) -> int:
        return 1

    def logits(self, encoded: Encoded, tokens_NU: Tensor, reverse: bool = False) -> Tensor:
        """Logits (N, U + 1, V) of each token and of the end, given all tokens before it.

        N rows are B utterances times N / B transcripts each; of the decoder that reads from the right, the transcripts
        are those that `reverse_tokens` gives.
        """
        decoder = self.reverse_decoder if reverse else self.decoder
        assert decoder is not None
        return decoder(F.pad(tokens_NU, (1, 0), value=self.sos_eos_id), encoded.frames, encoded.lens)

    def hidden(self, encoded: Encoded, tokens_NU: Tensor, recompute: bool = False) -> Tensor:
        """(N, U + 1, D) of which `self.decoder.output` makes the logits. recompute: see `TransformerDecoder.hidden`."""
        inputs = F.pad(tokens_NU, (1, 0), value=self.sos_eos_id)
        return self.decoder.hidden(inputs, encoded.frames, encoded.lens, recompute)

    @torch.no_grad()
    def sample(self, encoded: Encoded, num_steps: int) -> tuple[Tensor, Tensor]:
        """Transcripts (B, S <= num_steps) drawn from the decoder, without dropout, and their lengths (B,).

        A transcript that has not ended by then is cut.
        """
        lens_B = torch.zeros_like(encoded.lens)
        newest = torch.full_like(encoded.lens, self.sos_eos_id)
        never = () if self.blank_id == self.sos_eos_id else (self.blank_id,)
        ended = torch.zeros_like(newest, dtype=torch.bool)
        tokens: list[Tensor] = []
        with evaluating(self.decoder):
            state = self.start(encoded, 1, num_steps)
            while len(tokens) < num_steps and not ended.all():
                logits, state = self.decoder.step(newest, state)
                newest = draw_tokens(logits, never)
                ended = ended | (newest == self.sos_eos_id)
                tokens.append(newest.masked_fill(ended, self.sos_eos_id))
                lens_B = lens_B + ~ended
        return torch.stack(tokens, dim=1)[:, : int(lens_B.max())], lens_B

    def log_likelihood(self, encoded: Encoded, tokens_NU: Tensor, token_lens_N: Tensor, reverse: bool) -> Tensor:
        """(N,) fp32 log-probabilities of whole transcripts, their ends included, as one of the decoders sees them."""
        if reverse:
            tokens_NU = reverse_tokens(tokens_NU, token_lens_N)
        logits = self.logits(encoded, tokens_NU, reverse)
        return -label_smoothing_loss(logits, self._targets(tokens_NU, token_lens_N), token_lens_N + 1, smoothing=0.0)

    def start(self, encoded: Encoded, rows: int, num_steps: int) -> DecoderState:
        """The state of `rows` transcripts per utterance before the first of at most `num_steps` steps."""
        return self.decoder.start(encoded.frames, encoded.lens, rows, num_steps)

    def step(self, tokens_N: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """fp32 log-probabilities (N, V) of what follows `tokens_N`, the newest token of every row; then the state."""
        logits, state = self.decoder.step(tokens_N, state)
        return F.log_softmax(logits.float(), dim=-1), state

    def with_room(self, state: DecoderState, num_steps: int) -> DecoderState:
        """The same state with room for `num_steps` steps from the first one on."""
        return self.decoder.with_room(state, num_steps)

    def attended_frames(self, encoded: Encoded, tokens_NU: Tensor) -> Tensor:
        """(N, U) frame that the decoder looks at most when it predicts each token."""
        inputs = F.pad(tokens_NU, (1, -1), value=self.sos_eos_id)
        return self.decoder.attended_frames(inputs, encoded.frames, encoded.lens)

    def _targets(self, tokens_NU: Tensor, token_lens_N: Tensor) -> Tensor:
        """(N, U + 1): the tokens and the end."""
        return F.pad(tokens_NU, (0, 1)).scatter(1, token_lens_N.unsqueeze(1), self.sos_eos_id)


def reverse_tokens(tokens_BU: Tensor, token_lens_B: Tensor) -> Tensor:
    """The valid tokens of each row in reverse order; what follows them is one of them again."""
    places = token_lens_B.unsqueeze(1) - 1 - torch.arange(tokens_BU.size(1), device=tokens_BU.device)
    return tokens_BU.gather(1, places.clamp(min=0))
