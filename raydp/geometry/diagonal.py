"""AdaDPS's geometry: each coordinate divided by its public root mean square before the clipping (arXiv 2202.05963)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raydp import _validate
from raydp.errors import Diverged, InvalidValue
from raydp.geometry.kfac import example_gradients

_BATCH = 64  # public examples at a time: bounds the memory of their gradients


@dataclass(frozen=True, kw_only=True)
class Diagonal:
    """Coordinates g / A. What is released is the step: there is no second division.

    So the noise of the update is isotropic, and each coordinate moves by its gradient in units of its usual size.

    Attributes:
        scales: A > 0 for each parameter tensor, flat (size,); from public data and released weights only.

    >>> import torch
    >>> from raydp.geometry import Diagonal
    >>> Diagonal(scales=(torch.tensor([1.0, 2.0]),)).project([torch.tensor([[4.0, 4.0]])])
    [tensor([[4., 2.]])]
    """

    scales: tuple[Tensor, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(scale.numel() for scale in self.scales)

    @property
    def support(self) -> None:
        return None

    def project(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        return [gradient.flatten(1) / scale for gradient, scale in zip(gradients, self.scales, strict=True)]

    def lift(self, released: Sequence[Tensor]) -> list[Tensor]:
        return list(released)


def root_mean_squares(
    model: nn.Module,
    images: Tensor,
    *,
    damping: float,
    generator: torch.Generator,
    fisher_labels: str = "model",
    labels: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """A = sqrt(E[g²]) + ε₀ of each coordinate, flat, one tensor a parameter, over public per-example gradients.

    Args:
        model: in which no layer mixes examples; its weights may be private outputs.
        images: (n, C, H, W), n >= 1, public.
        damping: ε₀ > 0, which bounds how much a coordinate without public gradient is stretched.
        generator, fisher_labels, labels: as for :func:`raydp.geometry.kfac.estimate_curvature`.

    Raises:
        Diverged: a gradient is not finite. InvalidValue: no example.
    """
    _validate.positive("damping", damping)
    if len(images) == 0:
        raise InvalidValue("public", 0, "must hold at least one example", "Name a public set that is not empty.")
    totals = [p.new_zeros(p.numel()) for p in model.parameters() if p.requires_grad]
    for start in range(0, len(images), _BATCH):
        piece = slice(start, start + _BATCH)
        gradients = example_gradients(
            model,
            images[piece],
            generator=generator,
            fisher_labels=fisher_labels,
            labels=None if labels is None else labels[piece],
        )
        for total, gradient in zip(totals, gradients, strict=True):
            total += gradient.detach().flatten(1).square().sum(dim=0)
    if not all(bool(torch.isfinite(total).all()) for total in totals):
        raise Diverged("the gradients of public examples are not finite")
    return tuple((total / len(images)).sqrt() + damping for total in totals)
