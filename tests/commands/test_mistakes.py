from __future__ import annotations

import pytest

from tests.commands.tiny import MODEL, command, digits_data, python, read_json

OWN = ["data=custom", "data.prepared_dir=prepared", *MODEL]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data=custom"], "data.train: give your training data"),
        (["data=custom", "data.train=nowhere.tsv"], "nowhere.tsv"),
        (["data=an4", "data.corpus.corpus_dir=nowhere"], "nowhere is not an AN4 tree"),
        (["data=fsdd", "data.corpus.corpus_dir=nowhere"], "nowhere has no folder `recordings`"),
        (["device=cuda:77"], "device=cuda:77"),
        (["+encoder.num_layer=3"], "did you mean num_layers?"),
        (
            ["optim.lrr=1", "data.limt=3", "precision=fp8", "encoder=conformer_s"],
            "3 faults in the configuration:\n  - data.limt=3: no such key as limt; did you mean limit?\n"
            "  - optim.lrr=1: no such key as lrr; did you mean lr?\n  - precision='fp8': ",
        ),
        (["-m", "encoder.kernal_size=3,5"], "did you mean kernel_size?"),
        (["encoder=conformr_xs", "data.limt=3"], "encoder=conformr_xs: no such choice; did you mean conformer_xs?"),
        (["-m", "encoder=conformer_xs,zipforner_xs"], "encoder=zipforner_xs: no such choice"),
        (["encoder.num_heads=5"], "encoder.num_heads=5: must divide the width (output_dim) of 144"),
        (["init_mode=xavier"], "1 fault in the configuration:\n  - init_mode='xavier'"),
        (
            ["data.train=nowhere.tsv", "data=custom", "encoder=zipformer_s", "encoder.dims=[32,48]"],
            "encoder.dims=[32, 48]",
        ),
        (["search=ctc_greedy_search", "head._target_=os.system"], "head._target_='os.system'"),
    ],
)
def test_a_mistake_exits_with_one_error_and_no_traceback(arguments, message, tmp_path):
    done = command("train.py", "trainer.num_threads=1", *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("error: ") == 1 and message in done.stderr.partition("error: ")[2]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("encoder.num_heads=3", "num_heads"),
        ("data.max_utterance=0.35", "no utterance is left to train on"),
        ("data.noise=none.jsonl.gz", "none.jsonl.gz: there is no such file"),
        ("tokenizer.vocab_size=2", "vocab_size"),
        ("tokenizer.kind=words", "kind"),
        ("augment.probability=often", "augment.probability='often': float is expected"),
        ("data.corpus.test_speakers=[zoe]", "'zoe' is not in"),
    ],
)
def test_a_value_that_does_not_fit_the_data_or_the_model(change, message, tmp_path, digits):
    done = command("train.py", *MODEL, *digits, change, "run_dir=run", cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr.partition("error: ")[2] and "Traceback" not in done.stderr
    if (tmp_path / "run").exists():
        record = read_json(tmp_path / "run" / "train.json")
        assert record["status"] == "failed" and message in record["error"]
        assert "Traceback" in (tmp_path / "run" / "train.log").read_text(), "the log is where to look closer"


def test_a_table_that_names_no_audio(tmp_path):
    (tmp_path / "mine.tsv").write_text("a.wav\tHELLO\nb.wav\tTHERE\nc.wav\tYOU\nd.wav\tALL\n")
    done = command("train.py", *OWN, "data.train=mine.tsv", cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "x missing file" in done.stderr and f"{tmp_path}/c.wav" in done.stderr


def test_texts_that_the_tokenizer_does_not_know_are_refused_with_their_share(tmp_path, workplace, digits):
    wavs = sorted((workplace / "digits" / "recordings").glob("*.wav"))
    for split, text in (("train", "打开灯"), ("dev", "開燈ABC")):
        (tmp_path / f"{split}.tsv").write_text("".join(f"{path}\t{text}\n" for path in wavs[:6]))
    given = [*OWN, "tokenizer=char", "data.train=train.tsv", "data.dev=dev.tsv", "data.corpus.test_share=0"]
    done = command("train.py", *given, cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "dev: 100% unknown to the tokenizer ('開', '燈', 'A', 'B', 'C')" in done.stderr
    assert "More than data.max_unknown=0.5 is refused" in done.stderr


def test_the_traceback_is_shown_on_request(tmp_path):
    settings = digits_data(tmp_path / "none", tmp_path / "p")
    done = python("train.py", *settings, cwd=tmp_path, ASR_TRACEBACK="1", HYDRA_FULL_ERROR="1")
    assert done.returncode == 1 and "Traceback" in done.stderr and "recordings" in done.stderr
