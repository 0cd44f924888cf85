"""What the tests of WeNet's files share."""

import argparse
import json
import runpy
from pathlib import Path

import torch

from asr.build import build_model
from tests.commands.tiny import ROOT

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "wenet_tiny"


def arguments(folder=GOLDEN, cmvn=True, **changes):
    """What the command gives for the files of a folder, `cmvn` among them where True; others by their paths."""
    given = {"checkpoint": "final.pt", "config": "train.yaml", "symbols": "units.txt", "cmvn": "global_cmvn"}
    paths = {name: changes.get(name, Path(folder) / file) for name, file in given.items()}
    return argparse.Namespace(**paths | ({} if cmvn is True else {"cmvn": cmvn}))


def model_of(imported):
    """The model in evaluation with the imported weights, all of them but what normalisation may lack."""
    script = runpy.run_path(str(ROOT / "scripts" / "import_checkpoint.py"))
    model = build_model(script["settings_with"](imported.sections), imported.tokenizer)
    left = model.load_state_dict(imported.model_state, strict=False)
    assert not left.unexpected_keys and all(name.startswith("feature_norm.") for name in left.missing_keys)
    return model.eval()


def read_safetensors(path):
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    types = {"F32": torch.float32, "I64": torch.int64}
    tensors = {
        name: torch.frombuffer(bytearray(content[start + begin : start + end]), dtype=types[entry["dtype"]]).view(
            entry["shape"]
        )
        for name, entry in header.items()
        if name != "__metadata__"
        for begin, end in [entry["data_offsets"]]
    }
    return tensors, {key: json.loads(value) for key, value in header["__metadata__"].items()}
