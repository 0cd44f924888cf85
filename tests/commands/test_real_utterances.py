"""Real utterances through their recipes, from the publisher's tree to error rates; AISHELL's by all of its searches."""

import os
import shutil
from pathlib import Path

import pytest
import soundfile

from tests.commands.tiny import MODEL, ROOT, command, decode, read_json

SINGLE = Path(os.environ.get("ASR_SHARED", ROOT.parent / "shared")) / "data" / "single"
UTTERANCE = SINGLE / "aishell-BAC009S0724W0121.wav"
SMALL = [
    *(setting for setting in MODEL if not setting.startswith("tokenizer")),
    *(f"head.heads.attention.{key}" for key in ("num_layers=1", "num_heads=2", "feed_forward_dim=16")),
]


@pytest.fixture
def tree(tmp_path):
    """The publisher's tree with the utterance in each of its parts, and a transcript too many."""
    if not UTTERANCE.is_file():
        pytest.skip(f"{UTTERANCE} is absent")
    lines = ["BAC009S0002W9999 没有 录音"]
    for part, speaker in (("train", "S0002"), ("dev", "S0724"), ("test", "S0764")):
        name = f"BAC009{speaker}W0121"
        target = tmp_path / "data_aishell" / "wav" / part / speaker / f"{name}.wav"
        target.parent.mkdir(parents=True)
        shutil.copyfile(UTTERANCE, target)
        lines.append(f"{name} 广州市 房地产 中介 协会 分析")
    transcript = tmp_path / "data_aishell" / "transcript" / "aishell_transcript_v0.8.txt"
    transcript.parent.mkdir()
    transcript.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [f"data.corpus.corpus_dir={tmp_path / 'data_aishell'}", f"data.prepared_dir={tmp_path / 'prepared'}"]


@pytest.mark.parametrize("precision", ["fp32", "amp_fp16", "amp_bf16", "bf16"])
def test_the_experiment_runs_from_preparing_to_rates(precision, tmp_path, tree):
    run = tmp_path / "run"
    # One utterance at three speeds: two batches, so one step.
    # The usual scale may overflow the only step.
    short = ["trainer.max_epochs=1", "trainer.initial_grad_scale=16", f"run_dir={run}"]
    done = command("train.py", f"+experiment=aishell_{precision}", *SMALL, *tree, *short, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = read_json(run / "train.json")
    assert record["status"] == "finished" and record["precision"] == precision
    decode(run, "--method", "ctc_greedy_search")
    for method in ("ctc_prefix_beam_search", "attention", "attention_rescoring"):
        decode(run, "--method", method, "search.beam=2")
    results = sorted((run / "decode").iterdir())
    assert len(results) == 4
    for folder in results:
        found = read_json(folder / "result.json")
        assert (found["unit"], found["ref_characters"], found["num_utterances"]) == ("character", 12, 1)


def test_a_librispeech_utterance_is_prepared_trained_on_and_decoded(tmp_path):
    name, speaker, chapter = "1995-1837-0001", "1995", "1837"
    if not (SINGLE / f"librispeech-{name}.wav").is_file():
        pytest.skip(f"{SINGLE} is absent")
    samples, rate = soundfile.read(SINGLE / f"librispeech-{name}.wav")
    for part in ("train-clean-100", "dev-clean", "test-clean"):
        folder = tmp_path / "LibriSpeech" / part / speaker / chapter
        folder.mkdir(parents=True)
        soundfile.write(folder / f"{name}.flac", samples, rate)
        words = "IT WAS THE FIRST GREAT SORROW OF HIS LIFE IT WAS NOT SO MUCH THE LOSS OF THE COTTON ITSELF BUT THE "
        words += "FANTASY THE HOPES THE DREAMS BUILT AROUND IT"
        (folder / f"{speaker}-{chapter}.trans.txt").write_text(f"{name} {words}\n")
    run = tmp_path / "run"
    given = [f"data.corpus.corpus_dir={tmp_path / 'LibriSpeech'}", f"data.prepared_dir={tmp_path / 'prepared'}"]
    model = [setting for setting in MODEL if not setting.startswith("tokenizer")]
    done = command("train.py", "+experiment=librispeech_conformer_ctc", *model, *given, "tokenizer.vocab_size=auto",
                   "trainer.max_epochs=1", f"run_dir={run}", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    decode(run)
    found = read_json(run / "decode" / "test-clean-ctc_greedy_search-epoch-1-avg-1" / "result.json")
    assert (found["unit"], found["ref_words"], found["num_utterances"]) == ("word", 30, 1)


def test_the_failing_original_and_its_remedies_compose_with_the_stand_in_corpus(tmp_path):
    text = (ROOT / "conf/experiment/aishell_conformer_512_amp_fp16.yaml").read_text()
    commands = [line.removeprefix("# ").split()[2:] for line in text.splitlines() if line.startswith("# python train")]
    assert len(commands) == 3
    for arguments in commands:
        done = command("train.py", *arguments, "data=aishell_mini", "--cfg", "job", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        for override in arguments[1:]:
            key, value = override.removeprefix("encoder.").split("=")
            assert f"  {key}: {value}" in done.stdout
