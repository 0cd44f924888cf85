"""From a reader's result to a run folder; the readers themselves are tested in tests/interop."""

import argparse
import runpy
from types import SimpleNamespace

import pytest
import torch

from asr.encoders.conformer import Conformer
from asr.features.normalise import FeatureNorm
from asr.heads.ctc import CTC
from asr.interop.run_folder import ImportedModel
from asr.model import AsrModel
from asr.text.listed_tokenizer import ListedTokenizer
from tests.commands.tiny import ROOT, command, decode, read_json

SIZES = {"output_dim": 32, "num_layers": 1, "num_heads": 2, "feed_forward_dim": 32, "kernel_size": 5,
         "subsampling_channels": 4}  # fmt: skip
TOKENS = [*"ab", "▁", "?", "<blank>"]  # blank last, as some systems have it


def imported(mode="none", **changes):
    torch.manual_seed(0)
    model = AsrModel(FeatureNorm(80, mode), None, Conformer(80, **SIZES), CTC(32, len(TOKENS), blank_id=4))
    sections = {
        "name": "other",
        "encoder": {"_target_": "asr.encoders.conformer.Conformer", **SIZES},
        "features.normalise": {"_target_": "asr.features.normalise.FeatureNorm", "mode": mode},
        "data": {"num_workers": 0},
    }
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("feature_norm.")}
    tokenizer = ListedTokenizer(TOKENS, blank_id=4, unk_id=3)
    return ImportedModel(sections, state | changes, tokenizer, unused=["optimizer"])


def convert(result, run_dir):
    script = runpy.run_path(str(ROOT / "scripts" / "import_checkpoint.py"))
    arguments = argparse.Namespace(checkpoint="other.pt", out=run_dir)
    script["convert"](SimpleNamespace(read=lambda arguments: result), arguments)


def test_the_run_folder_decodes_without_options(tmp_path, workplace, digits, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no data is prepared
    result = imported()
    convert(result, tmp_path / "run")
    assert "not used: optimizer" in capsys.readouterr().out
    table = tmp_path / "my.tsv"
    wavs = sorted((workplace / "digits" / "recordings").glob("*.wav"))[:3]
    table.write_text("".join(f"{path}\tab b\n" for path in wavs))
    decode(tmp_path / "run", f"data.test={table}")
    (found,) = (tmp_path / "run" / "decode").iterdir()
    assert found.name == "my-ctc_greedy_search-epoch-1-avg-1"
    assert read_json(found / "result.json")["num_utterances"] == 3
    checkpoint = torch.load(tmp_path / "run" / "checkpoints" / "epoch-1.pt", weights_only=True)
    done = command("decode.py", f"run_dir={tmp_path / 'run'}", cwd=tmp_path)
    assert done.returncode == 1 and "no data is prepared there; name a set to decode by data.test=PATH" in done.stderr
    for name, tensor in result.model_state.items():
        assert torch.equal(checkpoint["model"][name], tensor)
    assert checkpoint["config"]["encoder"].keys() == {"_target_", *SIZES}, "nothing of the default encoder is left"


def test_training_takes_its_tokenizer(tmp_path, digits):
    convert(imported(), tmp_path / "run")
    arguments = ["tokenizer=saved", f"tokenizer.folder={tmp_path / 'run'}", f"run_dir={tmp_path / 'tuned'}"]
    sizes = [f"encoder.{key}={value}" for key, value in SIZES.items()]
    done = command("train.py", *digits, *arguments, *sizes, "data.num_workers=0", "data.num_jobs=1",
                   "trainer.max_steps=1", "trainer.pictures=false", "data.max_unknown=1", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    tuned = torch.load(tmp_path / "tuned" / "checkpoints" / "step-1.pt", weights_only=True)
    assert tuned["tokenizer"]["tokens"] == TOKENS and tuned["model"]["head.output.bias"].shape == (5,)


def test_what_does_not_fit_is_named_with_both_shapes(tmp_path):
    wrong = imported(**{"head.output.bias": torch.zeros(7), "encoder.extra": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"other.pt.*encoder.extra: unknown.*head.output.bias: \(7,\).*\(5,\)"):
        convert(wrong, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"feature_norm.mean: missing"):
        convert(imported(mode="global"), tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()
    with pytest.raises(ValueError, match=r"--out .*not empty"):
        convert(imported(), tmp_path / "run")
