"""What the transducer searches share: every utterance has its own search, what these ask for is computed together.

A search asks what the head expects at a frame, after a context: the last tokens, as many as the decoder sees. As most
frames are blank, it will want to know the same of the frames that follow, so that they are computed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from functools import reduce

import torch
from torch import Tensor

from asr.heads.transducer import Transducer
from asr.types import Encoded, Hypothesis

# The newest token is the last. For what was before an utterance's start stands vocab_size.
Context = tuple[int, ...]
# Yields a frame and contexts that it misses in its looks, and goes on when they are there. At the end its hypothesis is
# complete.
UtteranceSearch = Generator[tuple[int, Iterable[Context]], None, None]

WIDEST = 8  # frames in a window


class Looks:
    """What the head expects in one utterance, by context for a window of frames."""

    def __init__(self) -> None:
        self._windows: dict[Context, tuple[int, list[list[float]], list[list[int]]]] = {}

    def get(self, context: Context, frame: int) -> tuple[list[float], list[int]] | None:
        """Log-probabilities of the likeliest symbols, falling, and the symbols; None where they are not known."""
        start, log_probs, symbols = self._windows.get(context, (0, [], []))
        ahead = frame - start
        return (log_probs[ahead], symbols[ahead]) if 0 <= ahead < len(symbols) else None

    def add(self, context: Context, start: int, log_probs: list[list[float]], symbols: list[list[int]]) -> bool:
        """Note those of a window that begins at frame `start`; tells whether it follows another of this context."""
        follows = self.get(context, start - 1) is not None
        self._windows[context] = start, log_probs, symbols
        return follows


@torch.inference_mode()
def search_batch(
    head: Transducer,
    encoded: Encoded,
    search: Callable[[Looks, int, Context, Hypothesis], UtteranceSearch],
    num_likeliest: int,
    blank_penalty: float = 0.0,
    temperature: float = 1.0,
) -> list[Hypothesis]:
    """Hypotheses of all utterances, each by a `search` with its looks, number of frames and first context.

    num_likeliest: symbols in a look. blank_penalty: subtracted from the logit of blank. temperature: divides logits.
    """
    steps = Steps(head, encoded, blank_penalty, temperature)
    looks = [Looks() for _ in steps.lens]
    found = [Hypothesis([], [], 0.0) for _ in steps.lens]
    searches = [search(*given) for given in zip(looks, steps.lens, [steps.start] * len(found), found, strict=True)]
    width = 1
    while missing := {row: miss for row, searching in enumerate(searches) if (miss := next(searching, None))}:
        asked = [(row, frame, context) for row, (frame, contexts) in missing.items() for context in contexts]
        places = [(row, frame + ahead) for row, frame, _ in asked for ahead in range(width)]
        decoded = steps.decoded([context for _, _, context in asked]).unsqueeze(1)
        likeliest = steps.log_probs(steps.frames(places).unflatten(0, (-1, width)), decoded).topk(num_likeliest)
        num_following = 0
        results = zip(asked, likeliest.values.tolist(), likeliest.indices.tolist(), strict=True)
        for (row, frame, context), log_probs, symbols in results:
            num_following += looks[row].add(context, frame, log_probs, symbols)
        # Half of the windows should be the first of their context: more, and they are too wide, fewer, too narrow.
        width = min(max(width + (1 if 2 * num_following > len(asked) else -1), 1), WIDEST)
    return found


class Steps:
    """Decoder and joiner over the frames of a batch, with all that does not change from step to step computed once.

    Attributes: lens; start, the context of the first frame, in which blank is the only token.
    """

    def __init__(self, head: Transducer, encoded: Encoded, blank_penalty: float, temperature: float):
        if temperature <= 0:
            raise ValueError(f"temperature={temperature}: must be above 0")
        self.blank_id = head.blank_id
        self.blank_penalty = blank_penalty
        self.temperature = temperature
        self.lens: list[int] = encoded.lens.tolist()
        self._num_frames = max(self.lens, default=0)
        self._frames_NJ = head.joiner.encoder_proj(encoded.frames[:, : self._num_frames]).flatten(0, 1)
        self._decoder_proj, self._output_linear = head.joiner.decoder_proj, head.joiner.output_linear
        self._tables = head.decoder.tables().unbind()
        self.start: Context = (*[head.vocab_size] * (len(self._tables) - 1), head.blank_id)
        self._decoded: dict[Context, Tensor] = {}

    def frames(self, places: Iterable[tuple[int, int]]) -> Tensor:
        """(N, J) projected frames by utterance and time; past the end of the longest utterance its last one."""
        last = self._num_frames - 1
        rows = [utterance * self._num_frames + (time if time < last else last) for utterance, time in places]
        return self._frames_NJ.index_select(0, torch.tensor(rows, device=self._frames_NJ.device))

    def decoded(self, contexts: list[Context]) -> Tensor:
        """(N, J) projected decoder output, computed once for every context."""
        unknown = [context for context in dict.fromkeys(contexts) if context not in self._decoded]
        if unknown:
            self._decoded.update(zip(unknown, self.decode(unknown).unbind(), strict=True))
        return torch.stack([self._decoded[context] for context in contexts])

    def decode(self, contexts: list[Context]) -> Tensor:
        """(N, J) projected decoder output."""
        tokens_CN = torch.tensor(contexts, device=self._tables[0].device).unbind(1)
        looked_up = [table.index_select(0, tokens) for table, tokens in zip(self._tables, tokens_CN, strict=True)]
        decoded = reduce(torch.add, looked_up)
        return self._decoder_proj(decoded.relu_() if len(looked_up) > 1 else decoded)

    def log_probs(self, frames: Tensor, decoded: Tensor) -> Tensor:
        """(..., V) fp32 log-probabilities of the symbol that follows, of frames and decoder output that broadcast."""
        logits = self._output_linear(_tanh(frames + decoded)).float()
        if self.blank_penalty:
            logits[..., self.blank_id] -= self.blank_penalty
        if self.temperature != 1.0:
            logits /= self.temperature
        return logits.log_softmax(-1)


def _tanh(x: Tensor) -> Tensor:
    """By way of the sigmoid, in fp32: on a CPU in a third of the time of PyTorch's own."""
    return x.float().mul(2).sigmoid_().mul_(2).sub_(1).to(x.dtype)
