"""icefall's own numbers from its own files."""

import argparse
import os
import re
from io import BytesIO
from pathlib import Path

import pytest
import sentencepiece
import torch

from asr.interop.icefall import read
from asr.layers.masks import length_mask
from asr.search.greedy_search import greedy_search
from asr.search.modified_beam_search import modified_beam_search
from tests.commands.tiny import ROOT, command, decode, digits_data, read_json, write_digits
from tests.interop.wenet_files import model_of, read_safetensors

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "icefall_tiny"


def arguments(*options, checkpoint=GOLDEN / "pretrained.pt", tokens=GOLDEN / "tokens.txt", bpe=None, out=None):
    return argparse.Namespace(checkpoint=checkpoint, tokens=tokens, bpe=bpe, out=out, set=list(options))


@pytest.fixture(scope="module")
def golden():
    return read_safetensors(GOLDEN / "io.safetensors")


@torch.no_grad()
def test_every_output_and_both_lists_of_tokens(golden):
    tensors, metadata = golden
    model = model_of(read(arguments()))
    encoded = model.encode(tensors["io.features"], tensors["io.feature_lens"])
    assert torch.equal(encoded.lens, tensors["io.encoder_lens"])
    valid = length_mask(encoded.lens, encoded.frames.size(1))

    def same(ours, theirs, mask=...):
        torch.testing.assert_close(ours[mask], tensors[theirs][mask], atol=1e-4, rtol=0)

    same(encoded.frames, "io.encoder_out", valid)
    same(model.head.heads["ctc"].log_probs(encoded), "io.ctc_log_probs", valid)
    transducer = model.head.part_for("greedy_search")
    contexts = tensors["io.decoder_in"]
    decoded = transducer.decoder(contexts, torch.full((len(contexts),), contexts.size(1)))[:, -1:]
    same(decoded, "io.decoder_out")
    joiner = transducer.joiner
    same(joiner(joiner.encoder_proj(encoded.frames[:, :1]), joiner.decoder_proj(decoded)), "io.joiner_out")
    for search, name in ((greedy_search, "greedy"), (modified_beam_search, "modified_beam_search_beam4")):
        assert [hypothesis.tokens for hypothesis in search(transducer, encoded)] == metadata[name]


@torch.no_grad()
def test_padding_may_be_made_invisible(golden):
    tensors, _ = golden
    model = model_of(read(arguments("mask_padding=true")))
    features, lens = tensors["io.features"], tensors["io.feature_lens"]
    together = model.encode(features, lens)
    for row, length in enumerate(lens.tolist()):
        alone = model.encode(features[row : row + 1, :length], lens[row : row + 1])
        torch.testing.assert_close(together.frames[row, : alone.lens[0]], alone.frames[0], atol=1e-4, rtol=0)


def test_sizes_come_from_the_weights_and_may_be_given(golden):
    config = golden[1]["config"]
    given = read(arguments(*(f"{key}={int(value) if key == 'use_ctc' else value}" for key, value in config.items())))
    found = read(arguments())
    for sections in (given.sections, found.sections):
        del sections["encoder"]["unmasked_dims"]  # which weights do not tell
    assert given.sections == found.sections and found.unused == []
    heads = found.sections["head"]["heads"]
    assert (heads["transducer"]["decoder_dim"], heads["transducer"]["context_size"]) == (40, 2)
    training = read(arguments("prune-range=7", "ctc_loss_scale=0.5", "encoder_unmasked_dim=(24,32,32)")).sections
    assert training["head"]["heads"]["transducer"]["prune_range"] == 7 and training["head"]["weights"]["ctc"] == 0.5
    assert training["encoder"]["unmasked_dims"] == [24, 32, 32]


@pytest.mark.parametrize(("options", "target"), [("use_ctc=0", "Transducer"), ("use_transducer=0", "CTC")])
def test_one_head_alone(options, target, golden):
    imported = read(arguments(options))
    assert imported.sections["head"]["_target_"].endswith(target) and imported.unused
    model = model_of(imported)
    assert imported.sections["search"]["_target_"].rpartition(".")[2] in model.head.searches


def run(*options, cwd, checkpoint=GOLDEN / "pretrained.pt", tokens=GOLDEN / "tokens.txt"):
    return command("scripts/import_checkpoint.py", "--from", "icefall", "--checkpoint", str(checkpoint), "--tokens",
                   str(tokens), "--out", str(cwd / "run"), *options, cwd=cwd)  # fmt: skip


def test_the_run_decodes_and_training_starts_from_it(tmp_path):
    done = run("--set", "pos_head_dim=4", "query_head_dim=8", cwd=tmp_path)
    assert done.returncode == 0 and "30 tokens" in done.stdout, done.stderr
    recordings = sorted((write_digits(tmp_path / "digits") / "recordings").glob("*.wav"))[:3]
    (tmp_path / "my.tsv").write_text("".join(f"{path}\ta b c\n" for path in recordings))
    decode(tmp_path / "run", f"data.test={tmp_path / 'my.tsv'}", "method=modified_beam_search", "search.beam=4")
    (found,) = (tmp_path / "run" / "decode").iterdir()
    assert found.name == "my-modified_beam_search_beam_4-epoch-1-avg-1"
    assert read_json(found / "result.json")["ref_words"] == 9
    assert "A B C" in (found / "recogs.txt").read_text(), "references in the case of its tokens"

    imported = read(arguments())
    sizes = {key: str(value).replace(" ", "").lower() for key, value in imported.sections["encoder"].items()}
    encoder = [f"encoder.{key}={value}" for key, value in sizes.items() if key != "_target_"]
    head = [f"head.heads.transducer.{name}_dim=40" for name in ("decoder", "joiner")]
    done = command(
        "train.py", *digits_data(tmp_path / "digits", tmp_path / "prepared"), "encoder=zipformer_s", *encoder,
        "head=transducer_ctc", *head, "search=greedy_search", f"init_from.run_dir={tmp_path / 'run'}",
        "tokenizer=saved", f"tokenizer.folder={tmp_path / 'run'}", "features.normalise.mode=raw",
        "data.num_workers=0", "data.num_jobs=1", "data.max_unknown=1", "trainer.max_steps=1",
        "trainer.pictures=false", f"run_dir={tmp_path / 'tuned'}", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    taken = read_json(tmp_path / "tuned" / "transfer.json")
    assert not taken["new"] and not taken["skipped"], "every tensor has come over"


def test_what_does_not_fit_is_named_with_both_shapes(tmp_path):
    done = run("--set", "num_heads=2,2,2", "query_head_dim=8", cwd=tmp_path)
    assert done.returncode == 1 and not (tmp_path / "run").exists()
    assert "encoder.stacks.1.layers.0.attention1.value.bias: (24,) in the file, (12,) in the model" in done.stderr
    done = run("--set", "num_encoder_layers=1,3,1", cwd=tmp_path)
    assert "encoder.stacks.1.layers.2" in done.stderr and "missing in the file" in done.stderr
    done = run("--set", "num_heads=4,4", cwd=tmp_path)
    assert "num_heads=[4, 4]: has 2 entries where downsampling has 3" in done.stderr


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("num_head=4", "--set num_head=4: no such option.*did you mean num_heads"),
        ("num_heads=a,b", "--set num_heads=a,b: whole numbers above 0 as in"),
        ("num_heads=", "--set num_heads=: whole numbers above 0"),
        ("num_heads=0,0,0", "--set num_heads=0,0,0: whole numbers above 0"),
        ("pos_head_dim=0", "--set pos_head_dim=0: a whole number above 0 expected"),
        ("pos_dim=x", "--set pos_dim=x: a whole number above 0 expected"),
        ("lm_scale=x", "--set lm_scale=x: a number expected"),
        ("use_ctc=maybe", "--set use_ctc=maybe: 0 or 1 expected"),
        ("causal=1", "streaming models cannot be taken over"),
    ],
)
def test_options_in_fault(option, told):
    with pytest.raises(ValueError, match=told):
        read(arguments(option))


class Command:
    def __reduce__(self):
        return os.system, (f"touch {Command.path}",)


def test_nothing_in_the_file_is_executed(tmp_path):
    Command.path = tmp_path / "executed"
    for content in ({"model": Command()}, Command()):
        torch.save(content, tmp_path / "evil.pt")
        with pytest.raises(ValueError, match=r"evil\.pt: no file of weights alone"):
            read(arguments(checkpoint=tmp_path / "evil.pt"))
    assert not Command.path.exists()


def test_files_that_are_something_else(tmp_path):
    weights = torch.load(GOLDEN / "pretrained.pt", weights_only=True)["model"]

    def stored(content):
        torch.save(content, tmp_path / "other.pt")
        return tmp_path / "other.pt"

    with pytest.raises(ValueError, match=r"gone\.pt"):
        read(arguments(checkpoint=tmp_path / "gone.pt"))
    with pytest.raises(ValueError, match=r"other\.pt: no weights of an icefall zipformer"):
        read(arguments(checkpoint=stored({"model": {"a": torch.zeros(1)}})))
    with pytest.raises(ValueError, match=r"no tensor joiner\.output_linear\.weight and no ctc_output\.1\.weight"):
        read(arguments(checkpoint=stored({k: v for k, v in weights.items() if k.startswith("encoder")})))
    streaming = weights | {"encoder.encoders.0.layers.0.conv_module1.depthwise_conv.causal_conv.weight": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"causal_conv\.weight: no such tensor in a non-streaming zipformer"):
        read(arguments(checkpoint=stored({"model": streaming})))
    for name in (
        "encoder.encoders.0.layers.0.norm.bias", "encoder.encoders.0.layers.0.self_attn_weights.linear_pos.weight",
        "joiner.encoder_proj.weight", "decoder.embedding.weight",
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"other\.pt: no tensor {re.escape(name)}, which"):
            read(arguments(checkpoint=stored({key: tensor for key, tensor in weights.items() if key != name})))
    headless = {name: tensor for name, tensor in weights.items() if not name.startswith("encoder.encoders.")}
    with pytest.raises(ValueError, match=r"other\.pt: no tensor encoder\.encoders\.0\.layers\.0\."):
        read(arguments(checkpoint=stored(headless)))
    with pytest.raises(ValueError, match=r"other\.pt: encoder_embed\.out\.weight: \(32, 100\), not \(width, 128"):
        read(arguments(checkpoint=stored(weights | {"encoder_embed.out.weight": torch.zeros(32, 100)})))
    prefixed = {f"module.{name}": tensor for name, tensor in weights.items()} | {
        "module.attention_decoder.x": torch.ones(1)
    }
    assert read(arguments(checkpoint=stored(prefixed))).unused == ["attention_decoder.x"]


def test_tokens(tmp_path):
    lines = (GOLDEN / "tokens.txt").read_text()
    path = tmp_path / "tokens.txt"
    path.write_text(lines + "#0 30\n#1 31\n")  # as lexicons have it
    tokenizer = read(arguments(tokens=path)).tokenizer
    assert tokenizer.vocab_size == 30 and (tokenizer.blank_id, tokenizer.unk_id, tokenizer.sos_eos_id) == (0, 2, 1)
    assert tokenizer.decode(tokenizer.encode("an at")) == "AN AT"
    path.write_text(lines + "more 30\n")
    with pytest.raises(ValueError, match=r"tokens\.txt: 31 tokens, the weights have 30"):
        read(arguments(tokens=path))
    path.write_text(lines.replace("<blk>", "<other>"))
    with pytest.raises(ValueError, match=r"tokens\.txt: there is no <blk>"):
        read(arguments(tokens=path))


def test_a_bpe_model_encodes_under_its_own_ids(tmp_path):
    written = BytesIO()
    sentences = ["THE CAT SAT ON THE MAT", "A CAT THAT SAT", "MORE WORDS THAN THESE", "QUICK JOLLY FOX"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences * 5),
        model_writer=written, model_type="unigram", vocab_size=30, user_defined_symbols=["<blk>", "<sos/eos>"],
        unk_id=2, bos_id=-1, eos_id=-1, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "bpe.model").write_bytes(written.getvalue())
    theirs = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    pieces = [theirs.id_to_piece(index) for index in range(30)]
    (tmp_path / "tokens.txt").write_text("".join(f"{piece} {index}\n" for index, piece in enumerate(pieces)))
    ours = read(arguments(tokens=tmp_path / "tokens.txt", bpe=tmp_path / "bpe.model")).tokenizer
    for text in ("THE CAT", "MORE MATS", "QUIZ"):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode("the cat sat")) == "THE CAT SAT"


def test_help_tells_the_options_of_every_system(capsys):
    done = command("scripts/import_checkpoint.py", "--help", cwd=ROOT)
    for option in ("--tokens", "--bpe", "--symbols", "--set", "with --from wenet"):
        assert option in done.stdout
