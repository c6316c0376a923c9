"""Augmentation multiplicity: several random views of an example, whose gradients are averaged before clipping.

De et al., "Unlocking high-accuracy differentially private image classification through scale", 2022. One example
stays one clipped vector, so sensitivity and noise do not change. The random numbers of a logical batch are drawn at
once and can be sliced, so that micro-batches see the same views as one large batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from raydp import _validate
from raydp._randomness import Randomness
from raydp.errors import InvalidValue

KINDS = ("none", "crop", "crop_flip")


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How an example is varied.

    Attributes:
        kind: ``none``; ``crop``, a random window of the image padded with zeros; ``crop_flip``, a crop mirrored
            left-right with probability 1/2.
        multiplicity: K >= 1, the number of views of each example.
        padding: pixels of zeros on each side before the crop.
    """

    kind: str = "none"
    multiplicity: int = 1
    padding: int = 4

    def __post_init__(self) -> None:
        _validate.one_of("augmentation.kind", self.kind, KINDS)
        _validate.integer("augmentation.multiplicity", self.multiplicity, low=1)
        _validate.integer("augmentation.padding", self.padding, low=0)
        if self.kind == "none" and self.multiplicity > 1:
            raise InvalidValue(
                "augmentation.multiplicity",
                self.multiplicity,
                "must be 1 when augmentation.kind is 'none': equal copies cost time and change nothing",
                "Choose kind = 'crop' or 'crop_flip', or multiplicity = 1.",
            )


@dataclass(frozen=True)
class AugmentationDraw:
    """The random numbers of n examples with K views each; slicing it slices the examples.

    Attributes:
        top, left: int64 (n, K), the corner of each crop in the padded image, in pixels.
        flip: bool (n, K).
        padding: as in the augmentation; 0 for kind ``none``.
    """

    top: np.ndarray
    left: np.ndarray
    flip: np.ndarray
    padding: int

    def __len__(self) -> int:
        return len(self.top)

    def __getitem__(self, examples: slice) -> AugmentationDraw:
        return AugmentationDraw(self.top[examples], self.left[examples], self.flip[examples], self.padding)


def draw(augmentation: Augmentation, n: int, generator: Randomness) -> AugmentationDraw:
    """The random numbers for n examples, in one call of the generator (none at all for kind ``none``)."""
    shape = (n, augmentation.multiplicity)
    if augmentation.kind == "none":
        return AugmentationDraw(np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, bool), 0)
    uniforms = generator.random((*shape, 3))
    corners = np.floor(uniforms * (2 * augmentation.padding + 1)).astype(np.int64)
    flip = uniforms[..., 2] < 0.5 if augmentation.kind == "crop_flip" else np.zeros(shape, bool)
    return AugmentationDraw(corners[..., 0], corners[..., 1], flip, augmentation.padding)


def apply(images: Tensor, parameters: AugmentationDraw) -> Tensor:
    """The views of a batch.

    Args:
        images: (n, C, H, W), of any dtype. The padding is 0 in their scale: the mean colour after normalisation.
        parameters: of the same n examples.

    Returns:
        (n·K, C, H, W), the K views of one example next to each other.

    Raises:
        InvalidValue: the numbers of examples differ.
    """
    if len(images) != len(parameters):
        raise InvalidValue(
            "parameters", len(parameters), f"must belong to the {len(images)} images given", "Slice both alike."
        )
    n, copies = parameters.top.shape
    channels, height, width = images.shape[1:]
    if parameters.padding == 0 and not parameters.flip.any():
        return images.repeat_interleave(copies, dim=0) if copies > 1 else images
    padding, device = parameters.padding, images.device
    padded = functional.pad(images, (padding,) * 4).permute(0, 2, 3, 1)
    top, left, flip = (
        torch.from_numpy(x).to(device)[..., None] for x in (parameters.top, parameters.left, parameters.flip)
    )
    rows = top + torch.arange(height, device=device)
    columns = torch.arange(width, device=device)
    columns = left + torch.where(flip, width - 1 - columns, columns)
    example = torch.arange(n, device=device)[:, None, None, None]
    views = padded[example, rows[..., :, None], columns[..., None, :]]  # (n, K, H, W, C)
    return views.permute(0, 1, 4, 2, 3).reshape(n * copies, channels, height, width)


def augment(images: Tensor, augmentation: Augmentation, generator: Randomness) -> Tensor:
    """:func:`draw` and :func:`apply` in one: (n, C, H, W) to (n·K, C, H, W)."""
    return apply(images, draw(augmentation, len(images), generator))
