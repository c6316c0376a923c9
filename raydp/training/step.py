"""The private step: ``lift(noise(sum(clip(project(per-example gradients)))))``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raydp.geometry import Geometry
from raydp.geometry.base import MeasuredGeometry
from raydp.geometry.clipping import clip, clip_factors, scale_factors, scaled_sum
from raydp.privacy.mechanism import Phase
from raydp.privacy.noise import NoiseKey


def clipped_sum(coordinates: Sequence[Tensor], clip_norm: float) -> list[Tensor]:
    """Sum over the examples of :func:`clip`, without building the clipped vectors."""
    return scaled_sum(coordinates, *clip_factors(coordinates, clip_norm))


@dataclass(kw_only=True)
class ClippedSum:
    """Accumulates the clipped sum of one *logical* batch over its micro-batches (or, later, workers).

    Micro-batches are a performance knob: each example is clipped alone, so how they are cut changes nothing but the
    rounding of the sum.

    With a :class:`~raydp.geometry.base.MeasuredGeometry` the sum is that of the gradients, each scaled by C over the
    length of its coordinates, and is projected once, at the end. The map is linear, so an example's share of the
    projected sum is its clipped coordinates all the same.
    """

    geometry: Geometry
    clip_norm: float
    device: str = "cpu"
    total: list[Tensor] = field(init=False)  # of coordinates, or of gradients
    _measured: MeasuredGeometry | None = field(init=False)

    def __post_init__(self) -> None:
        self._measured = self.geometry if isinstance(self.geometry, MeasuredGeometry) else None
        sizes = self.geometry.sizes if self._measured is None else self._measured.parameter_sizes
        self.total = [torch.zeros(size, device=self.device) for size in sizes]

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add the examples whose per-example gradients (n, *shape) are given."""
        if len(gradients[0]) == 0:
            return
        if self._measured is None:
            parts = clipped_sum(self.geometry.project(gradients), self.clip_norm)
        else:
            factors = scale_factors(self._measured.lengths(gradients), self.clip_norm, gradients[0].dtype)
            parts = scaled_sum([gradient.flatten(1) for gradient in gradients], *factors)
        for total, part in zip(self.total, parts, strict=True):
            total += part

    def coordinates(self) -> list[Tensor]:
        """The clipped sum in the geometry's coordinates, flat."""
        if self._measured is None:
            return self.total
        # A coordinate of infinite scale is never finite. Examples that have some in it are infinitely long and were
        # left out, so there is nothing in it, whatever the data.
        rows = self.geometry.project([total.unsqueeze(0) for total in self.total])
        return [part.squeeze(0).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for part in rows]


def release(clipped: ClippedSum, *, phase: Phase, step: int, key: NoiseKey) -> list[Tensor]:
    """Add the step's one noise draw to the sum and divide by the *expected* batch size.

    The draw is addressed by (phase, step, tensor): replaying a step gives the same noise, and no worker, micro-batch or
    augmentation draws its own. It is added to an empty batch too. The realised batch size is private and never enters.

    Args:
        clipped: the logical batch's clipped sum.
        phase: gives sigma, C and B.
        step: the logical step within the phase.
        key: the secret key of this phase.

    Returns:
        The released average for each parameter tensor, flat (size,).
    """
    released = []
    for index, total in enumerate(clipped.coordinates()):
        noise = torch.from_numpy(key.gaussian(total.shape, "noise", phase.name, step, index)).to(total.device)
        # In float64, and rounded once the noise is in: the grid of float32 would show what was added to which noise.
        noisy = (total.double() + phase.noise_std * noise) / phase.batch_size
        released.append(noisy.to(total.dtype))
    return released


def private_gradient(
    batches: Iterable[Sequence[Tensor]],
    *,
    geometry: Geometry,
    phase: Phase,
    step: int,
    key: NoiseKey,
    device: str = "cpu",
) -> list[Tensor]:
    """One private step over micro-batches of per-example gradients: project, clip, sum, noise, divide.

    Returns:
        The released coordinates (before ``geometry.lift``); everything computed from them is post-processing.
    """
    total = ClippedSum(geometry=geometry, clip_norm=phase.clip_norm, device=device)
    for gradients in batches:
        total.add(gradients)
    return release(total, phase=phase, step=step, key=key)


__all__ = ["ClippedSum", "clip", "clipped_sum", "private_gradient", "release"]
