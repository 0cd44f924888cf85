"""Heads with searches and losses of their own, trained for a moment and decoded."""

from __future__ import annotations

import pytest

from tests.commands.tiny import decode, read_json, train

HEADS = {
    "transducer": ["head.decoder_dim=16", "head.joiner_dim=16"],
    "transducer_ctc": ["head.heads.transducer.decoder_dim=16", "head.heads.transducer.joiner_dim=16",
                       "head.heads.ctc.consistency_weight=0.2"],
    "cr_ctc": ["head.consistency_warmup=0"],
}  # fmt: skip
PARTS = {
    "transducer": {"simple", "pruned"},
    "transducer_ctc": {"transducer/simple", "transducer/pruned", "ctc"},
    "cr_ctc": set(),  # the only part of an evaluation is the loss
}


@pytest.mark.parametrize("head", HEADS)
def test_a_head_trains_and_its_first_search_is_the_default_one(head, tmp_path, digits):
    search = "ctc_greedy_search" if head == "cr_ctc" else "greedy_search"
    run = train(*digits, f"head={head}", f"search={search}", *HEADS[head], "trainer.max_steps=2", "trainer.log_every=1",
                run_dir=tmp_path / "run")  # fmt: skip
    record = read_json(run / "train.json")
    assert record["steps"] == 2 and record["skipped_steps"] == 0
    logged = (run / "metrics.jsonl").read_text()
    assert ("consistency" in logged) == (head != "transducer")
    assert {key.removeprefix("loss/") for key in record["valid"][-1] if key.startswith("loss/")} == PARTS[head]
    decode(run, "avg=1", "data.sets=[test_single]")
    if head == "transducer_ctc":
        decode(run, "avg=1", "data.sets=[test_single]", "--method", "modified_beam_search", "search.beam=2")
        decode(run, "avg=1", "data.sets=[test_single]", "--method", "ctc_prefix_beam_search")
    methods = {read_json(path)["method"] for path in run.glob("decode/*/result.json")}
    assert search in methods and len(methods) == (3 if head == "transducer_ctc" else 1)
