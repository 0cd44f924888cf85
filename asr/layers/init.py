"""Initialisation of weights by name of the scheme (`init_mode`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from asr.layers.parts import check_places, place_of

PAPER, NONE = "paper", "none"
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)
# Standard deviation of a standard normal variable that is drawn again until it lies within -2 ... 2.
_CUT_STD = 0.8796256610342398


def _uniform(weight: Tensor, std: float) -> None:
    nn.init.uniform_(weight, -math.sqrt(3.0) * std, math.sqrt(3.0) * std)


def _normal(weight: Tensor, std: float) -> None:
    nn.init.normal_(weight, 0.0, std)


def _cut_normal(weight: Tensor, std: float) -> None:
    std /= _CUT_STD
    nn.init.trunc_normal_(weight, 0.0, std, -2 * std, 2 * std)


# Standard deviation by fan_in and fan_out, and the distribution.
_SCHEMES: dict[str, tuple[Callable[[int, int], float], Callable[[Tensor, float], None]]] = {
    "xavier_uniform": (lambda fan_in, fan_out: math.sqrt(2.0 / (fan_in + fan_out)), _uniform),
    "xavier_normal": (lambda fan_in, fan_out: math.sqrt(2.0 / (fan_in + fan_out)), _normal),
    "kaiming_uniform": (lambda fan_in, _: math.sqrt(2.0 / fan_in), _uniform),
    "kaiming_normal": (lambda fan_in, _: math.sqrt(2.0 / fan_in), _normal),
    "tds_uniform": (lambda fan_in, _: 2.0 / math.sqrt(3.0 * fan_in), _uniform),
    "tds_normal": (lambda fan_in, _: 2.0 / math.sqrt(fan_in), _normal),
    "trunc_normal": (lambda _, __: 0.02 * _CUT_STD, _cut_normal),
}

INIT_MODES = (PAPER, NONE, *_SCHEMES)


def mode_named(mode: str | None) -> str:
    """The mode by its one name: None, "None" and "null" are "none". Raises ValueError for an unknown one."""
    name = NONE if mode is None or mode in ("None", "null") else mode
    if name not in INIT_MODES:
        raise ValueError(f"init_mode {mode!r} is none of null, {', '.join(INIT_MODES)}")
    return name


@torch.no_grad()
def initialise(module: nn.Module, mode: str | None, parts: Mapping[str, str | None] | None = None) -> None:
    """Draw the linear and convolution layers in `module` anew, from torch's generator.

    parts: modes of parts by dotted name (see `asr.layers.parts`); of several that hold a layer the longest counts, and
        `mode` is that of the rest. Raises ValueError for an unknown mode, and for a part that is not there.

    | mode                    | weight of Linear, Conv1d, Conv2d                 | its standard deviation      |
    |-------------------------|--------------------------------------------------|-----------------------------|
    | "paper"                 | as the module's constructor made it              |                             |
    | None, "none", "null"    | PyTorch's own: uniform within 1 / sqrt(fan_in)   | 1 / sqrt(3 fan_in)          |
    | "xavier_uniform"        | uniform within sqrt(6 / (fan_in + fan_out))      | sqrt(2 / (fan_in + fan_out))|
    | "xavier_normal"         | normal                                           | sqrt(2 / (fan_in + fan_out))|
    | "kaiming_uniform"       | uniform within sqrt(6 / fan_in)                  | sqrt(2 / fan_in)            |
    | "kaiming_normal"        | normal                                           | sqrt(2 / fan_in)            |
    | "tds_uniform"           | uniform within 2 / sqrt(fan_in)                  | 2 / sqrt(3 fan_in)          |
    | "tds_normal"            | normal                                           | 2 / sqrt(fan_in)            |
    | "trunc_normal"          | normal of std 0.02, cut at two of them           | 0.0176                      |

    | everything else                       | under None                             | under every other mode |
    |---------------------------------------|----------------------------------------|------------------------|
    | bias of Linear, Conv1d, Conv2d        | uniform within 1 / sqrt(fan_in)        | as constructed         |
    | Embedding, and a Linear tied to it    | as constructed: normal, std 1; of attention decoders 1/sqrt(D)  |
    | weight, bias, statistics of norms     | as constructed (1, 0; mean 0, variance 1)                       |
    | recurrent layers, parameters of other | as constructed                                                  |
    | layers (position biases, scales)      |                                                                 |

    A constructor that says nothing leaves what PyTorch does, so "paper" differs from None only in modules whose papers
    ask for something: Zipformer and the projections of a transducer, where many layers start small.
    fan_in is inputs per group times kernel size, fan_out outputs times kernel size, as PyTorch counts them: a depthwise
    convolution of 256 channels and 33 frames has fan_in 33 and fan_out 8448. The gains are xavier's 1 and kaiming's
    sqrt(2), which is ReLU's, whatever follows the layer (Glorot and Bengio, 2010; He et al., 2015). tds is that of
    time-depth separable networks (Hannun et al., 2019), trunc_normal BERT's. PyTorch's own is a kaiming_uniform with
    the gain of a leaky ReLU of slope sqrt(5), sqrt(6) times narrower than ReLU's. The names and formulas are those of
    NeMo's `init_mode`, which applies them to Linear and Conv1d.
    """
    parts = parts or {}
    check_places(module, parts, "init")
    own, mode = {place: mode_named(part_mode) for place, part_mode in parts.items()}, mode_named(mode)
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    for name, layer in module.named_modules():
        if not isinstance(layer, _LAYERS) or id(layer.weight) in embeddings:
            continue
        place = place_of(name, own)
        chosen = mode if place is None else own[place]
        if chosen == NONE:
            layer.reset_parameters()
        elif chosen != PAPER:
            std, draw = _SCHEMES[chosen]
            draw(layer.weight, std(*fans(layer.weight)))


def fans(weight: Tensor) -> tuple[int, int]:
    """fan_in and fan_out of the weight of a linear or convolution layer."""
    kernel = weight[0][0].numel()
    return weight.size(1) * kernel, weight.size(0) * kernel


def expected_std(weight: Tensor, mode: str | None) -> float:
    """Standard deviation that `mode`, any but "paper", gives a weight of a linear or convolution layer."""
    fan_in, fan_out = fans(weight)
    name = mode_named(mode)
    return 1.0 / math.sqrt(3.0 * fan_in) if name == NONE else _SCHEMES[name][0](fan_in, fan_out)
