"""From a trained run to sets, loaders and searches; from hypotheses to what is scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
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
        folder = Path(trained.data.prepared_dir).with_name("decoded") / safe_name(str(path))
        recipe = "recipes.custom.prepare.prepare"
        corpus = make({"_target_": recipe, "test": str(path), "shar_audio_dir": str(folder / "audio")})
        write_prepared(corpus, folder, Normaliser(), {"test": str(path)})
        # Named after the file, so that results of several such sets lie side by side.
        return {safe_name(path.stem.partition(".")[0]): list(load_cuts(folder / "test.jsonl.gz"))}
    splits = prepared_splits(prepared_folder(trained))
    tests = [name for name in splits if name not in ("train", "dev")]
    wanted = settings.data.sets or tests or ["dev"]
    unknown = [name for name in wanted if name not in splits]
    if unknown:
        raise ValueError(f"data.sets={wanted}: {unknown} not prepared; there are {', '.join(splits)}")
    return {name: list(load_cuts(splits[name])) for name in wanted}


def dev_cuts(trained: TrainSettings) -> list[Cut]:
    return list(load_cuts(prepared_splits(prepared_folder(trained))["dev"]))


def averages_to_try(checkpoint: dict[str, Any]) -> list[int]:
    """Numbers of epochs that `avg=auto` compares for a run that has reached `checkpoint`."""
    epochs = max(1, checkpoint["progress"]["epoch"] - 1)
    return sorted({1, *(n for n in (2, 3, 5, 7, 10, 15, 20, 30) if n <= epochs)})


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
