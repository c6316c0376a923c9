"""The private step: ``lift(noise(sum(clip(project(per-example gradients)))))``."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from raydp._workers import ALONE, Workers
from raydp.geometry import Geometry
from raydp.geometry.base import MeasuredGeometry, SeparableGeometry
from raydp.geometry.clipping import clip, clip_factors, example_norms, scale_factors
from raydp.geometry.rank_one import (
    FACTOR_BITS,
    ExampleGradients,
    RankOne,
    add_clipped_products,
    dense,
    product_unit,
)
from raydp.privacy.mechanism import GRID_CELLS, Phase
from raydp.privacy.noise import NoiseKey
from raydp.training.memory import is_out_of_memory

# So many entries at a time: the three passes over them then run in the processor's caches.
_ENTRIES = 2**17
_DENSE_AT_ONCE = 32  # so many examples' outer products are multiplied out at a time
# A sum of 2^19 outer products may not fit into 64 bits. A Poisson batch of this expected size never comes near.
_LARGEST_BATCH = 2**16
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


def shifted(total: Tensor, bits: int) -> Tensor:
    """Integers divided by 2^bits and rounded to the nearest."""
    return total if bits == 0 else (total + (1 << bits >> 1)).bitwise_right_shift_(bits)


def _pieces(gradients: Sequence[ExampleGradients], count: int) -> Iterator[list[ExampleGradients]]:
    """At most so many examples at a time."""
    for start in range(0, len(gradients[0]), count):
        piece = slice(start, start + count)
        yield [
            RankOne(rows=part.rows[piece], columns=part.columns[piece]) if isinstance(part, RankOne) else part[piece]
            for part in gradients
        ]


def _only(part: ExampleGradients, chosen: Tensor) -> ExampleGradients:
    """Zeros for the examples that are not chosen, (n,)."""
    if isinstance(part, RankOne):
        mask = chosen.unsqueeze(1)
        return RankOne(rows=part.rows.where(mask, 0.0), columns=part.columns.where(mask, 0.0))
    return part.flatten(1).where(chosen.unsqueeze(1), 0.0)


@dataclass(frozen=True, kw_only=True)
class _GradientGrid:
    """The grid on which a measured geometry's gradients are summed before the sum is projected.

    An example's share of the projected sum must stay within C although its gradient is cut off to this grid, and the
    projected sum to that of the noise. So each is clipped to C·(1 - margin), where the margin covers

    * the cut-off: ‖M e‖ <= largest stretch · √d · unit for an error e of less than one unit an entry;
    * the same for outer products, whose grid is finer: largest stretch · √rows · 2^22 · product unit;
    * the rounding of both neighbours' sums to the noise's grid: √d · spacing in all;
    * float32 in scaling a gradient, whose length is at most C over the smallest stretch, and float64 in projecting the
      sums of fewer than 2^18 examples by products of fewer than 2^12 terms: ratio of the stretches · 2^-22 in all.

    Attributes:
        unit: a power of two.
        margin: in [0, _LARGEST_MARGIN].
        largest: size of the largest entry in units.
        product_unit: of the gradients that come as outer products.
    """

    unit: float
    margin: float
    largest: float
    product_unit: float

    @classmethod
    def of(
        cls, geometry: MeasuredGeometry, *, clip_norm: float, spacing: float, product_rows: int = 0
    ) -> _GradientGrid | None:
        """None where the stretches differ so much that the margin would be felt.

        Args:
            product_rows: rows of all matrices whose gradients come as outer products.
        """
        smallest, largest = geometry.stretches
        if not (0 < smallest <= largest < math.inf):
            return None
        root = math.sqrt(sum(geometry.parameter_sizes))
        _, exponent = math.frexp(clip_norm * _CUT_OFF / (largest * root))
        unit = math.ldexp(1.0, exponent - 1)  # at most the share _CUT_OFF of C
        longest = 1.01 * clip_norm / smallest
        fine = product_unit(longest)
        margin = _CUT_OFF + root * spacing / clip_norm + largest / smallest * 2.0**-22
        margin += largest * math.sqrt(product_rows) * fine * 2**FACTOR_BITS / clip_norm
        if margin > _LARGEST_MARGIN:
            return None
        return cls(unit=unit, margin=margin, largest=longest / unit, product_unit=fine)


@dataclass(kw_only=True)
class ClippedSum:
    """Accumulates the clipped sum of one *logical* batch over its micro-batches and workers.

    Both are performance knobs: each example is projected, clipped and put on the grid alone, and the integers
    are added exactly, so how the batch is cut changes nothing.

    With a :class:`~raydp.geometry.base.MeasuredGeometry` the sum is that of the gradients, each scaled by C over the
    length of its coordinates and put on a grid of its own, so that it is exact; it is projected in float64 and put on
    the noise's grid once, at the end. The map is linear, so an example's share of the projected sum is its clipped
    coordinates all the same, up to what :class:`_GradientGrid` gives up of C for the rounding.

    Gradients that come as outer products are summed on a finer grid, exactly too, and their sum is rounded to the
    noise's at the end. With a :class:`~raydp.geometry.base.SeparableGeometry` each example is clipped to C less √d
    spacings for it: the rounding of both neighbours' sums.

    Attributes:
        spacing: of the grid, a power of two.
        shapes: of the matrices whose gradients come as outer products, by the parameter's position; none where the
            geometry does not take them.
        total: int64, flat tensors: coordinates in units of ``spacing``, or gradients of a measured geometry in units
            of its grid; those of outer products are all entries, in units of their grid.
    """

    geometry: Geometry
    clip_norm: float
    spacing: float
    device: str = "cpu"
    shapes: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    total: list[Tensor] = field(init=False)
    _grid: _GradientGrid | None = field(init=False)

    def __post_init__(self) -> None:
        self._grid = None
        if isinstance(self.geometry, SeparableGeometry):
            self.shapes = {index: shape for index, shape in self.shapes.items() if self.geometry.sizes[index]}
        elif not isinstance(self.geometry, MeasuredGeometry):
            self.shapes = {}
        if isinstance(self.geometry, MeasuredGeometry):
            self._grid = _GradientGrid.of(
                self.geometry,
                clip_norm=self.clip_norm,
                spacing=self.spacing,
                product_rows=sum(rows for rows, _ in self.shapes.values()),
            )
            if self._grid is None:  # every example is projected
                self.shapes = {}
        sizes = list(self.geometry.sizes if self._grid is None else self._measured.parameter_sizes)
        for index, shape in self.shapes.items():
            sizes[index] = math.prod(shape)
        self.total = [torch.zeros(size, dtype=torch.int64, device=self.device) for size in sizes]

    def add(self, gradients: Sequence[ExampleGradients]) -> None:
        """Add the examples whose per-example gradients, (n, *shape) or their factors, are given."""
        if any(isinstance(part, RankOne) and index not in self.shapes for index, part in enumerate(gradients)):
            for piece in _pieces(gradients, _DENSE_AT_ONCE):  # multiplied out, they are large
                self.add([part if index in self.shapes else dense(part) for index, part in enumerate(piece)])
            return
        if len(gradients[0]) == 0:
            return
        if self._grid is None and not self.shapes:
            rows = self.geometry.project([dense(part) for part in gradients])
            for total, found in zip(self.total, clipped_sum(rows, self.clip_norm, self.spacing), strict=True):
                total += found
            return
        # Lengths are those of what is summed.
        parts = [part.rounded() if isinstance(part, RankOne) else part for part in gradients]
        if self._grid is not None:
            lengths = self._measured.lengths(parts)
            margin, unit, largest = self._grid.margin, self._grid.unit, self._grid.largest
        else:
            parts, lengths = self._separated(parts)
            margin, unit, largest = self._rounding, self.spacing, GRID_CELLS
        within = self.clip_norm * (1 - margin)
        factors, finite = scale_factors(lengths, within, gradients[0].dtype, unit=unit)
        exact, _ = scale_factors(lengths, within, torch.float64)
        if not bool(finite.all()):  # 0 · inf is no zero
            parts = [_only(part, finite) for part in parts]
        for total, part in zip(self.total, parts, strict=True):
            if isinstance(part, RankOne):
                add_clipped_products(total, part, exact, self._product_unit)
            else:
                total += _units(part.flatten(1), factors, largest)

    def _separated(self, parts: Sequence[ExampleGradients]) -> tuple[list[ExampleGradients], Tensor]:
        """Coordinates, those of outer products among all their entries, and the examples' lengths in them."""
        geometry = self.geometry
        assert isinstance(geometry, SeparableGeometry)
        chosen: list[ExampleGradients] = []
        squares = []
        for index, part in enumerate(parts):
            if isinstance(part, RankOne):
                chosen.append(part)
                squares.append(part.squares(geometry.weights(index, self.shapes[index])))
            else:
                coordinates = geometry.select(index, part)
                chosen.append(coordinates)
                squares.append(example_norms(coordinates).square())
        return chosen, torch.stack(squares).sum(dim=0).sqrt()

    @property
    def _measured(self) -> MeasuredGeometry:
        """The geometry where there is a grid of gradients."""
        assert isinstance(self.geometry, MeasuredGeometry)
        return self.geometry

    @property
    def _rounding(self) -> float:
        """Share of C by which rounding both neighbours' sums of outer products to the noise's grid can move them."""
        return math.sqrt(sum(self.geometry.sizes[index] for index in self.shapes)) * self.spacing / self.clip_norm

    @property
    def _product_unit(self) -> float:
        return product_unit(self.clip_norm) if self._grid is None else self._grid.product_unit

    def units(self) -> list[Tensor]:
        """The clipped sum in the geometry's coordinates, int64, flat, in units of ``spacing``."""
        return [shifted(total, bits) for total, bits in self.sums()]

    def sums(self) -> list[tuple[Tensor, int]]:
        """The same, each with a number of bits by which it still has to be :func:`shifted`."""
        if self._grid is None:
            return [self._selected(index, total) for index, total in enumerate(self.total)]
        units = [self._product_unit if index in self.shapes else self._grid.unit for index in range(len(self.total))]
        sums = [total.double().unsqueeze(0) * unit for total, unit in zip(self.total, units, strict=True)]
        return [(self._on_grid(part.squeeze(0)), 0) for part in self.geometry.project(sums)]

    def _selected(self, index: int, total: Tensor) -> tuple[Tensor, int]:
        """The coordinates; those of a sum of outer products are on a grid finer by a power of two."""
        if index not in self.shapes:
            return total, 0
        assert isinstance(self.geometry, SeparableGeometry)
        bits = math.frexp(self.spacing / self._product_unit)[1] - 1
        return self.geometry.select(index, total.unsqueeze(0)).squeeze(0), bits

    def _on_grid(self, numbers: Tensor) -> Tensor:
        return (numbers / self.spacing).round().clamp(-_LARGEST, _LARGEST).to(torch.int64)

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
    for index, (total, bits) in enumerate(clipped.sums()):
        sums, average = total.cpu(), torch.empty(total.shape, dtype=torch.get_default_dtype())

        def add(
            start: int, draws: np.ndarray, sums: Tensor = sums, bits: int = bits, average: Tensor = average
        ) -> None:
            place = slice(start, start + len(draws))
            noisy = torch.from_numpy(draws).add_(shifted(sums[place], bits))
            torch.mul(noisy.double(), phase.spacing / phase.batch_size, out=average[place])

        key.use_rounded_normals(total.numel(), scale, add, "noise", phase.name, step, index)
        released.append(average.to(total.device))
    return released


def private_gradient(
    batches: Iterable[Sequence[ExampleGradients]],
    *,
    geometry: Geometry,
    phase: Phase,
    step: int,
    key: NoiseKey,
    device: str = "cpu",
    workers: Workers = ALONE,
    shapes: Mapping[int, tuple[int, int]] = types.MappingProxyType({}),
    shrink: Callable[[], None] | None = None,
) -> list[Tensor]:
    """One private step over micro-batches of per-example gradients: project, clip, sum, noise, divide.

    Every worker brings the micro-batches of its own part of the logical batch, possibly none. Their sums are added,
    which is exact, before the one noise draw; each worker computes the same release.

    Args:
        batches: gradients (n, *shape) of all parameters, or their factors.
        geometry, phase, step: in which space, under which noise, and which step of the phase.
        key: the secret key of this phase.
        device: where the sums are.
        workers: who shares the batch.
        shapes: rows and columns of the parameters whose gradients always come as outer products, by position. Those
            that come so although they are not named are multiplied out.
        shrink: called when memory runs out; then ``batches`` are gone through again, from the beginning. None: the
            error is raised.

    Returns:
        The released coordinates (before ``geometry.lift``); everything computed from them is post-processing.
    """
    if phase.batch_size > _LARGEST_BATCH:
        shapes = {}
    while True:
        total = ClippedSum(
            geometry=geometry, clip_norm=phase.clip_norm, spacing=phase.spacing, device=device, shapes=shapes
        )
        try:
            for gradients in batches:
                total.add(gradients)
            break
        except (RuntimeError, MemoryError) as error:
            if shrink is None or not is_out_of_memory(error):
                raise
        shrink()  # after the exception is gone, and with it what it held
    workers.sum(total.total)
    return release(total, phase=phase, step=step, key=key)


__all__ = ["ClippedSum", "clip", "clipped_sum", "private_gradient", "release"]
