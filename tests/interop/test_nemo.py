import argparse
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
import torch.nn.functional as F
import yaml

from asr.data.cuts import load_audio, load_cuts
from asr.features.slaney import SlaneyFbank
from asr.interop import nemo
from asr.scoring.files import read_recogs
from asr.search.ctc_greedy_search import ctc_greedy_search
from tests.commands.tiny import command, decode, read_json, write_digits
from tests.interop.wenet_files import model_of

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
FILE = GOLDEN / "quartznet_tiny.nemo"


def read(path=FILE):
    return nemo.read(argparse.Namespace(checkpoint=path))


def contents(path=FILE):
    with tarfile.open(path) as tar:
        return {Path(member.name).name: tar.extractfile(member).read() for member in tar if member.isfile()}


def pack(path, files):
    with tarfile.open(path, "w:gz") as tar:  # as older versions packed them
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def changed(path, change):
    """The tiny file with its settings changed."""
    files = contents()
    config = yaml.safe_load(files["model_config.yaml"])
    change(config)
    return pack(path, files | {"model_config.yaml": yaml.safe_dump(config).encode()})


def test_encoder_log_probs_and_tokens_are_nemos():
    golden, imported = np.load(GOLDEN / "nemo_quartznet_io.npz"), read()
    assert not imported.unused
    model = model_of(imported)
    features = torch.from_numpy(golden["features"]).transpose(1, 2)
    with torch.no_grad():
        encoded = model.encoder(features, torch.from_numpy(golden["lengths"]))
        log_probs = model.head.log_probs(encoded)
    assert encoded.lens.tolist() == golden["encoded_lengths"].tolist()
    for row, length in enumerate(encoded.lens.tolist()):
        frames = golden["encoder_output"][row, :, :length].T
        np.testing.assert_allclose(encoded.frames[row, :length], frames, atol=1e-5, rtol=0)
        np.testing.assert_allclose(log_probs[row, :length], golden["log_probs"][row, :length], atol=1e-5, rtol=0)
    found = [hypothesis.tokens for hypothesis in ctc_greedy_search(model.head, encoded)]
    assert str(found) == str(golden["greedy_tokens"])


def test_the_tokenizer_has_blank_last_and_spells_any_case():
    tokenizer = read().tokenizer
    assert tokenizer.blank_id == 28 and tokenizer.vocab_size == 29
    assert tokenizer.encode("It's A?") == [9, 20, 27, 19, 0, 1]
    assert tokenizer.decode([9, 20, 27, 19, 0, 1]) == "it's a"


def test_the_imported_run_decodes_wavs_as_its_parts_do(tmp_path):
    done = command("scripts/import_checkpoint.py", "--from", "nemo", "--checkpoint", str(FILE), "--out", "run",
                   cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    wav = min((write_digits(tmp_path / "digits") / "recordings").glob("*.wav"))
    (tmp_path / "my.tsv").write_text(f"{wav}\tab\n")
    decode(tmp_path / "run", f"data.test={tmp_path / 'my.tsv'}")
    (found,) = (tmp_path / "run" / "decode").iterdir()
    assert read_json(found / "result.json")["num_utterances"] == 1
    (prepared,) = tmp_path.rglob("test.jsonl.gz")
    imported = read()
    model = model_of(imported)
    features = SlaneyFbank()(torch.from_numpy(load_audio(next(iter(load_cuts(prepared))))))
    with torch.no_grad():
        encoded = model.encode(features[None], torch.tensor([len(features)]))
    text = imported.tokenizer.decode(ctc_greedy_search(model.head, encoded)[0].tokens)
    assert text and [utterance.hyp for utterance in read_recogs(found / "recogs.txt")] == [text]


def citrinet(path):
    """A small Citrinet of random weights, as NeMo would pack it, and a plain reading of what it computes."""
    torch.manual_seed(0)
    shared = {"dilation": [1], "separable": True, "se": True, "se_context_size": -1, "dropout": 0.1}
    blocks = [
        {**shared, "filters": 16, "repeat": 1, "kernel": [5], "stride": [1], "residual": False},
        {**shared, "filters": 16, "repeat": 2, "kernel": [7], "stride": [2], "residual": True, "stride_last": True,
         "residual_mode": "stride_add", "kernel_size_factor": 0.5},
        {**shared, "filters": 24, "repeat": 1, "kernel": [3], "stride": [1], "residual": False},
    ]  # fmt: skip
    weights, modules = {}, []
    dim = 20
    for index, block in enumerate(blocks):
        width, kernel = block["filters"], 3 if index == 1 else block["kernel"][0]
        convs, norms = [], []
        for repeat in range(block["repeat"]):
            stride = block["stride"][0] if repeat == block["repeat"] - 1 else 1
            at, of = 5 * repeat, dim if repeat == 0 else width
            depthwise = torch.nn.Conv1d(of, of, kernel, stride, kernel // 2, groups=of, bias=False)
            convs += [(depthwise, torch.nn.Conv1d(of, width, 1, bias=False))]
            norms += [norm := statistics(torch.nn.BatchNorm1d(width, eps=1e-3))]
            parts = {f"{at}.conv": depthwise, f"{at + 1}.conv": convs[-1][1], f"{at + 2}": norm}
            weights |= {f"encoder.encoder.{index}.mconv.{n}.{k}": v for n, m in parts.items() for k, v in state(m)}
        squeeze = torch.nn.ModuleDict({"0": torch.nn.Linear(width, width // 8, bias=False),
                                       "2": torch.nn.Linear(width // 8, width, bias=False)})  # fmt: skip
        weights |= {f"encoder.encoder.{index}.mconv.{at + 3}.fc.{k}": v for k, v in state(squeeze)}
        shortcut = None
        if block["residual"]:
            conv = torch.nn.Conv1d(dim, width, 1, block["stride"][0], bias=False)
            shortcut = torch.nn.Sequential(conv, statistics(torch.nn.BatchNorm1d(width, eps=1e-3)))
            weights[f"encoder.encoder.{index}.res.0.0.conv.weight"] = conv.weight.detach()
            weights |= {f"encoder.encoder.{index}.res.0.1.{k}": v for k, v in state(shortcut[1])}
        modules.append((convs, norms, squeeze, shortcut))
        dim = width
    pieces = sentencepiece_model(path.parent)
    decoder = torch.nn.Conv1d(dim, pieces.get_piece_size() + 1, 1)
    weights |= {f"decoder.decoder_layers.0.{k}": v for k, v in state(decoder)}
    config = yaml.safe_load(contents()["model_config.yaml"])
    config["preprocessor"] |= {"window_size": 0.025, "features": 20, "normalize": None}
    config["encoder"] |= {"feat_in": 20, "jasper": blocks}
    content = io.BytesIO()
    torch.save(weights, content)
    pack(path, {"./model_config.yaml": yaml.safe_dump(config).encode(), "./model_weights.ckpt": content.getvalue(),
                "./0a1b_tokenizer.model": pieces.serialized_model_proto()})  # fmt: skip

    def log_probs(x):
        for convs, norms, squeeze, shortcut in modules:
            given = x
            for repeat, ((depthwise, pointwise), norm) in enumerate(zip(convs, norms, strict=True)):
                x = norm(pointwise(depthwise(F.relu(x) if repeat else x)))
            x = x * torch.sigmoid(squeeze["2"](F.relu(squeeze["0"](x.mean(2)))))[:, :, None]
            x = F.relu(x + shortcut(given) if shortcut else x)
        return decoder(x).transpose(1, 2).log_softmax(-1)

    return log_probs


def statistics(norm):
    for tensor in norm.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5)
    return norm.eval()


def state(module):
    return [(name, tensor.clone()) for name, tensor in module.state_dict().items()]


def sentencepiece_model(folder):
    content, text = io.BytesIO(), ["one two three four", "two three", "one four"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=content, vocab_size=20, model_type="bpe", minloglevel=2,
        bos_id=-1, eos_id=-1,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=content.getvalue())


def test_a_citrinet_with_word_pieces(tmp_path):
    log_probs = citrinet(tmp_path / "citrinet.nemo")
    imported = read(tmp_path / "citrinet.nemo")
    assert not imported.unused and imported.sections["encoder"]["kernel_sizes"] == [5, 3, 3]
    model = model_of(imported)
    features = torch.randn(2, 33, 20)
    with torch.no_grad():
        encoded = model.encode(features, torch.tensor([33, 33]))
        torch.testing.assert_close(model.head.log_probs(encoded), log_probs(features.transpose(1, 2)))
    assert encoded.lens.tolist() == [17, 17]
    tokenizer = imported.tokenizer
    assert tokenizer.blank_id == 20 and tokenizer.decode(tokenizer.encode("two four")) == "two four"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c["encoder"].update(_target_="nemo.X.ConformerEncoder"),
            "encoder: nemo.X.ConformerEncoder .underst",
        ),
        (lambda c: c["encoder"].update(conv_mask=False), "encoder.conv_mask: False .understood: True"),
        (lambda c: c["encoder"].update(activation="selu"), "encoder.activation: selu"),
        (lambda c: c["encoder"]["jasper"][1].update(stride=[2]), r"jasper\[1\].stride: 2 in each of 2 .*residual_mode"),
        (lambda c: c["encoder"]["jasper"][2].update(se=True), "encoder.jasper: se in some blocks"),
        (lambda c: c["encoder"]["jasper"][2].update(groups=2), r"jasper\[2\].groups: 2"),
        (lambda c: c["preprocessor"].update(normalize="all_features"), "preprocessor.normalize: all_features"),
        (lambda c: c["preprocessor"].update(window_size=0.025), "preprocessor.featurizer.window is not what"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path, change, message):
    path = changed(tmp_path / "other.nemo", change)
    with pytest.raises(ValueError, match=rf"other.nemo: .*{message}"):
        read(path)


def test_files_that_are_none_are_refused(tmp_path):
    (tmp_path / "text.nemo").write_text("no tar")
    with pytest.raises(ValueError, match=r"text.nemo: no .nemo file"):
        read(tmp_path / "text.nemo")
    files = contents()
    with pytest.raises(ValueError, match=r"model_weights.ckpt is missing"):
        read(pack(tmp_path / "half.nemo", {"model_config.yaml": files["model_config.yaml"]}))
    content = io.BytesIO()
    torch.save({"encoder": torch.nn.Linear(2, 2)}, content)
    with pytest.raises(ValueError, match=r"model_weights.ckpt holds more than weights"):
        read(pack(tmp_path / "code.nemo", files | {"model_weights.ckpt": content.getvalue()}))
