"""From a trained run to sets, loaders and searches; from hypotheses to what is scored."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock
from lhotse.cut import Cut
from omegaconf import OmegaConf

from asr.build.data import prepared_folder
from asr.build.objects import make
from asr.config import CONF, PASSED_BY_BUILD, ConfigError, check
from asr.data.corpus import prepared_splits, write_prepared
from asr.data.cuts import load_cuts
from asr.data.dataset import SpeechDataset
from asr.data.loader import Loader
from asr.rules import search_option_faults
from asr.scoring.runs import RESULT_FILE
from asr.scoring.wer import CJK, Utterance
from asr.settings import DecodeSettings, TrainSettings
from asr.targets import target_faults
from asr.text.normalise import Normaliser
from asr.text.tokenizer import Tokenizer
from asr.training.run_folder import safe_name
from asr.types import Hypothesis


def settings_of_run(checkpoint: dict[str, Any], encoder: dict[str, Any] | None = None) -> TrainSettings:
    """The settings a checkpoint was trained with, with changes to the encoder. Raises ConfigError for wrong ones."""
    config = checkpoint["config"]
    return check(OmegaConf.create({**config, "encoder": {**config["encoder"], **(encoder or {})}}))


def sets_to_decode(settings: DecodeSettings, trained: TrainSettings) -> dict[str, list[Cut]]:
    """Cuts of each set that was asked for. Raises ValueError that names the sets there are."""
    if settings.data.test:
        path = Path(settings.data.test).resolve()
        # Named after the file, so that results of several such sets lie side by side, and of this path alone.
        name = safe_name(re.sub(r"(\.(tsv|csv|txt|jsonl?|gz))+$", "", path.name))
        digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
        folder = Path(trained.data.prepared_dir).with_name("decoded") / f"{name}-{digest}"
        recipe = "recipes.custom.prepare.prepare"
        corpus = make({"_target_": recipe, "test": str(path), "shar_audio_dir": str(folder / "audio")})
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # several runs may be tested on the same file at once
            write_prepared(corpus, folder, Normaliser(), {"test": str(path)})
            cuts = list(load_cuts(folder / "test.jsonl.gz"))
        if (prepared_folder(trained) / f"{name}.jsonl.gz").exists():  # a set of the run's own has this name
            name = safe_name(path.name.replace(".", "_"))
        return {name: cuts}
    splits = prepared_splits(prepared_folder(trained))
    tests = [name for name in splits if name not in ("train", "dev")]
    wanted = settings.data.sets or tests or ["dev"]
    unknown = [name for name in wanted if name not in splits]
    if unknown:
        raise ValueError(f"data.sets={wanted}: {unknown} not prepared; there are {', '.join(splits)}")
    return {name: list(load_cuts(splits[name])) for name in wanted}


def dev_cuts(trained: TrainSettings) -> list[Cut]:
    return list(load_cuts(prepared_splits(prepared_folder(trained))["dev"]))


def unusual(settings: DecodeSettings) -> list[str]:
    """What was asked for beside method, epoch and average, as in "beam=8": part of the name of the results."""
    usual = DecodeSettings()
    named = [f"{key}={value}" for section in (settings.encoder, settings.search) for key, value in section.items()]
    if not settings.use_averaged_model:
        named.append("use_averaged_model=false")
    named += [
        f"{key}={getattr(settings, key).value}"
        for key in ("select", "precision")
        if getattr(settings, key) != getattr(usual, key)
    ]
    return named


def check_same_set(folder: Path, test: str | None) -> None:
    """Raises ValueError where the results in `folder` are of another file than `data.test`, by the same name."""
    if not (test and (folder / RESULT_FILE).is_file()):
        return
    before = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8")).get("extra", {}).get("test")
    if before and Path(before).resolve() != Path(test).resolve():
        raise ValueError(
            f"data.test={test}: {folder} holds the results on {before}, which has the same name; rename one of the "
            "files, or move the folder away"
        )


def build_decode_loader(
    trained: TrainSettings, tokenizer: Tokenizer, cuts: list[Cut], max_duration: float, num_workers: int
) -> Loader:
    """A loader over a set that is decoded; nothing is left out."""
    fbank = make(trained.features["fbank"])
    dataset = SpeechDataset(fbank, fbank.output_dim, tokenizer)
    return Loader(cuts, dataset, max_duration, num_workers=num_workers)


def build_search(node: dict[str, Any]) -> Any:
    """A search as a function of (head, encoded), where `head` is or holds one that it works on."""
    search = make(node)
    name = node["_target_"].rpartition(".")[2]
    return lambda head, encoded: search(head.part_for(name), encoded)


def search_settings(method: str, options: dict[str, Any]) -> dict[str, Any]:
    """The section of conf/search/METHOD.yaml with `options` over it. Raises ValueError for an unknown method
    or option."""
    path = CONF / "search" / f"{method}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml")))
        raise ValueError(f"method={method}: no such search; known: {known}")
    section = {**yaml.safe_load(path.read_text(encoding="utf-8")), **options}
    faults = target_faults("search", section, PASSED_BY_BUILD["search"]) + search_option_faults(section)
    if faults:
        raise ConfigError(faults)
    return section


def pair_with_references(cuts: list[Cut], hypotheses: dict[str, Hypothesis], tokenizer: Tokenizer) -> list[Utterance]:
    """References and hypotheses under the tokenizer's own normalisation; what was not decoded is empty."""
    utterances = []
    for cut in cuts:
        supervision = cut.supervisions[0]
        found = hypotheses.get(cut.id)
        hyp = tokenizer.normaliser(tokenizer.decode(found.tokens)) if found else ""
        utterances.append(
            Utterance(cut.id, tokenizer.normaliser(supervision.text or ""), hyp, supervision.speaker or "")
        )
    return utterances


def scoring_unit(utterances: list[Utterance]) -> str:
    """Characters where most of the references are Chinese or Japanese, words elsewhere."""
    text = "".join(utterance.ref for utterance in utterances).replace(" ", "")
    return "character" if text and len(CJK.findall(text)) > len(text) / 2 else "word"
