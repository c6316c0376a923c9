"""The network of Nichol & Dhariwal 2021 written straight from its description, on tensors under the published names."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from raydp.models.unet import UNetShape

State = Mapping[str, Tensor]


def residual_block(state: State, name: str, inputs: Tensor, embedding: Tensor, groups: int) -> Tensor:
    hidden = F.silu(_norm(state, f"{name}.in_layers.0", inputs, groups))
    hidden = _convolution(state, f"{name}.in_layers.2", hidden)
    projected = F.linear(F.silu(embedding), state[f"{name}.emb_layers.1.weight"], state[f"{name}.emb_layers.1.bias"])
    scale, shift = projected[:, :, None, None].chunk(2, dim=1)
    hidden = _norm(state, f"{name}.out_layers.0", hidden, groups) * (1 + scale) + shift
    hidden = _convolution(state, f"{name}.out_layers.3", F.silu(hidden))
    if f"{name}.skip_connection.weight" in state:
        inputs = _convolution(state, f"{name}.skip_connection", inputs)
    return inputs + hidden


def attention_block(state: State, name: str, inputs: Tensor, heads: int, groups: int) -> Tensor:
    """One head at a time: rows 3·width·h … 3·width·(h+1) of qkv are the query, key and value of head h."""
    channels, width = inputs.shape[1], inputs.shape[1] // heads
    positions = _norm(state, f"{name}.norm", inputs, groups).flatten(2)
    qkv = F.conv1d(positions, state[f"{name}.qkv.weight"], state[f"{name}.qkv.bias"])
    mixed = []
    for head in range(heads):
        query, key, value = qkv[:, 3 * width * head : 3 * width * (head + 1)].split(width, dim=1)
        weights = torch.softmax(query.transpose(1, 2) @ key / math.sqrt(width), dim=2)
        mixed.append(value @ weights.transpose(1, 2))
    projected = F.conv1d(torch.cat(mixed, dim=1), state[f"{name}.proj_out.weight"], state[f"{name}.proj_out.bias"])
    return inputs + projected.view(-1, channels, *inputs.shape[2:])


def unet(state: State, shape: UNetShape, images: Tensor, timesteps: Tensor) -> Tensor:
    half = shape.channels // 2
    angles = timesteps[:, None].float() * torch.exp(-math.log(10000) * torch.arange(half) / half)
    embedding = torch.cat([angles.cos(), angles.sin()], dim=1)
    embedding = F.linear(embedding, state["time_embed.0.weight"], state["time_embed.0.bias"])
    embedding = F.linear(F.silu(embedding), state["time_embed.2.weight"], state["time_embed.2.bias"])

    def block(name: str, hidden: Tensor) -> Tensor:
        place = 0
        while any(key.startswith(f"{name}.{place}.") for key in state):
            here = f"{name}.{place}"
            if f"{here}.in_layers.0.weight" in state:
                hidden = residual_block(state, here, hidden, embedding, shape.groups)
            elif f"{here}.qkv.weight" in state:
                hidden = attention_block(state, here, hidden, shape.heads, shape.groups)
            elif f"{here}.op.weight" in state:
                hidden = _convolution(state, f"{here}.op", hidden, stride=2)
            elif f"{here}.conv.weight" in state:
                hidden = _convolution(state, f"{here}.conv", F.interpolate(hidden, scale_factor=2, mode="nearest"))
            else:
                hidden = _convolution(state, here, hidden)
            place += 1
        return hidden

    kept, hidden, number = [], images, 0
    while any(key.startswith(f"input_blocks.{number}.") for key in state):
        hidden = block(f"input_blocks.{number}", hidden)
        kept.append(hidden)
        number += 1
    hidden = block("middle_block", hidden)
    for number in range(len(kept)):
        hidden = block(f"output_blocks.{number}", torch.cat([hidden, kept.pop()], dim=1))
    return _convolution(state, "out.2", F.silu(_norm(state, "out.0", hidden, shape.groups)))


def random_checkpoint(shape: UNetShape, *, device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
    """Tensors of the published names and shapes, at random."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}

    def add(name: str, *size: int) -> None:
        for kind, dims in (("weight", size), ("bias", size[:1])):
            full = (
                torch.empty(dims, device="meta") if device == "meta" else torch.randn(dims, generator=generator) * 0.2
            )
            state[f"{name}.{kind}"] = full

    def residual(name: str, inputs: int, outputs: int) -> None:
        add(f"{name}.in_layers.0", inputs)
        add(f"{name}.in_layers.2", outputs, inputs, 3, 3)
        add(f"{name}.emb_layers.1", 2 * outputs, width)
        add(f"{name}.out_layers.0", outputs)
        add(f"{name}.out_layers.3", outputs, outputs, 3, 3)
        if inputs != outputs:
            add(f"{name}.skip_connection", outputs, inputs, 1, 1)

    def attention(name: str, channels: int) -> None:
        add(f"{name}.norm", channels)
        add(f"{name}.qkv", 3 * channels, channels, 1)
        add(f"{name}.proj_out", channels, channels, 1)

    width = 4 * shape.channels
    add("time_embed.0", width, shape.channels)
    add("time_embed.2", width, width)
    add("input_blocks.0.0", shape.channels, shape.image_channels, 3, 3)
    kept, channels, number, side = [shape.channels], shape.channels, 1, shape.image_size
    for level, multiplier in enumerate(shape.multipliers):
        for _ in range(shape.residual_blocks):
            residual(f"input_blocks.{number}.0", channels, multiplier * shape.channels)
            channels = multiplier * shape.channels
            if side in shape.attention_sizes:
                attention(f"input_blocks.{number}.1", channels)
            kept.append(channels)
            number += 1
        if level < len(shape.multipliers) - 1:
            add(f"input_blocks.{number}.0.op", channels, channels, 3, 3)
            kept.append(channels)
            number, side = number + 1, side // 2
    residual("middle_block.0", channels, channels)
    attention("middle_block.1", channels)
    residual("middle_block.2", channels, channels)
    number = 0
    for level in reversed(range(len(shape.multipliers))):
        for index in range(shape.residual_blocks + 1):
            outputs = shape.multipliers[level] * shape.channels
            residual(f"output_blocks.{number}.0", channels + kept.pop(), outputs)
            channels, place = outputs, 1
            if side in shape.attention_sizes:
                attention(f"output_blocks.{number}.1", channels)
                place = 2
            if level and index == shape.residual_blocks:
                add(f"output_blocks.{number}.{place}.conv", channels, channels, 3, 3)
                side *= 2
            number += 1
    add("out.0", channels)
    add("out.2", shape.output_channels, shape.channels, 3, 3)
    return state


def _norm(state: State, name: str, inputs: Tensor, groups: int) -> Tensor:
    return F.group_norm(inputs, groups, state[f"{name}.weight"], state[f"{name}.bias"])


def _convolution(state: State, name: str, inputs: Tensor, stride: int = 1) -> Tensor:
    weight = state[f"{name}.weight"]
    return F.conv2d(inputs, weight, state[f"{name}.bias"], stride=stride, padding=weight.shape[-1] // 2)
