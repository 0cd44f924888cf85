import dataclasses
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from asr import build
from asr.config import check
from asr.text.listed_tokenizer import ListedTokenizer
from asr.text.tokenizer import train_tokenizer
from asr.training.run_folder import write_json
from asr.training.transfer import Source, read_source, shared_tokens
from asr.types import Encoded
from tests.commands.tiny import read_json
from tests.test_contracts import ENCODERS, HEADS, names, shrunk

CONF = Path(__file__).resolve().parents[2] / "conf"
SEARCHES = {"attention": "attention", "transducer": "greedy_search"}
OLD = ListedTokenizer(["<blk>", "<unk>", *"abcde", "<sos/eos>"], 0, unk_id=1, sos_eos_id=7)
# The same tokens in another order, special ones under other names.
PERMUTED = ListedTokenizer([*"edc", "<eos>", "b", "<blank>", "a", "?"], 5, unk_id=7, sos_eos_id=3)
WIDER = ListedTokenizer(["<blk>", *"xcay", "<sos/eos>", "z", "<unk>", "w", "v"], 0, unk_id=7, sos_eos_id=5)


def settings_with(*overrides):
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", overrides=list(overrides))
    for part in ("encoder", "head"):
        shrunk(cfg[part])
    return check(cfg)


def model_of(tokenizer, *overrides, seed=0):
    settings = settings_with(*overrides)
    torch.manual_seed(seed)
    return build.build_model(settings, tokenizer), settings


def start(source_model, source_tokenizer, model, settings, tokenizer, run_dir=None, **init_from):
    settings.init_from = dataclasses.replace(settings.init_from, **init_from)
    source = Source(source_model.state_dict(), "SOURCE", source_tokenizer, {})
    build.start_from(source, model, settings, tokenizer, run_dir)


def head_choice(path):
    return [f"head={path.stem}", f"search={SEARCHES.get(path.stem, 'ctc_greedy_search')}"]


def test_tokens_are_shared_by_name_and_special_ones_by_what_they_are():
    pairs = dict(shared_tokens(OLD, PERMUTED))
    assert pairs == {0: 5, 1: 7, 2: 6, 3: 4, 4: 2, 5: 1, 6: 0, 7: 3}
    assert shared_tokens(OLD, WIDER) == [(0, 0), (4, 2), (2, 3), (7, 5), (1, 7)]
    words, letters = train_tokenizer(["blk ab"], "word", unk=False), train_tokenizer(["ab"], "char")
    assert shared_tokens(words, letters) == [(0, 0)], "a text is no special token"


@pytest.mark.parametrize("path", HEADS, ids=names(HEADS))
def test_a_head_with_its_vocabulary_in_another_order_has_the_same_losses(path):
    old, _ = model_of(OLD, *head_choice(path), "encoder=conformer_xs")
    new, settings = model_of(PERMUTED, *head_choice(path), "encoder=conformer_xs", seed=1)
    start(old, OLD, new, settings, PERMUTED)
    encoded = Encoded(torch.randn(2, 20, old.encoder.output_dim), torch.tensor([20, 15]))
    tokens, token_lens = torch.tensor([[2, 3, 3, 6], [5, 4, 0, 0]]), torch.tensor([4, 2])
    ids = torch.tensor([new_id for _, new_id in sorted(shared_tokens(OLD, PERMUTED))])
    before = old.eval().head.loss(encoded, tokens, token_lens)
    after = new.eval().head.loss(encoded, ids[tokens], token_lens)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("path", HEADS, ids=names(HEADS))
def test_every_tensor_of_a_head_is_loaded_or_has_rows_copied(path, tmp_path):
    old, _ = model_of(OLD, *head_choice(path), "encoder=conformer_xs")
    new, settings = model_of(WIDER, *head_choice(path), "encoder=conformer_xs", seed=1)
    fresh = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    start(old, OLD, new, settings, WIDER, tmp_path)
    told = read_json(tmp_path / "transfer.json")
    assert (
        told["new"] == []
        and told["skipped"] == {}
        and told["shared_tokens"] == ["<blk>", "c", "a", "<sos/eos>", "<unk>"]
    )
    assert sorted(told["loaded"] + told["copied"]) == sorted(new.state_dict()) and told["copied"]
    for name, tensor in new.state_dict().items():
        source = old.state_dict()[name]
        if name in told["loaded"]:
            assert torch.equal(tensor, source), name
        else:
            (axis,) = (axis for axis, size in enumerate(tensor.shape) if size != source.size(axis))
            for old_id, new_id in shared_tokens(OLD, WIDER):
                assert torch.equal(tensor.select(axis, new_id), source.select(axis, old_id)), name
            for new_id in {1, 4, 6, 8, 9}:
                assert torch.equal(tensor.select(axis, new_id), fresh[name].select(axis, new_id)), name


def test_log_probabilities_of_shared_tokens_are_the_old_models():
    old, _ = model_of(OLD)
    new, settings = model_of(WIDER, seed=1)
    start(old, OLD, new, settings, WIDER)
    features, lens = torch.randn(2, 50, 80), torch.tensor([50, 40])
    before = old.eval().head.log_probs(old.encode(features, lens))
    after = new.eval().head.log_probs(new.encode(features, lens))
    old_ids, new_ids = (list(ids) for ids in zip(*shared_tokens(OLD, WIDER), strict=True))
    # Each model spreads the rest over tokens of its own; among the shared ones the odds are the same.
    torch.testing.assert_close(after[..., new_ids].log_softmax(-1), before[..., old_ids].log_softmax(-1))


KINDS = list({OmegaConf.load(path)["_target_"]: path for path in ENCODERS}.values())


@pytest.mark.parametrize("path", KINDS, ids=names(KINDS))
def test_every_encoder_is_taken_over_bit_by_bit(path):
    old, _ = model_of(OLD, f"encoder={path.stem}")
    new, settings = model_of(WIDER, f"encoder={path.stem}", seed=1)
    start(old, OLD, new, settings, WIDER)
    for name, tensor in old.encoder.state_dict().items():
        assert torch.equal(tensor, new.encoder.state_dict()[name]), name


def test_parts_are_included_and_excluded_and_other_layers_are_told(tmp_path):
    old, _ = model_of(OLD, "init_mode=tds_normal")
    new, settings = model_of(WIDER, "head.num_layers=2", "head.hidden_dim=40", seed=1)
    fresh = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    start(old, OLD, new, settings, WIDER, tmp_path, exclude=["encoder.blocks.1"])
    told = read_json(tmp_path / "transfer.json")
    assert told["skipped"]["head.output.weight"] == "(8, 32) there, (10, 40) in the model"
    assert told["copied"] == ["head.output.bias"]
    assert {"head.hidden.0.weight", "head.output.weight", "encoder.blocks.1.norm.weight"} <= set(told["new"])
    for name in told["new"]:
        assert torch.equal(new.state_dict()[name], fresh[name]), name
    start(old, OLD, new, settings, WIDER, tmp_path, include=["encoder.*.attention"], exclude=None)
    told = read_json(tmp_path / "transfer.json")
    assert all(".attention." in name for name in told["loaded"]) and not told["copied"]


def test_what_cannot_be_taken_over_is_refused():
    old, _ = model_of(OLD, "encoder.output_dim=16")
    new, settings = model_of(WIDER)
    with pytest.raises(ValueError, match=r"SOURCE does not fit.*\(16.* there, \(32.*init_from.exclude=\[encoder"):
        start(old, OLD, new, settings, WIDER)
    with pytest.raises(ValueError, match=r"0 parameters of SOURCE matched; its names are like feature_norm.mean"):
        start(old, OLD, new, settings, WIDER, exclude=["encoder", "head"])
    with pytest.raises(ValueError, match=r"init_from.exclude=\['haed'\]: no such part in SOURCE"):
        start(old, OLD, new, settings, WIDER, exclude=["haed"])
    other = torch.nn.ModuleDict({"something": torch.nn.Linear(3, 3)})
    with pytest.raises(ValueError, match=r"0 parameters of SOURCE matched; its names are like something.weight"):
        start(other, OLD, new, settings, WIDER, exclude=None)


@pytest.mark.parametrize("form", ["ours", "wrapped", "bare"])
def test_a_checkpoint_file_of_any_form(tmp_path, form):
    old, _ = model_of(OLD)
    weights = old.state_dict()
    content = {
        "ours": {"model": weights, "tokenizer": OLD.state_dict(), "config": {}},
        "wrapped": {"model": {f"module.{name}": tensor for name, tensor in weights.items()}},
        "bare": weights,
    }[form]
    torch.save(content, tmp_path / "some.pt")
    source = read_source(None, str(tmp_path / "some.pt"))
    new, settings = model_of(WIDER, seed=1)
    build.start_from(source, new, settings, WIDER, tmp_path)
    told = read_json(tmp_path / "transfer.json")
    assert len(told["loaded"]) == len(weights) - 2 and torch.equal(new.encoder.state_dict()["blocks.0.norm.weight"],
                                                                   weights["encoder.blocks.0.norm.weight"])  # fmt: skip
    if form == "ours":
        assert told["copied"] == ["head.output.weight", "head.output.bias"]
    else:
        assert told["skipped"]["head.output.weight"] == "its vocabulary is not known"


def test_files_without_weights_are_refused(tmp_path):
    torch.save({"model": {"epoch": 3}}, tmp_path / "some.pt")
    with pytest.raises(ValueError, match=r"some.pt holds no weights"):
        read_source(None, str(tmp_path / "some.pt"))
    write_json({}, tmp_path / "train.json")
    with pytest.raises(ValueError, match="is run_dir a trained run"):
        read_source(str(tmp_path), None)
