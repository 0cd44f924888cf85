"""WeNet's own numbers from its own files."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml

from asr.features.fbank import Fbank
from asr.interop.wenet import read
from asr.layers.convolution import ConvolutionModule
from asr.layers.masks import length_mask, zero_padding
from asr.model import AsrModel
from asr.search.attention_rescoring import attention_rescoring
from asr.types import Batch
from tests.commands.tiny import command, decode, read_json, write_digits
from tests.interop.wenet_files import GOLDEN, arguments, model_of, read_safetensors


@pytest.fixture(scope="module")
def golden():
    return read_safetensors(GOLDEN / "io.safetensors")


@pytest.fixture(scope="module")
def imported():
    return read(arguments())


@pytest.fixture
def model(imported) -> AsrModel:
    return model_of(imported)


@pytest.fixture
def padding_as_theirs(monkeypatch):
    """Zero the padding before the first pointwise layer instead of after it, whose bias then reaches the kernel."""
    monkeypatch.setattr(
        ConvolutionModule, "_gated", lambda self, x, mask: F.glu(self.pointwise_in(zero_padding(x, mask)), dim=-1)
    )


def batch_of(tensors):
    fields = ("io.features", "io.feature_lens", "io.targets", "io.target_lens")
    features, lens, targets, target_lens = (tensors[name] for name in fields)
    return Batch(["a", "b", "c"], features, lens, targets.clamp(min=0), target_lens, ["", "", ""])


@torch.no_grad()
def test_encoder_of_the_longest_utterance_whose_frames_see_no_padding_in_wenet_either(model, golden):
    tensors, _ = golden
    encoded = model.encode(tensors["io.features"], tensors["io.feature_lens"])
    assert torch.equal(encoded.lens, tensors["io.encoder_lens"])
    torch.testing.assert_close(encoded.frames[0], tensors["io.encoder_out"][0], atol=1e-4, rtol=0)


@torch.no_grad()
def test_everything_of_every_utterance_with_padding_as_wenet_has_it(model, golden, padding_as_theirs):
    tensors, metadata = golden
    batch = batch_of(tensors)
    encoded = model.encode(batch.features, batch.feature_lens)
    valid = length_mask(encoded.lens, encoded.frames.size(1))
    ctc, attention = model.head.heads["ctc"], model.head.heads["attention"]

    def same(ours, theirs, mask):
        torch.testing.assert_close(ours[mask], tensors[theirs][mask], atol=1e-4, rtol=0)

    same(encoded.frames, "io.encoder_out", valid)
    same(ctc.log_probs(encoded), "io.ctc_log_probs", valid)
    same(attention.logits(encoded, batch.tokens), "io.decoder_logits", length_mask(batch.token_lens + 1, 6))

    losses = {name: part.mean().item() for name, part in model(batch).items()}
    assert losses["ctc"] == pytest.approx(0.3 * metadata["loss"]["loss_ctc"], abs=1e-4)
    # Theirs leaves the entropy of the smoothed target out.
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1 / 24)) * (batch.token_lens + 1).float().mean().item()
    assert losses["attention"] == pytest.approx(0.7 * (metadata["loss"]["loss_att"] + entropy), abs=1e-4)
    assert sum(losses.values()) == pytest.approx(metadata["loss"]["loss"] + 0.7 * entropy, abs=1e-4)


@torch.no_grad()
def test_half_precision_gives_the_same_transcripts(model, golden):
    tensors, _ = golden
    model.head.heads["ctc"].output.weight.mul_(4)  # so that random weights do not leave it to rounding
    exact = model.encode(tensors["io.features"], tensors["io.feature_lens"])
    with torch.autocast("cpu", torch.float16):
        half = model.encode(tensors["io.features"], tensors["io.feature_lens"])
        found = attention_rescoring(model.head, half)
    torch.testing.assert_close(half.frames.float(), exact.frames, atol=2e-2, rtol=0)
    assert [row.tokens for row in found] == [row.tokens for row in attention_rescoring(model.head, exact)]


def test_tokens_and_statistics_are_those_of_the_files(imported):
    tokenizer = imported.tokenizer
    assert (tokenizer.blank_id, tokenizer.unk_id, tokenizer.sos_eos_id, tokenizer.vocab_size) == (0, 1, 2, 25)
    assert tokenizer.encode("广州市人") == [3, 4, 5, 23] and tokenizer.decode([3, 2, 1, 4]) == "广州"
    assert imported.unused == []
    from_file = {**torch.load(GOLDEN / "final.pt", weights_only=True)}
    for name in ("mean", "istd"):
        del from_file[f"encoder.global_cmvn.{name}"]
    own = imported.model_state
    torch.testing.assert_close(own["feature_norm.mean"], torch.load(GOLDEN / "final.pt")["encoder.global_cmvn.mean"])
    assert torch.equal(read(arguments(cmvn=None)).model_state["feature_norm.std"], own["feature_norm.std"])


def test_statistics_may_come_from_the_file_alone_and_must_agree(tmp_path, imported):
    weights = torch.load(GOLDEN / "final.pt", weights_only=True)
    bare = {name: tensor for name, tensor in weights.items() if "global_cmvn" not in name}
    torch.save(bare, tmp_path / "final.pt")
    found = read(arguments(checkpoint=tmp_path / "final.pt")).model_state
    torch.testing.assert_close(found["feature_norm.std"], imported.model_state["feature_norm.std"], rtol=1e-4, atol=0)
    normalise = read(arguments(checkpoint=tmp_path / "final.pt", cmvn=None)).sections["features.normalise"]
    assert normalise["mode"] == "none"
    other = json.loads((GOLDEN / "global_cmvn").read_text())
    other["mean_stat"] = [value + 1e5 for value in other["mean_stat"]]
    (tmp_path / "cmvn").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="not the statistics that lie in the weights"):
        read(arguments(cmvn=tmp_path / "cmvn"))


def test_features_are_those_of_torchaudio_in_sixteen_bit_scale(imported):
    import torchaudio.compliance.kaldi as kaldi

    fbank = Fbank(**{key: value for key, value in imported.sections["features.fbank"].items() if key != "_target_"})
    noise = torch.randn(16123, generator=torch.Generator().manual_seed(0)) * 0.05
    noise[4000:8000] = 0.0  # digital silence lies on the floor, which depends on the scale
    theirs = kaldi.fbank(noise[None] * 32768, num_mel_bins=80, dither=0.0, energy_floor=0.0, sample_frequency=16000)
    ours = fbank(noise)
    assert len(ours) == len(theirs) == fbank.num_frames(16123)
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)


def test_the_command_makes_a_run_that_decodes(tmp_path):
    run = tmp_path / "run"
    files = [f"--{name}={path}" for name, path in vars(arguments()).items()]
    done = command("scripts/import_checkpoint.py", "--from", "wenet", f"--out={run}", *files, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = tmp_path / "my.tsv"
    wavs = sorted((write_digits(tmp_path / "digits") / "recordings").glob("*.wav"))[:2]
    table.write_text("".join(f"{path}\t广州\n" for path in wavs))
    for method in ("attention_rescoring", "attention"):
        decode(run, f"data.test={table}", "--method", method, "--precision", "amp_bf16")
        found = read_json(run / "decode" / f"my-{method}_precision_amp_bf16-epoch-1-avg-1" / "result.json")
        assert found["num_utterances"] == 2


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("encoder_conf", "input_layer", "conv2d6", r"encoder_conf\.input_layer: conv2d6 \(understood: conv2d\)"),
        ("encoder_conf", "pos_enc_layer_type", "no_pos", "pos_enc_layer_type: no_pos"),
        ("model_conf", "ctc_weight", 1.0, r"model_conf\.ctc_weight: 1\.0"),
        (None, "encoder", "branchformer", "encoder: branchformer"),
        (None, "tokenizer", "bpe", "tokenizer: bpe"),
        (None, "encoder_conf", None, "no encoder_conf"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path, section, key, value, message):
    config = yaml.safe_load((GOLDEN / "train.yaml").read_text())
    if value is None:
        del config[key]
    else:
        (config[section] if section else config)[key] = value
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match=message):
        read(arguments(config=tmp_path / "train.yaml"))


def test_other_files_are_refused_and_nothing_in_them_is_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match=r"evil\.pt: no file of weights alone"):
        read(arguments(checkpoint=tmp_path / "evil.pt"))
    assert not (tmp_path / "executed").exists()
    torch.save({"other": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="no weights of a WeNet Conformer"):
        read(arguments(checkpoint=tmp_path / "other.pt"))
    (tmp_path / "units.txt").write_text("<blank> 0\n<unk> 1\n")
    with pytest.raises(ValueError, match="2 symbols, the weights have 25"):
        read(arguments(symbols=tmp_path / "units.txt"))
