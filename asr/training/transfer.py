"""Weights of another run as a start: which tensors are taken, and what becomes of those that know the vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asr.layers.parts import place_of
from asr.text.tokenizer import Tokenizer, tokenizer_from_state
from asr.training.checkpoint import load_checkpoint
from asr.training.select import select_weights

log = logging.getLogger(__name__)


@dataclass
class Source:
    """Weights to start from, where they came from, and what is known of the run: its tokenizer and its settings."""

    weights: dict[str, Tensor]
    where: str
    tokenizer: Tokenizer | None
    config: dict[str, Any]


@dataclass
class Transfer:
    """What became of every tensor of the model and of the source.

    loaded: as the source has them. copied: rows of the tokens that both vocabularies have; the other rows are new.
    new: as they were initialised. skipped: of the source, with the reason. shared_tokens: by their names in the model.
    """

    source: str
    loaded: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    shared_tokens: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def report(self) -> None:
        """Tell all of it to the log."""
        log.info("start from %s", self.source)
        skipped = [f"{name} ({reason})" for name, reason in self.skipped.items()]
        kinds = (("loaded", self.loaded), ("copied", self.copied), ("new", self.new), ("skipped", skipped))
        for kind, names in kinds:
            log.info("%d tensors %s%s", len(names), kind, f": {', '.join(names)}" if names else "")
        if self.copied:
            log.info("%d tokens shared: %s", len(self.shared_tokens), " ".join(self.shared_tokens))


def read_source(run_dir: str | None, checkpoint: str | None) -> Source:
    """Of a run what decode.py would decode with by default, of a checkpoint file its weights as they are.

    A file may be another's, {"model": weights} or the weights alone; then no tokenizer is known. What all names begin
    with where a model was wrapped, `module.`, is left out. Raises ValueError that names what cannot be read.
    """
    if run_dir is not None:
        chosen = select_weights(Path(run_dir))
        weights, content, where = chosen.weights, chosen.checkpoint, f"{run_dir} ({chosen.how})"
    else:
        assert checkpoint is not None
        content = load_checkpoint(Path(checkpoint))
        weights, where = content.get("model", content), checkpoint
    if not isinstance(weights, dict) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise ValueError(f"init_from: {where} holds no weights")
    if all(name.startswith("module.") for name in weights):
        weights = {name.removeprefix("module."): tensor for name, tensor in weights.items()}
    tokenizer = tokenizer_from_state(content["tokenizer"]) if "tokenizer" in content else None
    return Source(weights, where, tokenizer, content.get("config", {}))


@torch.no_grad()
def transfer(
    model: nn.Module,
    source: Source,
    tokenizer: Tokenizer,
    vocabulary_axes: Mapping[str, Sequence[int]],
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
) -> Transfer:
    """Copy the source's tensors into those of `model` that have the same names.

    vocabulary_axes: of the tensors whose shape depends on the vocabulary, which axes do. Along such an axis the entries
        of tokens that both vocabularies have are copied; blank, unknown and start/end count by what they are, all
        others by their names.
    include, exclude: parts whose tensors are taken or left (see `asr.layers.parts`); None takes all, or leaves none.

    Raises ValueError where shapes disagree for another reason than the vocabulary, and where no parameter is taken.
    """
    for key, places in (("include", include), ("exclude", exclude)):
        unknown = [place for place in places or () if all(place_of(name, [place]) is None for name in source.weights)]
        if unknown:
            raise ValueError(f"init_from.{key}={unknown}: no such part in {source.where}; its names are like "
                             f"{_some(source.weights)}")  # fmt: skip
    done = Transfer(source.where)
    pairs = shared_tokens(source.tokenizer, tokenizer) if source.tokenizer else []
    done.shared_tokens = [tokenizer.tokens[new] for _, new in pairs]
    wrong = []
    own = model.state_dict()
    for name, old in source.weights.items():
        if (include is not None and place_of(name, include) is None) or place_of(name, exclude or ()) is not None:
            done.skipped[name] = "not asked for"
        elif name not in own:
            done.skipped[name] = "not in the model"
        elif name in vocabulary_axes:
            reason = _copy_rows(own[name], old, vocabulary_axes[name], pairs, source.tokenizer, tokenizer)
            if reason:
                done.skipped[name] = reason
            else:
                whole = [(index, index) for index in range(tokenizer.vocab_size)] == pairs
                (done.loaded if whole and own[name].shape == old.shape else done.copied).append(name)
        elif own[name].shape != old.shape:
            wrong.append(f"{name}: {tuple(old.shape)} there, {tuple(own[name].shape)} in the model")
        else:
            own[name].copy_(old)
            done.loaded.append(name)
    if wrong:
        places = f"init_from.exclude=[{wrong[0].partition(':')[0]},...]"
        raise ValueError(
            f"init_from: {source.where} does not fit the model: {'; '.join(wrong[:5])}. Leave out: {places}"
        )
    taken = {*done.loaded, *done.copied}
    done.new = [name for name in own if name not in taken]
    if not taken & dict(model.named_parameters()).keys():
        raise ValueError(
            f"init_from: 0 parameters of {source.where} matched; its names are like {_some(source.weights)}, the "
            f"model's like {_some(own)}; include={include}, exclude={exclude}"
        )
    return done


def shared_tokens(old: Tokenizer, new: Tokenizer) -> list[tuple[int, int]]:
    """Ids in the old and in the new vocabulary of the tokens that both have, in the order of the new one."""

    def by_name(tokenizer: Tokenizer) -> dict[tuple[str, str], int]:
        roles = {"blank": tokenizer.blank_id, "unknown": tokenizer.unk_id, "start and end": tokenizer.sos_eos_id}
        special = {("special", role): index for role, index in roles.items() if index is not None}
        texts = {
            ("text", token): index for index, token in enumerate(tokenizer.tokens) if index not in special.values()
        }
        return special | texts

    before, now = by_name(old), by_name(new)
    return sorted(((before[key], now[key]) for key in before.keys() & now.keys()), key=lambda pair: pair[1])


def _copy_rows(
    own: Tensor,
    old: Tensor,
    axes: Sequence[int],
    pairs: list[tuple[int, int]],
    before: Tokenizer | None,
    now: Tokenizer,
) -> str | None:
    """Copy the entries of shared tokens; or the reason why that cannot be done."""
    if before is None:
        return "its vocabulary is not known"
    if len(axes) != 1 or own.dim() != old.dim():
        return "its shape depends on the vocabulary in more than its length"
    axis = axes[0]
    expected = list(own.shape)
    expected[axis] += before.vocab_size - now.vocab_size
    if list(old.shape) != expected:
        return f"{tuple(old.shape)} there, {tuple(own.shape)} in the model"
    if not pairs:
        return "no token is shared"
    if old.size(axis) != before.vocab_size:
        return "it does not count every token"
    from_ids, to_ids = (torch.tensor(ids, device=own.device) for ids in zip(*pairs, strict=True))
    own.index_copy_(axis, to_ids, old.to(own).index_select(axis, from_ids))
    return None


def _some(names: Mapping[str, Tensor]) -> str:
    return ", ".join(list(names)[:3]) or "none"
