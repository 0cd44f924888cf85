"""The attentions against what fast-transformers computes with the same weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from asr.layers.transformer_layer import CROSS_ATTENTIONS, SELF_ATTENTIONS

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "fast_transformers.npz"
WIDTH, HEADS, LENGTH = 16, 2, 12
CASES = ("encoder_full", "encoder_linear", "decoder_full", "decoder_linear")


class PostNorm(nn.Module):
    """That library's stack: a norm after every sum and one at the end. The attentions are this project's."""

    def __init__(self, kind, num_layers, cross):
        super().__init__()
        self.layers = nn.ModuleList(PostNormLayer(kind, cross) for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, lens, *memory):
        for layer in self.layers:
            state = layer.cross_attention.start(*memory) if memory else None
            x = layer.finish(x, layer.self_attention(x, lens), lambda a, x, state=state: a.attend(x, state))
        return self.norm(x)

    def start(self, batch_size, *memory):
        return [
            (layer.self_attention.start(batch_size, LENGTH), layer.cross_attention.start(*memory) if memory else None)
            for layer in self.layers
        ]

    def step(self, x, states):
        after = []
        for layer, (own, of_memory) in zip(self.layers, states, strict=True):
            y, own = layer.self_attention.step(x, own)
            x = layer.finish(x, y, lambda a, x, state=of_memory: a.step(x, state)[0])
            after.append((own, of_memory))
        return self.norm(x), after


class PostNormLayer(nn.Module):
    def __init__(self, kind, cross):
        super().__init__()
        self.self_attention = SELF_ATTENTIONS[kind](WIDTH, HEADS)
        self.cross_attention = CROSS_ATTENTIONS[kind](WIDTH, HEADS) if cross else None
        self.linear1, self.linear2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))

    def finish(self, x, attended, look):
        x, last = self.norm1(x + attended), self.norm2
        if self.cross_attention is not None:
            x, last = self.norm2(x + look(self.cross_attention, x)), self.norm3
        return last(x + self.linear2(F.relu(self.linear1(x))))


def own_name(name):
    for theirs, ours in {".attention.": ".self_attention.", "out_projection": "output", "_projection": ""}.items():
        name = name.replace(theirs, ours)
    return name


@pytest.fixture(params=CASES)
def case(request):
    """The model, its inputs and all golden tensors of a case."""
    prefix = f"io.{request.param}."
    with np.load(GOLDEN) as file:
        io = {key.removeprefix(prefix): torch.tensor(file[key]) for key in file.files if key.startswith(prefix)}
        prefix = f"model.{request.param}."
        weights = {key.removeprefix(prefix): torch.tensor(file[key]) for key in file.files if key.startswith(prefix)}
    role, kind = request.param.split("_")
    model = PostNorm(kind, 1 if role == "decoder" else 2, cross=role == "decoder")
    missing, left = model.load_state_dict({own_name(name): value for name, value in weights.items()}, strict=False)
    # A full attention's keys need no bias, and an encoder has no third norm.
    assert all("norm3" in name for name in missing) and all(name.endswith("attention.key.bias") for name in left)
    assert kind == "full" or not left
    memory = (io["memory"], io["memory_lengths"]) if role == "decoder" else ()
    return model, kind, memory, io


def close(ours, theirs, relative=0.0):
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=relative)


def test_parallel_and_recurrent_outputs(case):
    model, _, memory, io = case
    valid = torch.arange(LENGTH) < io["lengths"][:, None]
    with torch.no_grad():
        close(model(io["x"], io["lengths"], *memory)[valid], io["batch"][valid])
        whole = torch.full((2,), LENGTH)
        close(model(io["x"], whole, *memory), io.get("batch_no_lengths", io["recurrent"]))
        states, outputs = model.start(2, *memory), []
        for number in range(LENGTH):
            y, states = model.step(io["x"][:, number], states)
            outputs.append(y)
    close(torch.stack(outputs, 1), io["recurrent"])


@torch.no_grad()
def test_free_running_outputs(case):
    model, _, memory, io = case
    y, states, outputs = io["x"][:, 0], model.start(2, *memory), []
    for _ in range(LENGTH):
        y, states = model.step(y, states)
        outputs.append(y)
    close(torch.stack(outputs, 1), io["free_running"])


@torch.no_grad()
def test_states(case):
    model, kind, memory, io = case
    states = model.start(2, *memory)
    for number in range(LENGTH):
        _, states = model.step(io["x"][:, number], states)
    for layer, (own, of_memory) in enumerate(states):
        prefix = f"state.{layer}.self" if memory else f"state.{layer}"
        if kind == "linear":
            close(own[0], io[f"{prefix}.S"], relative=1e-5)
            close(own[1], io[f"{prefix}.Z"], relative=1e-5)
        else:
            close(unbiased(own[0]), unbiased(io[f"{prefix}.keys"]))
            close(own[1], io[f"{prefix}.values"])
        if memory and kind == "linear":
            close(of_memory[0], io[f"state.{layer}.cross.S"].transpose(-2, -1), relative=1e-5)
            close(of_memory[1], io[f"state.{layer}.cross.Z"], relative=1e-5)
        elif memory:
            keys, values = (io[f"state.{layer}.cross.{name}"].transpose(1, 2) for name in ("keys", "values"))
            for row, length in enumerate(memory[1].tolist()):
                close(unbiased(of_memory[0])[row, :, :length], unbiased(keys)[row, :, :length])
                close(of_memory[1][row, :, :length], values[row, :, :length])


def unbiased(keys):
    """Their keys have a bias, the same at every position, where full attention needs none."""
    return keys - keys[:, :, :1]


@pytest.mark.parametrize("form", ["parallel", "recurrent"])
def test_gradients(case, form):
    model, _, memory, io = case
    valid = torch.arange(LENGTH) < io["lengths"][:, None]
    x = io["x"].clone().requires_grad_()
    if memory:
        memory = (memory[0].clone().requires_grad_(), memory[1])
    if form == "parallel":
        y = model(x, io["lengths"], *memory)
    else:
        states, outputs = model.start(2, *memory), []
        for number in range(LENGTH):
            output, states = model.step(x[:, number], states)
            outputs.append(output)
        y = torch.stack(outputs, 1)
    (y * io["loss_weight"])[valid].sum().backward()
    close(x.grad, io["x_grad"], relative=1e-5)
    if memory:
        close(memory[0].grad, io["memory_grad"], relative=1e-5)
    checked = [name for name in io if name.startswith("param_grad.")]
    for name in checked:
        parameter = model.get_parameter(own_name(name.removeprefix("param_grad.")))
        close(parameter.grad, io[name], relative=1e-4)
    assert checked or memory
