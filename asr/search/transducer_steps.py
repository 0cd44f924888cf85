"""What the transducer searches share: the head's log-probabilities for a context and a frame, one step at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from asr.heads.transducer import Transducer
from asr.types import Encoded


class Steps:
    """Decoder and joiner over the frames of a batch, with all that does not change from step to step computed once.

    A context, the last C tokens, is one number in base V + 1, the newest token last; the digit V stands for no token.

    blank_penalty: subtracted from the logit of blank. temperature: divides the logits.
    Attributes: frames_BTJ, projected frames, T being the longest valid length; lens; num_contexts, an upper bound.
    """

    def __init__(self, head: Transducer, encoded: Encoded, blank_penalty: float = 0.0, temperature: float = 1.0):
        if temperature <= 0:
            raise ValueError(f"temperature={temperature}: must be above 0")
        self.blank_id = head.blank_id
        self.vocab_size = head.vocab_size
        self.blank_penalty = blank_penalty
        self.temperature = temperature
        self.lens: list[int] = encoded.lens.tolist()
        self.frames_BTJ = head.joiner.encoder_proj(encoded.frames[:, : max(self.lens, default=0)])
        self._joiner = head.joiner
        self._tables = head.decoder.tables().unbind(0)
        self._base = head.vocab_size + 1
        self.context_size = len(self._tables)
        self.num_contexts = self._base**self.context_size
        utterances = torch.arange(len(self.lens), device=self.frames_BTJ.device)
        self._utterance_starts_B1 = (utterances * self.num_contexts)[:, None]

    def start(self, *shape: int) -> Tensor:
        """Contexts of an utterance's start: blank, and before it no token."""
        none_before = self.num_contexts - self._base
        return torch.full(shape, none_before + self.blank_id, device=self.frames_BTJ.device)

    def extend(self, contexts: Tensor, tokens: Tensor) -> Tensor:
        """The contexts after one more token."""
        return contexts * self._base % self.num_contexts + tokens

    def with_utterance(self, contexts_BK: Tensor) -> Tensor:
        """Numbers that tell contexts of different utterances apart: utterance * num_contexts + context."""
        return contexts_BK + self._utterance_starts_B1[: len(contexts_BK)]

    def decode(self, contexts_N: Tensor) -> Tensor:
        """(N, J) projected decoder output after these contexts."""
        digits_N, rest_N = [], contexts_N
        for _ in range(self.context_size - 1):
            digits_N.append(rest_N % self._base)
            rest_N = rest_N // self._base
        digits_N.append(rest_N)
        decoded = self._tables[0].index_select(0, digits_N[-1])
        for table, digit_N in zip(self._tables[1:], reversed(digits_N[:-1]), strict=True):
            decoded += table.index_select(0, digit_N)
        return self._joiner.decoder_proj(decoded.relu_() if self.context_size > 1 else decoded)

    def log_probs(self, frames_NJ: Tensor, decoded_NJ: Tensor) -> Tensor:
        """(N, V) fp32 log-probabilities of the symbol that follows."""
        logits = self._joiner(frames_NJ, decoded_NJ).float()
        if self.blank_penalty:
            logits[:, self.blank_id] -= self.blank_penalty
        if self.temperature != 1.0:
            logits /= self.temperature
        return logits.log_softmax(1)
