import math
import warnings

import pytest
import torch

from asr.training.precision import PrecisionMode, resolve_precision

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_auto_is_fp32_on_a_cpu_and_amp_bf16_on_a_gpu():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_precision("auto", CPU) == "fp32" and resolve_precision("auto", GPU) == "amp_bf16"
        assert resolve_precision("amp_fp16", GPU) == "amp_fp16"


def test_modes_with_a_catch_say_so():
    with pytest.warns(UserWarning, match="emulated.*amp_bf16"):
        resolve_precision("amp_fp16", CPU)
    with pytest.raises(ValueError, match=r"precision='fp8'.*amp_fp16"):
        resolve_precision("fp8", CPU)


@pytest.mark.parametrize(
    ("mode", "parameters", "inside"),
    [
        ("fp32", torch.float32, torch.float32),
        ("amp_fp16", torch.float32, torch.float16),
        ("amp_bf16", torch.float32, torch.bfloat16),
        ("bf16", torch.bfloat16, torch.bfloat16),
    ],
)
def test_number_formats(tiny, mode, parameters, inside):
    precision = PrecisionMode(mode, CPU)
    model = precision.prepare(tiny.model(dropout=0.0, augment=False)).train()
    assert {parameter.dtype for parameter in model.parameters()} == {parameters}
    assert {b.dtype for b in model.buffers() if b.is_floating_point()} == {torch.float32}
    seen = []
    model.head.output.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    batch = tiny.batch("abcd")
    with precision.autocast():
        losses = model(batch)["ctc"]
    assert seen == [inside] and losses.dtype == torch.float32
    reference = tiny.model(dropout=0.0, augment=False).train()(batch)["ctc"]
    assert losses.mean().item() == pytest.approx(reference.mean().item(), rel=0.02)


@pytest.mark.parametrize("mode", ["amp_fp16", "amp_bf16", "bf16"])
def test_a_whole_run_and_its_files_in_every_mode(tiny, tmp_path, mode):
    trainer = tiny.trainer(tmp_path, mode, tiny.loader(3), max_epochs=1, initial_grad_scale=64.0)
    progress = trainer.fit()
    trainer.monitor.close()
    assert progress.step == 3 and progress.skipped_steps == 0
    assert type(progress.valid[0]["loss"]) is float and math.isfinite(progress.valid[0]["loss"])
    state = torch.load(tmp_path / "checkpoints/epoch-1.pt", weights_only=True)
    averages = [t for t in state["average"]["state"].values() if t.is_floating_point()]
    assert {tensor.dtype for tensor in averages} == {torch.float64}
    assert state["precision"]["mode"] == mode
