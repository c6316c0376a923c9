"""TP-TopK's geometry: clip and noise only the coordinates of a support (arXiv 2606.04375, Algorithm 1, phase 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from raydp import _validate


@dataclass(frozen=True, kw_only=True)
class Support:
    """Coordinates are the entries listed in ``indices``; masking precedes clipping, so the sensitivity is C for any k.

    Noise drawn on the support alone has the same law as a dense draw that is masked afterwards, and costs k, not d.

    Attributes:
        indices: for each parameter tensor the sorted flat indices (int64) of its active entries; may be empty.

    >>> import torch
    >>> from raydp.geometry import Support
    >>> support = Support(indices=(torch.tensor([0, 2]),))
    >>> support.sizes, support.project([torch.tensor([[1.0, 2.0, 3.0]])])
    ((2,), [tensor([[1., 3.]])])
    """

    indices: tuple[Tensor, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(index.numel() for index in self.indices)

    @property
    def support(self) -> tuple[Tensor, ...]:
        return self.indices

    def project(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        return [self.select(index, gradient) for index, gradient in enumerate(gradients)]

    def lift(self, released: Sequence[Tensor]) -> list[Tensor]:
        return list(released)

    def select(self, index: int, entries: Tensor) -> Tensor:
        return entries.flatten(1)[:, self.indices[index]]

    def weights(self, index: int, shape: tuple[int, int]) -> Tensor | None:
        active = self.indices[index]
        if active.numel() == math.prod(shape):
            return None
        if index not in self._masks:
            self._masks[index] = active.new_zeros(math.prod(shape), dtype=torch.get_default_dtype())
            self._masks[index][active] = 1.0
        return self._masks[index].view(shape)

    @cached_property
    def _masks(self) -> dict[int, Tensor]:
        return {}


def support_size(active_ratio: float, coordinates: int) -> int:
    """k = floor(rho·d), at least 1.

    >>> from raydp.geometry import support_size
    >>> support_size(0.29, 100)
    29
    """
    ratio = _validate.between("active_ratio", active_ratio, 0, 1, low_open=True)
    # 1e-9 guards products such as 0.29·100 = 28.999999999999996, whose floor would lose a coordinate.
    return max(1, math.floor(ratio * coordinates + 1e-9))


def top_k(scores: Tensor, k: int, sizes: Sequence[int]) -> Support:
    """The k largest scores, global over the flattened parameters, ties broken by position.

    Args:
        scores: (d,), computed from released quantities or public randomness only.
        k: number of coordinates, 1 <= k <= d.
        sizes: number of entries of each parameter tensor; they sum to d.

    >>> import torch
    >>> from raydp.geometry import top_k
    >>> top_k(torch.tensor([0.1, 0.9, 0.5, 0.7]), 2, [2, 2]).indices
    (tensor([1]), tensor([1]))
    """
    _validate.integer("k", k, low=1, high=scores.numel())
    order = torch.argsort(scores, descending=True, stable=True)  # stable: equal scores stay in position order
    active = torch.zeros(scores.numel(), dtype=torch.bool)
    active[order[:k]] = True
    return Support(indices=tuple(part.nonzero().flatten() for part in active.split(list(sizes))))
