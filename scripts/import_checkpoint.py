"""Turns another system's checkpoint into a run folder:

python scripts/import_checkpoint.py --from SYSTEM --checkpoint FILE --out RUN_DIR [its options] [--set KEY=VALUE ...]
python decode.py run_dir=RUN_DIR data.test=my.tsv
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from asr.command import report_errors

ROOT = Path(__file__).resolve().parents[1]
SYSTEMS = sorted(
    path.stem for path in (ROOT / "asr" / "interop").glob("*.py") if path.stem not in ("__init__", "run_folder")
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="system", choices=SYSTEMS, required=True, help="what the checkpoint comes from")
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN_DIR", help="a new folder")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="options of the model, by that system's names, where the weights do not tell them",
    )  # fmt: skip
    chosen = argparse.ArgumentParser(add_help=False)
    chosen.add_argument("--from", dest="system", choices=SYSTEMS)
    system = chosen.parse_known_args()[0].system
    reader = importlib.import_module(f"asr.interop.{system}") if system else None
    if reader:
        reader.add_arguments(parser)
    else:
        parser.epilog = "\n".join(map(options_of, SYSTEMS))
    arguments = parser.parse_args()
    assert reader
    with report_errors():
        convert(reader, arguments)


def options_of(system: str) -> str:
    """Help on a system's own options."""
    own = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    importlib.import_module(f"asr.interop.{system}").add_arguments(own.add_argument_group(f"with --from {system}"))
    return own.format_help().strip("\n")


def convert(reader: Any, arguments: argparse.Namespace) -> None:
    """Read the checkpoint, hold it against the model that its settings describe, and write the run folder."""
    from asr import build
    from asr.interop.run_folder import first_checkpoint
    from asr.training.checkpoint import CheckpointFolder, load_weights
    from asr.training.run_folder import versions, write_json

    run_dir = arguments.out
    if run_dir.exists() and any(run_dir.iterdir()):
        raise ValueError(f"--out {run_dir}: exists and is not empty; give a new folder")
    imported = reader.read(arguments)
    settings = settings_with(imported.sections)
    model = build.build_model(settings, imported.tokenizer)
    weights = imported.model_state
    if not getattr(model.feature_norm, "needs_fit", False):
        own = model.state_dict()
        weights = {name: own[name] for name in own if name.startswith("feature_norm.")} | weights
    load_weights(model, weights, str(arguments.checkpoint))

    config = build.as_plain(settings)
    run_dir.mkdir(parents=True, exist_ok=True)
    build.store_identity(run_dir, config, imported.tokenizer, versions())
    checkpoint = first_checkpoint(model.state_dict(), config, imported.tokenizer, versions())
    CheckpointFolder(run_dir / "checkpoints").save(checkpoint, "epoch", 1)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    write_json(
        {"name": settings.name, "status": "imported", "epochs": 1, "num_parameters": num_parameters},
        run_dir / "train.json",
    )
    if imported.unused:
        print(f"not used: {', '.join(imported.unused)}")
    print(f"{num_parameters / 1e6:.2f} M parameters, {imported.tokenizer.vocab_size} tokens: {run_dir}")
    print(f"decode with: python decode.py run_dir={run_dir} data.test=my.tsv")


def settings_with(sections: dict[str, Any]) -> Any:
    """conf/train.yaml with these sections in it, checked; one with a `_target_` replaces the default one whole."""
    from omegaconf import OmegaConf, open_dict

    from asr.config import check, composed

    cfg = composed("train", [])
    with open_dict(cfg):
        for key, section in sections.items():
            whole = isinstance(section, dict) and "_target_" in section
            OmegaConf.update(cfg, key, section, merge=not whole)
    return check(cfg)


if __name__ == "__main__":
    main()
