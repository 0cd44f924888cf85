"""The layer of Transformer encoders and decoders (Vaswani et al., 2017), with norms before the modules."""

from __future__ import annotations

from torch import Tensor, nn

from asr.layers.dropout import Dropout
from asr.layers.feed_forward import FeedForward
from asr.layers.linear_attention import LinearCrossAttention, LinearSelfAttention
from asr.layers.multi_head import FullCrossAttention, FullSelfAttention, State

SELF_ATTENTIONS: dict[str, type[FullSelfAttention] | type[LinearSelfAttention]]
SELF_ATTENTIONS = {"full": FullSelfAttention, "linear": LinearSelfAttention}
CROSS_ATTENTIONS: dict[str, type[FullCrossAttention] | type[LinearCrossAttention]]
CROSS_ATTENTIONS = {"full": FullCrossAttention, "linear": LinearCrossAttention}


class TransformerLayer(nn.Module):
    """Self-attention, attention over a memory where there is one, feed-forward; each on a normed input and added to it.

    dim: width D. attention: "full" or "linear". causal: no position looks ahead; needed for `step`.
    cross: with attention over a memory. dropout: of the output of every module.
    self_attention_dropout, cross_attention_dropout: of the attention weights, which linear attention does not have.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        feed_forward_dim: int,
        dropout: float,
        attention: str,
        causal: bool,
        cross: bool,
        self_attention_dropout: float = 0.0,
        cross_attention_dropout: float = 0.0,
    ):
        super().__init__()
        if attention not in SELF_ATTENTIONS:
            raise ValueError(f"attention {attention!r} is none of {', '.join(SELF_ATTENTIONS)}")
        self.self_norm = nn.LayerNorm(dim)
        self.self_attention = SELF_ATTENTIONS[attention](dim, num_heads, self_attention_dropout, causal)
        self.cross_norm = nn.LayerNorm(dim) if cross else None
        self.cross_attention = CROSS_ATTENTIONS[attention](dim, num_heads, cross_attention_dropout) if cross else None
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.feed_forward = FeedForward(dim, feed_forward_dim, dropout, activation="relu")
        self.dropout = Dropout(dropout)

    def forward(self, x_NUD: Tensor, lens_N: Tensor, memory: State = ()) -> Tensor:
        """(N, U, D) of (N, U, D); positions from `lens_N` on are not seen by valid ones, but must be finite.

        memory: what `remember` gave, of B utterances, each with N / B rows side by side.
        """
        x_NUD = self.look_back(x_NUD, lens_N)
        if self.cross_attention is not None and self.cross_norm is not None:
            x_NUD = x_NUD + self.dropout(self.cross_attention.attend(self.cross_norm(x_NUD), memory))
        return x_NUD + self.feed_forward(self.feed_forward_norm(x_NUD))

    def step(self, x_ND: Tensor, state: State, memory: State = ()) -> tuple[Tensor, State]:
        """The same for the next position of every row, and the state of self-attention after it."""
        attended, state = self.self_attention.step(self.self_norm(x_ND), state)
        x_ND = x_ND + self.dropout(attended)
        if self.cross_attention is not None and self.cross_norm is not None:
            attended, _ = self.cross_attention.step(self.cross_norm(x_ND), memory)
            x_ND = x_ND + self.dropout(attended)
        return x_ND + self.feed_forward(self.feed_forward_norm(x_ND)), state

    def remember(self, memory_BTD: Tensor, memory_lens_B: Tensor) -> State:
        """The memory as this layer looks at it."""
        assert self.cross_attention is not None
        return self.cross_attention.start(memory_BTD, memory_lens_B)

    def look_back(self, x_NUD: Tensor, lens_N: Tensor) -> Tensor:
        """The first part of the layer, self-attention."""
        return x_NUD + self.dropout(self.self_attention(self.self_norm(x_NUD), lens_N))

    def memory_weights(self, x_NUD: Tensor, memory_BTD: Tensor, memory_lens_B: Tensor) -> Tensor:
        """(N, U, T) weights of the attention over the memory, for what `look_back` gave."""
        assert self.cross_attention is not None and self.cross_norm is not None
        return self.cross_attention.weights(self.cross_norm(x_NUD), memory_BTD, memory_lens_B)
