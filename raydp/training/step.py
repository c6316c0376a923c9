"""The private step: ``lift(noise(sum(clip(project(per-example gradients)))))``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raydp.geometry import Geometry
from raydp.geometry.clipping import clip, clip_factors
from raydp.privacy.mechanism import Phase
from raydp.privacy.noise import NoiseKey


def clipped_sum(coordinates: Sequence[Tensor], clip_norm: float) -> list[Tensor]:
    """Sum over the examples of :func:`clip`, without building the clipped vectors when all norms are finite."""
    factors, finite = clip_factors(coordinates, clip_norm)
    if bool(finite.all()):
        return [factors @ part for part in coordinates]
    return [part.sum(dim=0) for part in clip(coordinates, clip_norm)]


@dataclass(kw_only=True)
class ClippedSum:
    """Accumulates the clipped sum of one *logical* batch over its micro-batches (or, later, workers).

    Micro-batches are a performance knob: each example is projected and clipped alone, so how they are cut changes
    nothing but the rounding of the sum.
    """

    geometry: Geometry
    clip_norm: float
    device: str = "cpu"
    total: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.total = [torch.zeros(size, device=self.device) for size in self.geometry.sizes]

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add the examples whose per-example gradients (n, *shape) are given."""
        if len(gradients[0]) == 0:
            return
        for total, part in zip(self.total, clipped_sum(self.geometry.project(gradients), self.clip_norm), strict=True):
            total += part


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
    for index, total in enumerate(clipped.total):
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
