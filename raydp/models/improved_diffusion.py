"""Checkpoints of Nichol & Dhariwal's code (openai/improved-diffusion, MIT) as diffusers models.

Their network numbers its blocks in the order in which they run; diffusers names levels. The convolutions of the
attention projections have a kernel of one position, so they are linear layers; their ``qkv`` has the three parts
within each head, where :class:`raydp.models.unet.FusedAttention` has the heads within each part.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from raydp.errors import CorruptFile
from raydp.models.unet import IMAGENET64, UNetShape, build_unet

_RESIDUAL = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_ATTENTION = {"norm": "norm", "qkv": "qkv", "proj_out": "proj"}


@dataclass(frozen=True)
class _Pair:
    """A layer in their checkpoint and in the diffusers model."""

    theirs: str
    ours: str


def load_improved_diffusion(path: str | os.PathLike[str], shape: UNetShape = IMAGENET64) -> nn.Module:
    """The diffusers model of a checkpoint, float32, on the CPU.

    The timesteps that the network was trained with are those of its schedule in units of 1000/T (their
    ``rescale_timesteps``): for the 4,000 steps of the published checkpoint, step t is passed as t/4.

    Args:
        path: of the checkpoint; it is read as tensors only (nothing in it is executed).
        shape: of the network.

    Raises:
        CorruptFile: the file cannot be read, or has another layout; the message names the first tensor that differs.
        MissingPackage: diffusers is not installed.
    """
    path = Path(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptFile(f"{path} is not a readable checkpoint: {first}. Fetch it again.") from error
    if not isinstance(state, Mapping):
        raise CorruptFile(f"{path} holds a {type(state).__name__}, not named tensors. Fetch it again.")
    return convert(state, shape, where=str(path))


def convert(state: Mapping[str, Tensor], shape: UNetShape, *, where: str = "the checkpoint") -> nn.Module:
    """The diffusers model with the tensors of ``state`` (their names and shapes).

    Raises:
        CorruptFile: as :func:`load_improved_diffusion`; ``where`` begins the message.
    """
    with torch.device("meta"):
        unet = build_unet(shape)
    wanted = unet.state_dict()
    converted: dict[str, Tensor] = {}
    used = set()
    for pair in _pairs(shape, wanted):
        for kind in ("weight", "bias"):
            theirs, ours = f"{pair.theirs}.{kind}", f"{pair.ours}.{kind}"
            size = tuple(wanted[ours].shape)
            is_projection = pair.ours.endswith((".qkv", ".proj")) and kind == "weight"
            expected = (*size, 1) if is_projection else size
            found = state.get(theirs)
            if not isinstance(found, Tensor) or tuple(found.shape) != expected:
                what = "is not there" if found is None else f"has shape {tuple(getattr(found, 'shape', ()))}"
                raise CorruptFile(
                    f"{where} has another layout: its tensor {theirs} {what}, and should have shape {expected}. Give "
                    "the shape of the network that it was saved from."
                )
            tensor = found.float().reshape(size)
            if pair.ours.endswith(".qkv"):
                tensor = _parts_outermost(tensor, shape.heads)
            converted[ours] = tensor.clone()
            used.add(theirs)
    for name in state:
        if name not in used:
            raise CorruptFile(
                f"{where} has another layout: its tensor {name} is not part of the network. Give the shape of the "
                "network that it was saved from."
            )
    unet.load_state_dict(converted, strict=True, assign=True)
    return unet


def _parts_outermost(rows: Tensor, heads: int) -> Tensor:
    """Rows ordered (head, part, channel) to (part, head, channel); parts are query, key and value."""
    return rows.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def _pairs(shape: UNetShape, wanted: Mapping[str, Tensor]) -> Iterator[_Pair]:
    """Every layer, in the order of their network."""
    levels = len(shape.multipliers)
    yield _Pair("time_embed.0", "time_embedding.linear_1")
    yield _Pair("time_embed.2", "time_embedding.linear_2")
    yield _Pair("input_blocks.0.0", "conv_in")
    number = 1
    for level, size in enumerate(shape.sizes):
        block = f"down_blocks.{level}"
        for index in range(shape.residual_blocks):
            yield from _residual(f"input_blocks.{number}.0", f"{block}.resnets.{index}", wanted)
            if size in shape.attention_sizes:
                yield from _attention(f"input_blocks.{number}.1", f"{block}.attentions.{index}")
            number += 1
        if level < levels - 1:
            yield _Pair(f"input_blocks.{number}.0.op", f"{block}.downsamplers.0.conv")
            number += 1
    yield from _residual("middle_block.0", "mid_block.resnets.0", wanted)
    yield from _attention("middle_block.1", "mid_block.attentions.0")
    yield from _residual("middle_block.2", "mid_block.resnets.1", wanted)
    number = 0
    for level, size in enumerate(reversed(shape.sizes)):
        block = f"up_blocks.{level}"
        for index in range(shape.residual_blocks + 1):
            place = 0
            yield from _residual(f"output_blocks.{number}.{place}", f"{block}.resnets.{index}", wanted)
            if size in shape.attention_sizes:
                place += 1
                yield from _attention(f"output_blocks.{number}.{place}", f"{block}.attentions.{index}")
            if level < levels - 1 and index == shape.residual_blocks:
                place += 1
                yield _Pair(f"output_blocks.{number}.{place}.conv", f"{block}.upsamplers.0.conv")
            number += 1
    yield _Pair("out.0", "conv_norm_out")
    yield _Pair("out.2", "conv_out")


def _residual(theirs: str, ours: str, wanted: Mapping[str, Tensor]) -> Iterator[_Pair]:
    for name, our_name in _RESIDUAL.items():
        if f"{ours}.{our_name}.weight" in wanted:  # blocks that keep the number of channels have no shortcut layer
            yield _Pair(f"{theirs}.{name}", f"{ours}.{our_name}")


def _attention(theirs: str, ours: str) -> Iterator[_Pair]:
    for name, our_name in _ATTENTION.items():
        yield _Pair(f"{theirs}.{name}", f"{ours}.{our_name}")
