import json

import pytest
import torch

from asr.training.mfu import counting_flops, peak_flops, peak_of


def test_flops_of_a_step_include_its_backward_pass():
    weights, inputs = torch.randn(20, 30, requires_grad=True), torch.randn(10, 20)
    _, forward = counting_flops(lambda: inputs @ weights)
    result, both = counting_flops(lambda: (inputs @ weights).sum().backward())
    assert result is None and forward == 2 * 10 * 20 * 30 and both == 2 * forward


def test_the_peak_goes_by_device_and_type():
    assert peak_of("NVIDIA H100 80GB HBM3", "amp_bf16") == 989e12 and peak_of("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_of("NVIDIA A100-SXM4-40GB", "fp32") == 19.5e12
    assert peak_of("some other device", "fp32") is None
    assert peak_flops(torch.device("cpu"), "fp32", 1) is None


def test_the_utilisation_stands_in_the_log(tiny, tmp_path):
    trainer = tiny.trainer(tmp_path, max_epochs=1)
    trainer.monitor.peak_flops = 1e9
    trainer.fit()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "train"]
    assert len(steps) == 10 and all(record["mfu"] > 0 for record in steps)
    # From the second step on, both sides of the ratio speak of the same step.
    ratios = [record["mfu"] / record["audio_hours_per_second"] for record in steps[1:]]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))
