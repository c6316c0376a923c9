"""The private step: ``lift(noise(sum(clip(project(per-example gradients)))))``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raydp._workers import ALONE, Workers
from raydp.geometry import Geometry
from raydp.geometry.base import MeasuredGeometry
from raydp.geometry.clipping import clip, clip_factors, scale_factors
from raydp.privacy.mechanism import GRID_CELLS, Phase
from raydp.privacy.noise import NoiseKey

# So many entries at a time: the three passes over them then run in the processor's caches.
_ENTRIES = 2**17
_LARGEST = 2.0**53  # float64 counts up to here; no sum comes near
_LARGEST_ENTRY = 2**30  # in units; beyond, sums are taken in int64
_CUT_OFF = 2.0**-12  # share of C that the grid of a measured sum may cost
# A measured sum gives up so much of C at most; else every example is projected.
_LARGEST_MARGIN = 0.05


def clipped_sum(coordinates: Sequence[Tensor], clip_norm: float, spacing: float) -> list[Tensor]:
    """The exact sum over the examples of their clipped vectors on the grid of multiples of ``spacing``.

    Each example's vector is clipped to norm ``clip_norm`` and cut off towards zero to the grid, which can only shorten
    it. The sum is one of integers, so it is exact: neither order nor micro-batches change it, and an example changes it
    by a vector of norm at most ``clip_norm / spacing`` and by nothing else.

    Args:
        coordinates: tensors (n, size) that together hold one vector an example.
        clip_norm: C > 0.
        spacing: a power of two, at least C / GRID_CELLS.

    Returns:
        int64 tensors (size,), in units of ``spacing``.
    """
    factors, finite = clip_factors(coordinates, clip_norm, unit=spacing)
    if not bool(finite.all()):  # such an example contributes zero, as in :func:`clip`
        coordinates = [part.where(finite.unsqueeze(1), 0.0) for part in coordinates]
    return [_units(part, factors, GRID_CELLS) for part in coordinates]


def _units(part: Tensor, factors: Tensor, largest: float) -> Tensor:
    """Sum over the rows of trunc(part · factor), int64 (size,); no entry exceeds ``largest`` in size."""
    total = torch.zeros(part.shape[1], dtype=torch.int64, device=part.device)
    kind = torch.int32 if largest <= _LARGEST_ENTRY else torch.int64
    count = int(2**31 // largest) - 1 if kind == torch.int32 else len(part)  # int32 holds the sum of so many
    for rows, scales in zip(part.split(count), factors.unsqueeze(1).split(count), strict=True):
        width = max(1, _ENTRIES // len(rows)) if rows.is_cpu else max(1, part.shape[1])
        for found, columns in zip(total.split(width), rows.split(width, dim=1), strict=True):
            found += (columns * scales).to(kind).sum(dim=0, dtype=kind)  # the conversion cuts off
    return total


@dataclass(frozen=True, kw_only=True)
class _GradientGrid:
    """The grid on which a measured geometry's gradients are summed before the sum is projected.

    An example's share of the projected sum must stay within C although its gradient is cut off to this grid, and the
    projected sum to that of the noise. So each is clipped to C·(1 - margin), where the margin covers

    * the cut-off: ‖M e‖ <= largest stretch · √d · unit for an error e of less than one unit an entry;
    * the rounding of both neighbours' sums to the noise's grid: √d · spacing in all;
    * float32 in scaling a gradient, whose length is at most C over the smallest stretch, and float64 in projecting the
      sums of fewer than 2^20 examples by products of fewer than 2^9 terms: ratio of the stretches · 2^-22 in all.

    Attributes:
        unit: a power of two.
        margin: in [0, _LARGEST_MARGIN].
        largest: size of the largest entry in units.
    """

    unit: float
    margin: float
    largest: float

    @classmethod
    def of(cls, geometry: MeasuredGeometry, *, clip_norm: float, spacing: float) -> _GradientGrid | None:
        """None where the stretches differ so much that the margin would be felt."""
        smallest, largest = geometry.stretches
        if not (0 < smallest <= largest < math.inf):
            return None
        root = math.sqrt(sum(geometry.parameter_sizes))
        _, exponent = math.frexp(clip_norm * _CUT_OFF / (largest * root))
        unit = math.ldexp(1.0, exponent - 1)  # at most the share _CUT_OFF of C
        margin = _CUT_OFF + root * spacing / clip_norm + largest / smallest * 2.0**-22
        if margin > _LARGEST_MARGIN:
            return None
        return cls(unit=unit, margin=margin, largest=1.01 * clip_norm / (smallest * unit))


@dataclass(kw_only=True)
class ClippedSum:
    """Accumulates the clipped sum of one *logical* batch over its micro-batches and workers.

    Both are performance knobs: each example is projected, clipped and put on the grid alone, and the integers
    are added exactly, so how the batch is cut changes nothing.

    With a :class:`~raydp.geometry.base.MeasuredGeometry` the sum is that of the gradients, each scaled by C over the
    length of its coordinates and put on a grid of its own, so that it is exact; it is projected in float64 and put on
    the noise's grid once, at the end. The map is linear, so an example's share of the projected sum is its clipped
    coordinates all the same, up to what :class:`_GradientGrid` gives up of C for the rounding.

    Attributes:
        spacing: of the grid, a power of two.
        total: int64, flat tensors: coordinates in units of ``spacing``, or gradients of a measured geometry in units
            of its grid.
    """

    geometry: Geometry
    clip_norm: float
    spacing: float
    device: str = "cpu"
    total: list[Tensor] = field(init=False)
    _measured: MeasuredGeometry | None = field(init=False)
    _grid: _GradientGrid | None = field(init=False)

    def __post_init__(self) -> None:
        self._measured, self._grid = None, None
        if isinstance(self.geometry, MeasuredGeometry):
            self._grid = _GradientGrid.of(self.geometry, clip_norm=self.clip_norm, spacing=self.spacing)
            self._measured = None if self._grid is None else self.geometry
        sizes = self.geometry.sizes if self._measured is None else self._measured.parameter_sizes
        self.total = [torch.zeros(size, dtype=torch.int64, device=self.device) for size in sizes]

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add the examples whose per-example gradients (n, *shape) are given."""
        if len(gradients[0]) == 0:
            return
        if self._measured is None or self._grid is None:
            parts = clipped_sum(self.geometry.project(gradients), self.clip_norm, self.spacing)
        else:
            within = self.clip_norm * (1 - self._grid.margin)
            factors, finite = scale_factors(
                self._measured.lengths(gradients), within, gradients[0].dtype, unit=self._grid.unit
            )
            rows = [gradient.flatten(1) for gradient in gradients]
            if not bool(finite.all()):  # 0 · inf is no zero
                rows = [part.where(finite.unsqueeze(1), 0.0) for part in rows]
            parts = [_units(part, factors, self._grid.largest) for part in rows]
        for total, part in zip(self.total, parts, strict=True):
            total += part

    def units(self) -> list[Tensor]:
        """The clipped sum in the geometry's coordinates, int64, flat, in units of ``spacing``."""
        if self._grid is None:
            return self.total
        rows = self.geometry.project([total.double().unsqueeze(0) * self._grid.unit for total in self.total])
        return [(part.squeeze(0) / self.spacing).round().clamp(-_LARGEST, _LARGEST).to(torch.int64) for part in rows]

    def coordinates(self) -> list[Tensor]:
        """:meth:`units` as float64 numbers, flat."""
        return [part.double() * self.spacing for part in self.units()]


def release(clipped: ClippedSum, *, phase: Phase, step: int, key: NoiseKey) -> list[Tensor]:
    """Add the step's one noise draw to the sum and divide by the *expected* batch size.

    The draw is addressed by (phase, step, tensor): replaying a step gives the same noise, and no worker, micro-batch or
    augmentation draws its own. It is added to an empty batch too. The realised batch size is private and never enters.
    Sum and noise are integers in units of the grid's spacing, so that adding them is exact and the result is the
    rounding of the Gaussian mechanism's (:mod:`raydp.privacy.noise`); what follows is post-processing.

    Args:
        clipped: the logical batch's clipped sum, on the phase's grid.
        phase: gives sigma, C, B and the grid.
        step: the logical step within the phase.
        key: the secret key of this phase.

    Returns:
        The released average for each tensor of the geometry, flat (size,), of torch's default type.
    """
    # Rounded up, so that no rounding of sigma·C takes from the noise. Dividing by a power of two is exact.
    scale = math.nextafter(phase.noise_std, math.inf) / phase.spacing
    released = []
    for index, total in enumerate(clipped.units()):
        noise = key.rounded_normals(total.numel(), scale, "noise", phase.name, step, index)
        noisy = (total + torch.from_numpy(noise).to(total.device)).double()
        released.append((noisy * (phase.spacing / phase.batch_size)).to(torch.get_default_dtype()))
    return released


def private_gradient(
    batches: Iterable[Sequence[Tensor]],
    *,
    geometry: Geometry,
    phase: Phase,
    step: int,
    key: NoiseKey,
    device: str = "cpu",
    workers: Workers = ALONE,
) -> list[Tensor]:
    """One private step over micro-batches of per-example gradients: project, clip, sum, noise, divide.

    Every worker brings the micro-batches of its own part of the logical batch, possibly none. Their sums are added,
    which is exact, before the one noise draw; each worker computes the same release.

    Returns:
        The released coordinates (before ``geometry.lift``); everything computed from them is post-processing.
    """
    total = ClippedSum(geometry=geometry, clip_norm=phase.clip_norm, spacing=phase.spacing, device=device)
    for gradients in batches:
        total.add(gradients)
    workers.sum(total.total)
    return release(total, phase=phase, step=step, key=key)


__all__ = ["ClippedSum", "clip", "clipped_sum", "private_gradient", "release"]
