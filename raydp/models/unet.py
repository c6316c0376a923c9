"""The U-Net of Nichol & Dhariwal 2021 (arXiv 2102.09672), as a diffusers model whose attention has fused projections.

diffusers keeps three projections (query, key, value) an attention block; the published network has one ``qkv``.
Low-rank updates of the two differ (one factor against three), so the blocks are replaced by :class:`FusedAttention`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from raydp import _validate
from raydp.errors import InvalidValue, MissingPackage


@dataclass(frozen=True, kw_only=True)
class UNetShape:
    """Everything that decides the tensors of a U-Net.

    Attributes:
        image_size: side of the square images, in pixels.
        image_channels: of the images.
        channels: of the first level; also the width of the embedding of a timestep.
        residual_blocks: at each level on the way down; one more on the way up.
        multipliers: channels of each level, in units of ``channels``; each level halves the side.
        attention_sizes: sides, in pixels, of the levels that have an attention block after each residual block. The
            middle has one in any case.
        heads: of each attention block.
        groups: of each GroupNorm; they divide ``channels``.
        learned_variance: twice as many output channels, the second half for the variance.

    Raises:
        InvalidValue: a size is below 1, does not divide, or an attention size is of no level.
    """

    image_size: int
    image_channels: int
    channels: int
    residual_blocks: int
    multipliers: tuple[int, ...]
    attention_sizes: tuple[int, ...]
    heads: int
    groups: int = 32
    learned_variance: bool = False

    def __post_init__(self) -> None:
        for name in ("image_size", "image_channels", "channels", "residual_blocks", "heads", "groups"):
            _validate.integer(name, getattr(self, name), low=1)
        if not self.multipliers:
            raise InvalidValue("multipliers", self.multipliers, "must name at least one level", "Write (1, 2), say.")
        if self.image_size % 2 ** (len(self.multipliers) - 1):
            raise InvalidValue(
                "image_size",
                self.image_size,
                f"must be a multiple of {2 ** (len(self.multipliers) - 1)}, as each level but the first halves it",
                "Resize the images, or use fewer levels.",
            )
        if self.channels % self.groups:
            raise InvalidValue("groups", self.groups, f"must divide channels = {self.channels}", "Choose a divisor.")
        for size in self.attention_sizes:
            if size not in self.sizes:
                raise InvalidValue(
                    "attention_sizes", size, f"must be the side of a level: {self.sizes}", "Choose among them."
                )
        for multiplier in self.multipliers:
            if self.channels * multiplier % self.heads:
                raise InvalidValue(
                    "heads", self.heads, f"must divide {self.channels * multiplier} channels", "Choose a divisor."
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Side of the feature maps at each level."""
        return tuple(self.image_size // 2**level for level in range(len(self.multipliers)))

    @property
    def output_channels(self) -> int:
        return self.image_channels * (2 if self.learned_variance else 1)


#: The network of the published checkpoint ``imagenet64_uncond_100M_1500K.pt`` (121,063,942 parameters).
IMAGENET64 = UNetShape(
    image_size=64,
    image_channels=3,
    channels=128,
    residual_blocks=3,
    multipliers=(1, 2, 3, 4),
    attention_sizes=(16, 8),
    heads=4,
    learned_variance=True,
)


class FusedAttention(nn.Module):
    """Self-attention among the positions of a feature map, with one projection ``qkv`` and one ``proj``, and a
    residual.

    The outputs of ``qkv`` are ordered (query, key, value), heads within each: what diffusers' three projections give
    one after the other.

    Args:
        channels: c; ``qkv`` maps c to 3c, ``proj`` c to c.
        heads: divides ``channels``.
        groups: of the GroupNorm before ``qkv``.
    """

    def __init__(self, channels: int, *, heads: int, groups: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(groups, channels, eps=1e-5)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)

    def forward(self, hidden_states: Tensor, temb: Tensor | None = None) -> Tensor:
        """(n, c, h, w) to the same. ``temb`` is what diffusers passes to every attention block; it is not used."""
        n, channels, height, width = hidden_states.shape
        positions = self.norm(hidden_states).flatten(2).transpose(1, 2)  # (n, h·w, c)
        query, key, value = (
            part.unflatten(2, (self.heads, channels // self.heads)).transpose(1, 2)
            for part in self.qkv(positions).chunk(3, dim=2)
        )
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(n, height * width, channels)
        return hidden_states + self.proj(mixed).transpose(1, 2).reshape(n, channels, height, width)


def build_unet(shape: UNetShape) -> nn.Module:
    """A diffusers ``UNet2DModel`` of this shape with freshly drawn weights, attention fused.

    Called as ``model(images, timesteps).sample``. Inside ``torch.device("meta")`` it costs no memory.

    Raises:
        MissingPackage: diffusers is not installed.
    """
    unet_class = diffusers("build a U-Net").UNet2DModel
    kinds = ["Attn" if size in shape.attention_sizes else "" for size in shape.sizes]
    unet: nn.Module = unet_class(
        sample_size=shape.image_size,
        in_channels=shape.image_channels,
        out_channels=shape.output_channels,
        down_block_types=tuple(f"{kind}DownBlock2D" for kind in kinds),
        up_block_types=tuple(f"{kind}UpBlock2D" for kind in reversed(kinds)),
        block_out_channels=tuple(shape.channels * multiplier for multiplier in shape.multipliers),
        layers_per_block=shape.residual_blocks,
        norm_num_groups=shape.groups,
        attn_norm_num_groups=shape.groups,
        attention_head_dim=None,  # replaced below; diffusers can fix the width of a head, not their number
        resnet_time_scale_shift="scale_shift",
        freq_shift=0,
        flip_sin_to_cos=True,
    )
    for blocks in (unet.down_blocks, [unet.mid_block], unet.up_blocks):
        for block in blocks:  # type: ignore[union-attr]
            attentions: Any = getattr(block, "attentions", [])
            for index, attention in enumerate(attentions):
                attentions[index] = FusedAttention(attention.to_q.in_features, heads=shape.heads, groups=shape.groups)
    return unet


def diffusers(purpose: str) -> Any:
    """The diffusers package, imported when it is needed first.

    Raises:
        MissingPackage: it is not installed.
    """
    try:
        return importlib.import_module("diffusers")
    except ImportError as error:
        raise MissingPackage("diffusers", purpose=purpose, extra="diffusion") from error
