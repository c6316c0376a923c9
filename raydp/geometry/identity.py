"""DP-SGD's geometry: clip and noise the gradient as it is (Abadi et al. 2016, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Every entry of every parameter is a coordinate.

    Attributes:
        sizes: number of entries of each parameter tensor.

    >>> import torch
    >>> from raydp.geometry import Identity
    >>> [part.shape for part in Identity(sizes=(6,)).project([torch.ones(4, 2, 3)])]
    [torch.Size([4, 6])]
    """

    sizes: tuple[int, ...]

    @property
    def support(self) -> None:
        return None

    def project(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        return [gradient.flatten(1) for gradient in gradients]

    def lift(self, released: Sequence[Tensor]) -> list[Tensor]:
        return list(released)

    def select(self, index: int, entries: Tensor) -> Tensor:
        return entries.flatten(1)

    def weights(self, index: int, shape: tuple[int, int]) -> None:
        return None
