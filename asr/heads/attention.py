"""Attention decoder: predicts a transcript token by token, from the left and, in U2++, from the right as well."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asr.heads.head import Head, check_tokens
from asr.layers.masks import length_mask
from asr.layers.transformer_decoder import DecoderState, TransformerDecoder
from asr.losses.label_smoothing import label_smoothing_loss
from asr.types import Encoded


class Attention(Head):
    """Transformer decoder over the frames; the loss is label-smoothed cross-entropy, summed over tokens and the end.

    One symbol starts and ends a transcript: the tokenizer's <sos/eos> where it has one (`tokenizer.sos_eos=true`), else
    blank, which no transcript holds. An utterance without a frame is infeasible.

    num_layers, num_heads, feed_forward_dim, dropout, self_attention_dropout, cross_attention_dropout: of the decoder,
        which is as wide as the encoder.
    label_smoothing: probability that targets leave to all other tokens.
    reverse_layers: of a second decoder that reads from right to left (U2++, Wu et al., 2021); 0 for none.
    reverse_weight: share of its loss in the sum.
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
                cross_attention_dropout,
            )  # fmt: skip

        self.decoder = decoder(num_layers)
        self.reverse_decoder = decoder(reverse_layers) if reverse_layers else None

    def loss_parts(self, encoded: Encoded, tokens_BU: Tensor, token_lens_B: Tensor) -> dict[str, Tensor]:
        """Raises ValueError where a transcript holds blank or an id outside the vocabulary."""
        check_tokens(tokens_BU, token_lens_B, self.vocab_size, self.blank_id)
        feasible = self.feasible(encoded.lens, tokens_BU, token_lens_B)

        def losses(tokens_BU: Tensor, reverse: bool) -> Tensor:
            logits = self.logits(encoded, tokens_BU, reverse)
            targets = self._targets(tokens_BU, token_lens_B)
            losses_B = label_smoothing_loss(logits, targets, token_lens_B + 1, self.label_smoothing)
            weight = self.reverse_weight if reverse else 1 - self.reverse_weight
            return torch.where(feasible, weight * losses_B, 0.0)

        parts = {"attention": losses(tokens_BU, reverse=False)}
        if self.reverse_decoder is not None:
            parts["reverse"] = losses(reverse_tokens(tokens_BU, token_lens_B), reverse=True)
        return parts

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
        return decoder(F.pad(tokens_NU, (1, 0), value=self.sos_eos_id), encoded.frames, self._frames_mask(encoded))

    def log_likelihood(self, encoded: Encoded, tokens_NU: Tensor, token_lens_N: Tensor, reverse: bool) -> Tensor:
        """(N,) fp32 log-probabilities of whole transcripts, their ends included, as one of the decoders sees them."""
        if reverse:
            tokens_NU = reverse_tokens(tokens_NU, token_lens_N)
        logits = self.logits(encoded, tokens_NU, reverse)
        return -label_smoothing_loss(logits, self._targets(tokens_NU, token_lens_N), token_lens_N + 1, smoothing=0.0)

    def start(self, encoded: Encoded, rows: int, num_steps: int) -> DecoderState:
        """The state of `rows` transcripts per utterance before the first of at most `num_steps` steps."""
        return self.decoder.start(encoded.frames, self._frames_mask(encoded), rows, num_steps)

    def step(self, tokens_N: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """fp32 log-probabilities (N, V) of what follows `tokens_N`, the newest token of every row; then the state."""
        logits, state = self.decoder.step(tokens_N, state)
        return F.log_softmax(logits.float(), dim=-1), state

    def attended_frames(self, encoded: Encoded, tokens_NU: Tensor) -> Tensor:
        """(N, U) frame that the decoder looks at most when it predicts each token."""
        inputs = F.pad(tokens_NU, (1, -1), value=self.sos_eos_id)
        return self.decoder.attended_frames(inputs, encoded.frames, self._frames_mask(encoded))

    def _targets(self, tokens_NU: Tensor, token_lens_N: Tensor) -> Tensor:
        """(N, U + 1): the tokens and the end."""
        return F.pad(tokens_NU, (0, 1)).scatter(1, token_lens_N.unsqueeze(1), self.sos_eos_id)

    @staticmethod
    def _frames_mask(encoded: Encoded) -> Tensor:
        return length_mask(encoded.lens, encoded.frames.size(1))


def reverse_tokens(tokens_BU: Tensor, token_lens_B: Tensor) -> Tensor:
    """The valid tokens of each row in reverse order; what follows them is one of them again."""
    places = token_lens_B.unsqueeze(1) - 1 - torch.arange(tokens_BU.size(1), device=tokens_BU.device)
    return tokens_BU.gather(1, places.clamp(min=0))
