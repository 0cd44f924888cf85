"""What a reader of another system's checkpoint returns, and how that becomes the checkpoint of a run.

A reader is a module of this package, named after the system, with two functions:

    add_arguments(parser)           its own options (argparse); --from, --checkpoint, --out and --set are there already
    read(args) -> ImportedModel     raises ValueError that names the file and, where shapes disagree, the tensor

`scripts/import_checkpoint.py --from SYSTEM` finds it by its name, builds the model from the sections, holds every
tensor against it and writes the run folder. Files are read without executing anything in them: tensors with
`torch.load(..., weights_only=True)`, the rest as text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from asr.text.tokenizer import Tokenizer


@dataclass
class ImportedModel:
    """Another system's model in this project's terms.

    sections: what differs from conf/train.yaml, by dotted key: a section with a `_target_` ("encoder", "head",
        "search", "features.fbank", ...) replaces the default one whole; other values ("name", "data", ...) are merged.
    model_state: tensors by the names of `AsrModel.state_dict()`. Those of `feature_norm` may be left out where its
        mode takes no statistics of a training set.
    tokenizer: with token ids as the weights have them (see `asr.text.listed_tokenizer`).
    unused: names in the file that the model has no use for, told to the user.
    """

    sections: dict[str, Any]
    model_state: dict[str, Tensor]
    tokenizer: Tokenizer
    unused: list[str] = field(default_factory=list)


def first_checkpoint(
    model_state: dict[str, Tensor], config: dict[str, Any], tokenizer: Tokenizer, versions: dict[str, str]
) -> dict[str, Any]:
    """The checkpoint of a run of one epoch that ended with these weights, for `epoch-1.pt`.

    The running average is those weights as well, so that decode.py needs no options. There is no optimiser state:
    training starts from such a run, it does not continue it.
    """
    return {
        "model": model_state,
        "average": {"num_samples": 1, "period": 1, "state": model_state},
        "precision": {"mode": "fp32", "scaler": {}},
        "progress": {"epoch": 2, "batches_done": 0, "step": 1, "valid": []},
        "world_size": 1,
        "config": config,
        "tokenizer": tokenizer.state_dict(),
        "versions": versions,
        "data_fingerprint": "",
    }
