import json

import numpy as np
import pytest
import soundfile

from asr.data.checks import check_cuts
from recipes.synthetic.espeak import synthesizer
from recipes.synthetic.generate import VARIANTS, generate, speakers_of
from recipes.synthetic.prepare import prepare

espeakng_loader = pytest.importorskip("espeakng_loader")
SMALL = {"num_train": 3, "num_dev": 1, "num_test": 2}


def test_variants_exist_and_no_part_shares_one():
    from pathlib import Path

    there = {path.name for path in (Path(espeakng_loader.get_data_path()) / "voices" / "!v").iterdir()}
    parts = {name: set(variants.split()) for name, variants in VARIANTS.items()}
    assert set.union(*parts.values()) <= there
    assert sum(len(part) for part in parts.values()) == len(set.union(*parts.values()))
    numbers = [speaker.number for part in VARIANTS for speaker in speakers_of(part, "en", 0)]
    assert len(numbers) == len(set(numbers))


def test_voices_differ_and_unknown_ones_are_refused():
    espeak = synthesizer()
    high = espeak.speak("one two three", "gmw/en-US+f3", 160, 60)
    low = espeak.speak("one two three", "gmw/en-US+david", 160, 40)
    assert espeak.sample_rate == 22050 and len(high) > 10000
    assert len(high) != len(low) or np.abs(high - low).max() > 1000
    with pytest.raises(ValueError, match="xx/none"):
        espeak.speak("one", "xx/none", 160, 50)


def test_english_becomes_a_librispeech_tree_that_is_the_same_every_time(tmp_path):
    root = tmp_path / "made"
    corpus = prepare(str(root), **SMALL)
    splits = {name: check_cuts(cuts, name) for name, cuts in corpus.splits.items()}
    assert {name: (len(kept), len(rejected)) for name, (kept, rejected) in splits.items()} == {
        "train": (3, 0),
        "dev": (1, 0),
        "test": (2, 0),
    }
    for kept, _ in splits.values():
        assert all(0.5 < cut.duration < 8 and cut.supervisions[0].text.isupper() for cut in kept)
    (transcript, *_) = sorted(root.glob("train/*/*/*.trans.txt"))
    audio = transcript.with_name(transcript.read_text().split()[0] + ".flac")
    assert soundfile.info(audio).samplerate == 16000
    synthesizer().speak("other speech in this process", "gmw/en-US", 160, 50)
    stamp = json.loads((root / "synthetic.json").read_text())
    assert generate(str(root), **SMALL) == stamp
    assert generate(str(tmp_path / "again"), **SMALL)["fingerprint"] == stamp["fingerprint"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "made"]


def test_mandarin_becomes_an_aishell_tree(tmp_path):
    corpus = prepare(str(tmp_path / "data_aishell"), language="zh", **SMALL)
    for name, cuts in corpus.splits.items():
        kept, rejected = check_cuts(cuts, name)
        assert kept and not rejected
        assert all("\u4e00" <= character <= "\u9fff" for cut in kept for character in cut.supervisions[0].text)


def test_leftovers_of_other_settings_are_refused(tmp_path):
    root = tmp_path / "made"
    root.mkdir()
    (root / "synthetic.json").write_text(json.dumps({"settings": {"seed": 5}, "fingerprint": "x"}))
    with pytest.raises(ValueError, match=r"seed=5.*seed=0.*Delete"):
        generate(str(root))
    (root / "synthetic.json").unlink()
    (root / "thesis.txt").touch()
    with pytest.raises(ValueError, match="not a synthetic corpus"):
        generate(str(root))
    with pytest.raises(ValueError, match="allowed are en, zh"):
        generate(str(tmp_path / "new"), language="tlh")
