"""The LibriSpeech recipe from the publisher's tree to a word error rate, with all that its experiments turn on."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import soundfile

from asr.text.tokenizer import load_tokenizer
from tests.commands.tiny import MODEL, ROOT, command, decode, read_json, train

SHARED = Path(os.environ.get("ASR_SHARED", ROOT.parent / "shared"))

TINY = [argument for argument in MODEL if not argument.startswith("tokenizer")]


def spoken(root: Path) -> None:
    """Parts of the mini corpus, and a test part, by espeak-ng."""
    generate = pytest.importorskip("recipes.synthetic.generate")
    pytest.importorskip("espeakng_loader")
    generate.generate(str(root), num_train=20, num_dev=3, num_test=2)
    for made, published in (("train", "train-clean-5"), ("dev", "dev-clean-2"), ("test", "test-clean")):
        (root / made).rename(root / published)


def real(root: Path) -> None:
    """A few published utterances: one of LibriSpeech, the rest of another reader."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"{SHARED / 'data'} is absent")
    lines = (SHARED / "data" / "librivox" / "transcription").read_text().splitlines()
    books = [re.fullmatch(r"<s> (.+) </s> \((.+)\)", line).groups() for line in lines]
    said = [(text.upper(), SHARED / "data" / "librivox" / f"{name}.wav") for text, name in books]
    first = ("IT WAS THE FIRST GREAT SORROW OF HIS LIFE IT WAS NOT SO MUCH THE LOSS OF THE COTTON ITSELF BUT THE "
             "FANTASY THE HOPES THE DREAMS BUILT AROUND IT")  # fmt: skip
    said.append((first, SHARED / "data" / "single" / "librispeech-1995-1837-0001.wav"))
    parts = {"train-clean-5": said[:4], "dev-clean-2": said[4:5], "test-clean": said[5:]}
    for speaker, (part, utterances) in enumerate(parts.items(), start=1):
        folder = root / part / str(speaker) / "7"
        folder.mkdir(parents=True)
        rows = []
        for number, (text, wav) in enumerate(utterances):
            name = f"{speaker}-7-{number:04d}"
            soundfile.write(folder / f"{name}.flac", *soundfile.read(wav))
            rows.append(f"{name} {text}\n")
        (folder / f"{speaker}-7.trans.txt").write_text("".join(rows))


def write_musan(root: Path) -> Path:
    """A folder of MUSAN's shape."""
    generator = np.random.default_rng(0)
    for place, seconds in (("noise/free-sound/noise-free-sound-0000", 1.0), ("music/fma/music-fma-0000", 30.0)):
        path = root / "musan" / f"{place}.wav"
        path.parent.mkdir(parents=True)
        soundfile.write(path, 0.1 * generator.standard_normal(round(16000 * seconds)), 16000)
    (root / "musan" / "README").touch()
    return root / "musan"


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("fill", [spoken, real], ids=["spoken", "real"])
def test_from_the_published_tree_to_a_word_error_rate(tmp_path, fill, kind):
    fill(tmp_path / "LibriSpeech")
    run = train(
        "+experiment=mini_librispeech_conformer_ctc", f"data.corpus.corpus_dir={tmp_path}", *TINY,
        "data.speed_factors=[0.9,1.0,1.1]",
        f"data.prepared_dir={tmp_path / 'prepared'}", "data.corpus.tests=[test-clean]", f"tokenizer={kind}",
        "tokenizer.vocab_size=auto", "tokenizer.byte_fallback=true", f"data.noise={write_musan(tmp_path)}",
        "data.noise_probability=1.0", "data.max_duration=40", "trainer.max_epochs=1", run_dir=tmp_path / "run",
    )  # fmt: skip
    log = (run / "train.log").read_text()
    utterances = read_json(run / "data_report.json")["splits"]["train"]["utterances"]
    heard = int(re.search(r"training on (\d+) utterances", log)[1])
    left_out = sum(int(count) for count in re.findall(r"(\d+) (?:shorter than|longer than|too few)", log))
    assert heard + left_out == 3 * utterances, "at 0.9, 1.0 and 1.1 times the speed"
    record = read_json(run / "train.json")
    assert record["status"] == "finished" and record["skipped_utterances"] == 0
    tokenizer = load_tokenizer(run / "tokenizer")
    assert tokenizer.decode(tokenizer.encode("NAÏVE ÉTUDE")) == "NAÏVE ÉTUDE", "by bytes, where no piece spells it"
    decode(run, "avg=1", "data.sets=[dev,test-clean]")
    results = {path.name.partition("-ctc")[0]: read_json(path / "result.json") for path in (run / "decode").iterdir()}
    assert results.keys() == {"dev", "test-clean"} and all(result["ref_words"] > 0 for result in results.values())


def test_a_folder_without_the_wanted_parts_is_told_with_where_to_get_them(tmp_path):
    (tmp_path / "LibriSpeech" / "dev-clean-2").mkdir(parents=True)
    done = command("scripts/prepare.py", "data=mini_librispeech", f"data.corpus.corpus_dir={tmp_path}",
                   f"data.prepared_dir={tmp_path / 'prepared'}", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 1
    assert "none of the parts ['train-clean-5'] for 'train'" in done.stderr
    assert "lhotse download librispeech" in done.stderr and "--mini" in done.stderr
