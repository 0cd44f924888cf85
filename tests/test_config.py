from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from asr.build import search_settings
from asr.config import ConfigError, check, check_overrides
from asr.rules import by_place
from asr.settings import DecodeSettings, TrainSettings

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
ADDED = ("experiment", "debug")
# What must be given with a choice, as its own comment says.
NEEDED = {
    "data=custom": ["data.train=my.tsv"],
    "head=transducer": ["search=greedy_search"],
    "search=greedy_search": ["head=transducer"],
    "search=modified_beam_search": ["head=transducer"],
    "experiment=transfer_quartznet": ["init_from.run_dir=runs/other"],
    "tokenizer=saved": ["tokenizer.folder=runs/other"],
    "head=attention": ["search=attention"],
    "search=attention": ["head=ctc_attention"],
    "search=attention_rescoring": ["head=ctc_attention"],
}


def choices(group: str) -> list[str]:
    return sorted(path.relative_to(CONF / group).with_suffix("").as_posix() for path in (CONF / group).rglob("*.yaml"))


def compose_train(*overrides: str):
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=list(overrides))


def faults_of(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check(compose_train(*overrides))
    return caught.value.faults


def test_the_default_and_every_key_of_the_schema_can_be_overridden_as_documented():
    cfg = compose_train()
    settings = check(cfg)
    assert settings.name == "demo" and check(compose_train("data=custom", "data.train=my.tsv")).name == "custom"
    for group, of in (("trainer", settings.trainer), ("data", settings.data)):
        own = vars(of).keys() - ({"train", "dev", "test"} if group == "data" else set())
        assert own <= cfg[group].keys(), "a key that is in no YAML needs a plus on the command line"


@pytest.mark.parametrize("choice", [f"{group}={name}" for group in GROUPS for name in choices(group)])
def test_every_choice_of_every_group_composes_and_passes_the_check(choice):
    group = choice.partition("=")[0]
    settings = check(compose_train(("+" if group in ADDED else "") + choice, *NEEDED.get(choice, [])))
    assert isinstance(settings, TrainSettings)


@pytest.mark.parametrize("experiment", choices("experiment"))
@pytest.mark.parametrize("debug", choices("debug"))
def test_debug_settings_go_with_every_experiment(experiment, debug):
    needed = NEEDED.get(f"experiment={experiment}", [])
    check(compose_train(f"+experiment={experiment}", f"+debug={debug}", *needed))


@pytest.mark.parametrize("name", [f"{group}/{name}" for group in ADDED for name in choices(group)])
def test_an_experiment_is_short_and_begins_with_its_command(name):
    lines = (CONF / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    group, _, choice = name.partition("/")
    assert len(lines) <= 30
    header = [line for line in lines[:4] if line.startswith("#")]
    assert header[0] == "# @package _global_"
    assert any(line.startswith("# python train.py") and f"+{group}={choice}" in line for line in header)
    for line in header:  # each command's overrides are keys that exist
        words = line.removeprefix("# ").split()
        if words[:2] == ["python", "train.py"]:
            check_overrides([word for word in words[2:] if "=" in word], TrainSettings, "train")
        if words[:2] == ["python", "decode.py"]:
            check_overrides([word for word in words[2:] if "=" in word], DecodeSettings, "decode")


def test_all_faults_are_told_at_once_with_key_value_allowed_and_nearest_key():
    faults = faults_of(
        "+typo=1", "+trainer.max_epoch=3", "precision=fp61", "+encoder.num_layer=3", "encoder.output_dim=wide",
        "+head.vocab_size=5", "optim._target_=os.system", "data.speed_factors=[]", "trainer.save_every=3",
        "data.max_duration=-1", "+features.mel=1", "device=gpu", "trainer.accumulate=two",
    )  # fmt: skip
    text = "\n".join(faults)
    assert re.search(r"^typo=1: no such key; .*known keys: .*trainer", text, re.M)
    assert re.search(r"^trainer.max_epoch=3: .*did you mean max_epochs", text, re.M)
    assert re.search(r"^precision='fp61': .*fp32, amp_fp16, amp_bf16, bf16", text, re.M)
    assert re.search(r"^encoder.num_layer=3: .*Conformer takes no such argument; did you mean num_layers", text, re.M)
    assert re.search(r"^encoder.output_dim='wide': int is expected", text, re.M)
    assert re.search(r"^head.vocab_size=5: .*no such argument", text, re.M), "build passes it, so YAML must not"
    assert re.search(r"^optim._target_='os.system': only asr., recipes., torch. may be named", text, re.M)
    assert re.search(r"^data.speed_factors=\[\]: .*as in \[0.9,1.0,1.1\]", text, re.M)
    assert re.search(r"^trainer.save_every=3: must be at least trainer.average_period=10", text, re.M)
    assert re.search(r"^data.max_duration=-1.0: must be above 0", text, re.M)
    assert re.search(r"^features.mel=1: no such key", text, re.M)
    assert re.search(r"^device=gpu: auto, cpu, cuda or cuda:N", text, re.M)
    assert re.search(r"^trainer.accumulate='two': .*could not be converted to Integer", text, re.M)
    assert len(faults) == 13


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["~encoder"], r"^encoder: choose one, as in encoder=NAME"),
        (["encoder._target_=asr.encoders.nothing.Nothing"], r"^encoder._target_=.*cannot be imported"),
        (["encoder._target_=asr.encoders.conformer.Conform"], r"^encoder._target_=.*cannot be imported"),
        (["+tokenizer.normaliser._target_=os.system"], r"^tokenizer.normaliser._target_='os.system': only asr\."),
        (["+augment.more=[{_target_: os.system}]"], r"^augment.more\[0\]._target_='os.system'"),
        (["head._target_=os.system"], r"^head._target_='os.system'"),
        (["encoder.num_layers=null"], r"^encoder.num_layers=None: int is expected"),
        (["data=librispeech", "+data.train=my.tsv"], r"^data.train=my.tsv: unused by data=librispeech, whose"),
        (["data=an4", "+data.dev=my.tsv"], r"^data.dev=my.tsv: unused by data=an4, .* data=custom takes a path"),
        (["+data.test=my.tsv"], r"^data.test=my.tsv: unused by data=demo"),
        (["data=custom", "data.train=a", "data.corpus.train=b"], r"^data.train=a: unused by data=custom"),
        (["data=librispeech", "+data.tran=my.tsv"], r"^data.tran='my.tsv': no such key; did you mean train"),
        (["data=librispeech", "+data.corpus.tran=x"], r"^data.corpus.tran='x': .*no such argument; did you mean train"),
        (["data=custom"], r"^data.train: give your training data, as in data=custom data.train="),
        (["data.noise_snr=[20,10]"], r"^data.noise_snr=\[20.0, 10.0\]: a pair \[low,high\]"),
        (["data.min_duration=30"], r"^data.min_duration=30.0: must be below data.max_utterance=20.0"),
        (["data.limit=some"], r"^data.limit='some': .*Integer"),
        (["name=${nothing.there}"], r"nothing.there"),
        (["data.limit=0"], r"^data.limit=0: must be above 0"),
        (["trainer.num_threads=-1"], r"^trainer.num_threads=-1: must be above 0"),
        (["trainer.initial_grad_scale=0"], r"^trainer.initial_grad_scale=0.0: must be above 0"),
        (["data.noise_probability=2"], r"^data.noise_probability=2.0: a share between 0 and 1"),
        (["data.speed_factors=[1.0,1.0]"], r"^data.speed_factors=\[1.0, 1.0\]: a factor is given twice"),
        (["data.min_duration=nan"], r"^data.min_duration=nan: must be below"),
        (["optim.lr=inf"], r"^optim.lr=inf: a learning rate above 0"),
        (["data.num_workers=-1"], r"^data.num_workers=-1: must be 0 or more"),
        (["resume=maybe"], r"^resume='maybe': .*auto, true, false"),
        (["init_mode=xavier"], r"^init_mode='xavier': .*xavier_uniform"),
        (["optim.lr=-1"], r"^optim.lr=-1: a learning rate above 0"),
        (["lr_scale.encoder=0"], r"^lr_scale.encoder=0: a factor above 0 .* freeze=\[encoder\]"),
        (["init_from.run_dir=a", "init_from.checkpoint=b"], r"^init_from.checkpoint=b: give it or init_from.run_dir"),
        (["init_from.exclude=[head]"], r"^init_from.run_dir: include and exclude are of a run"),
        (["+init_from.runs=a"], r"^init_from.runs='a': no such key; did you mean run_dir"),
        (["init.head=xavier"], r"^init.head='xavier': null, paper, xavier_uniform"),
    ],
)
def test_a_fault_is_told_in_words(overrides, message):
    assert any(re.search(message, fault) for fault in faults_of(*overrides))


def test_yaml_and_typed_values_mean_the_same():
    assert check(compose_train("resume=true")).resume.value == "true"
    assert check(compose_train("resume='true'")).resume.value == "true"
    assert check(compose_train("data.max_duration=20")).data.max_duration == 20.0
    assert check(compose_train("trainer.max_steps=null")).trainer.max_steps is None


@pytest.mark.parametrize(
    ("overrides", "whole", "parts"),
    [
        ([], "paper", {"encoder": "paper", "head": "paper"}),
        (["init_mode=null"], None, {"encoder": None, "head": None}),
        (["init_mode=none"], None, {"encoder": None, "head": None}),
        (["init_mode=None"], None, {"encoder": None, "head": None}),
        (["init_mode=tds_normal", "init.head=None"], "tds_normal", {"encoder": "tds_normal", "head": None}),
        (["+init.head.output=trunc_normal"], "paper", {"encoder": "paper", "head.output": "trunc_normal"}),
    ],
)
def test_parts_are_initialised_as_the_whole_unless_they_say_otherwise(overrides, whole, parts):
    settings = check(compose_train(*overrides))
    assert (settings.init_mode.value if settings.init_mode else None) == whole
    assert by_place(settings.init) == parts


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (["trian.lr=1", "sed=3"], [r"^trian.lr=1: .*did you mean trainer", r"^sed=3: .*did you mean seed"]),
        (["trainer.max_epoch=3"], [r"^trainer.max_epoch=3: .*did you mean max_epochs"]),
        (["data.max_durations=3"], [r"did you mean max_duration"]),
        (["encoder=conformer_s", "encoder.kernal_size=3", "seed=x"], [r"did you mean kernel_size", r"^seed='x'"]),
    ],
)
def test_misspelt_overrides_are_found_with_values_of_a_wrong_kind(overrides, messages):
    with pytest.raises(ConfigError) as caught:
        check_overrides(overrides, TrainSettings, "train")
    assert len(caught.value.faults) == len(messages)
    for message in messages:
        assert any(re.search(message, fault) for fault in caught.value.faults)


def test_overrides_that_are_right_or_for_others_to_judge_pass():
    check_overrides(
        ["encoder=conformer_s", "+new=2", "~search", "hydra.sweep.dir=x", "optim.lr=1", "data=an4",
         "data.train=a=b.tsv", "experiment=an4_quartznet", "hydra/launcher=joblib", "trainer.max_steps=3",
         "--help", "-m"],
        TrainSettings, "train",
    )  # fmt: skip


LIGHT = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print(sorted({"torch", "lhotse", "numpy"} & sys.modules.keys()), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("script", "argument", "code", "said"),
    [
        ("train.py", "--help", 0, "conformer_xs"),
        ("decode.py", "--help", 0, "ctc_prefix_beam_search"),
        ("scripts/prepare.py", "--help", 0, "fsdd"),
        ("train.py", "trian.lr=1", 1, "error: 1 fault in the configuration:\n  - trian.lr=1"),
        ("train.py", "encoder.num_layer=1", 1, "encoder.num_layer"),
        ("decode.py", "epcoh=1", 1, "did you mean epoch"),
    ],
)
def test_help_and_misspelt_overrides_answer_without_importing_torch(script, argument, code, said, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, str(ROOT / script), argument], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


def test_heads_inside_a_head_are_checked_and_their_searches_offered():
    assert check(compose_train("head=ctc_attention", "search=attention_rescoring")).head["heads"]
    faults = faults_of("head=ctc_attention", "+head.heads.ctc.drop=0.5", "~head.heads.attention", "search=attention")
    assert any(re.search(r"^head\.heads\.ctc\.drop=0\.5: .*did you mean dropout", fault) for fault in faults)
    assert any(re.search(r"^search=attention: .*offers ctc_greedy_search, ctc_prefix_beam_search$", f) for f in faults)


def test_a_section_for_a_dataclass_is_checked_key_by_key():
    for place, head in (("head", "attention"), ("head.heads.attention", "ctc_attention")):
        assert check(compose_train(f"head={head}", "search=attention", f"{place}.free_running.mode=own_output"))
        faults = faults_of(
            f"head={head}", "search=attention", f"{place}.free_running.mode=own", f"{place}.free_running.every=often",
            f"+{place}.free_running.shares=0.1", f"{place}.free_running.share=[[0,0],[5,1]]",
        )  # fmt: skip
        assert [fault.partition(":")[0] for fault in faults] == [
            f"{place}.free_running.mode='own'",
            f"{place}.free_running.every='often'",
            f"{place}.free_running.shares=0.1",
        ]
        assert "scheduled_sampling" in faults[0] and "did you mean share" in faults[2]


def test_values_that_a_search_would_refuse_after_an_epoch_are_refused_before_it():
    refused = {
        ("modified_beam_search", "transducer"): ["beam=0", "temperature=0", "length_norm=-1"],
        ("greedy_search", "transducer"): ["max_symbols_per_frame=0"],
        ("ctc_prefix_beam_search", "ctc"): ["tokens_per_frame=0", "beam=2.5"],
        ("attention", "ctc_attention"): ["max_tokens_per_frame=0"],
        ("attention_rescoring", "ctc_attention"): ["ctc_weight=-1"],
    }
    for (search, head), options in refused.items():
        faults = faults_of(f"head={head}", f"search={search}", *(f"search.{option}" for option in options))
        assert sorted(fault.partition(":")[0] for fault in faults) == sorted(f"search.{option}" for option in options)
        for option in options:
            key, _, value = option.partition("=")
            with pytest.raises(ConfigError, match=f"search.{key}="):
                search_settings(search, {key: float(value) if "." in value else int(value)})
