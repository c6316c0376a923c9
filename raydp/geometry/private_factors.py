"""K-FAC factors from private examples: one Gaussian mechanism that releases all factor sums of a model at once.

Each example contributes one vector: for every layer its own second moments of inputs and of output gradients, for every
other parameter its squared gradient. Every such part is clipped to its own radius, and the parts are scaled so that the
whole vector has norm at most 1; so a phase of clip norm 1 releases their noisy sum like that of any gradient, and the
plan accounts for it. (How the authors of arXiv 2607.05866 do it in their private-curvature arm is not known; this is
ours.)

A symmetric matrix is released as its upper triangle with the off-diagonal entries times √2: the same norm, half of the
coordinates, and, folded back, exactly the law of a full noisy matrix that is symmetrised afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raydp._workers import ALONE, Workers, owners
from raydp.geometry.blocks import Block, DiagonalBlock, LayerBlock, blocks_of
from raydp.geometry.capture import Call, capture
from raydp.geometry.clipping import clip
from raydp.geometry.curvature import BlockCurvature, Curvature, DiagonalCurvature
from raydp.geometry.kfac import (
    capturable_layers,
    layer_curvature,
    layer_inputs,
    layer_outputs,
    named_gradients,
    summed_loss,
)
from raydp.geometry.shared import eigen_cost, share_blocks

#: The clip norm of a phase that releases these vectors.
FACTOR_CLIP_NORM = 1.0
_PREFERRED_FLOATS = 2**23  # of per-example moments held at once


class FactorEngine:
    """Callable that returns each example's own second moments: the engine of a phase that releases curvature.

    Labels are the examples' own (the empirical Fisher). Labels drawn from the model would have to be drawn by example:
    drawn along the batch, an example's presence would shift the draws of all after it, and break the sensitivity.

    Args:
        model: in which no layer mixes examples.
        form: ``expand`` or ``reduce``, as for :func:`raydp.geometry.kfac.estimate_curvature`.

    Attributes:
        preferred_batch: so many examples at a time; their moments are larger than their gradients.
    """

    def __init__(self, model: nn.Module, *, form: str = "expand") -> None:
        self.model, self.form = model, form
        self.blocks = blocks_of(model)
        self.preferred_batch = max(1, _PREFERRED_FLOATS // sum(moment_sizes(self.blocks)))
        self._layers = capturable_layers(model)

    def __call__(self, images: Tensor, labels: Tensor) -> list[Tensor]:
        """Moments (n, size) in the order of :func:`moment_sizes`.

        Args:
            images: (n, C, H, W), n >= 0.
            labels: (n,).
        """
        if len(images) == 0:
            return [images.new_zeros(0, size) for size in moment_sizes(self.blocks)]
        calls = capture(self.model, images, lambda logits: summed_loss(logits, labels), self._layers)
        diagonals = [block.name for block in self.blocks if isinstance(block, DiagonalBlock)]
        gradients = dict(
            zip(diagonals, named_gradients(self.model, images, labels, calls, diagonals), strict=True)
            if diagonals
            else ()
        )
        moments: list[Tensor] = []
        with torch.no_grad():
            for block in self.blocks:
                if isinstance(block, DiagonalBlock):
                    moments.append(gradients[block.name].flatten(1).square())
                else:
                    used = [call for call in calls if call.name == block.name]
                    moments += self._layer_moments(block, used, images)
        return moments

    def _layer_moments(self, block: LayerBlock, calls: Sequence[Call], images: Tensor) -> list[Tensor]:
        """Mean over positions of a aᵀ, and sum over positions of g gᵀ: their product is F in per-example units.

        With ``reduce``, a is the mean over positions and g the sum before the products are taken.
        """
        if not calls:  # a layer that the model does not use
            return [images.new_zeros(len(images), size) for size in moment_sizes([block])]
        # (groups, features, n, positions) to (n, groups, features, positions); calls of one layer are positions too.
        inputs = torch.cat([layer_inputs(call, block) for call in calls], dim=3).permute(2, 0, 1, 3)
        outputs = torch.cat([layer_outputs(call, block) for call in calls], dim=3).permute(2, 0, 1, 3)
        if block.bias is not None:
            inputs = torch.cat([inputs, torch.ones_like(inputs[:, :, :1])], dim=2)
        if self.form == "reduce":
            inputs, outputs = inputs.mean(dim=3, keepdim=True), outputs.sum(dim=3, keepdim=True)
        return [_triangle(inputs @ inputs.mT / inputs.shape[3]), _triangle(outputs @ outputs.mT)]


@dataclass(frozen=True, kw_only=True)
class ClippedMoments:
    """Coordinates of the moments: each part clipped to its radius, then scaled to norm 1/√(number of parts).

    ``project`` clips each example alone, so the joint norm is at most 1 whatever the example is; it is not linear.

    Attributes:
        sizes: of the parts, see :func:`moment_sizes`.
        radii: > 0, of the parts, see :func:`moment_radii`.
    """

    sizes: tuple[int, ...]
    radii: tuple[float, ...]

    @property
    def support(self) -> None:
        return None

    def project(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        share = 1 / math.sqrt(len(self.radii))
        parts = zip(gradients, self.radii, strict=True)
        return [share * clip([part.flatten(1) / radius], 1.0)[0] for part, radius in parts]

    def lift(self, released: Sequence[Tensor]) -> list[Tensor]:
        whole = math.sqrt(len(self.radii))
        return [whole * radius * part for part, radius in zip(released, self.radii, strict=True)]


def moment_sizes(blocks: Sequence[Block]) -> tuple[int, ...]:
    """Sizes of the parts: of a layer the triangles of both moments (inputs first), of another parameter its entries."""
    sizes: list[int] = []
    for block in blocks:
        if isinstance(block, DiagonalBlock):
            sizes.append(block.size)
        else:
            sizes += [block.groups * k * (k + 1) // 2 for k in (block.columns, block.rows)]
    return tuple(sizes)


def moment_radii(blocks: Sequence[Block], *, input_clip: float, output_clip: float) -> tuple[float, ...]:
    """Radii of the parts, from public constants.

    Args:
        input_clip: c_a > 0, a root mean square: a layer's input moment is clipped to norm c_a² times the number of its
            inputs, which inputs of mean square c_a² at most never exceed.
        output_clip: c_g > 0: the output moment, and the squared gradient of another parameter, is clipped to c_g².
    """
    radii: list[float] = []
    for block in blocks:
        if isinstance(block, LayerBlock):
            radii.append(input_clip**2 * block.groups * block.columns)
        radii.append(output_clip**2)
    return tuple(radii)


def curvature_of_moments(blocks: Sequence[Block], moments: Sequence[Tensor], workers: Workers = ALONE) -> Curvature:
    """The Fisher matrix from released mean moments: folded back, negative eigenvalues cut to 0.

    Args:
        blocks: of the model.
        moments: in the order of :func:`moment_sizes`.
        workers: of the run, who share out the blocks.

    Raises:
        Diverged: a moment is not finite.
    """
    left = iter(moments)
    own = [[next(left)] if isinstance(block, DiagonalBlock) else [next(left), next(left)] for block in blocks]

    def make(position: int) -> BlockCurvature:
        block = blocks[position]
        if isinstance(block, DiagonalBlock):
            return DiagonalCurvature(block=block, eigenvalues=own[position][0].clamp(min=0))
        inputs, outputs = own[position]
        return layer_curvature(
            block,
            outputs=_square(outputs, block.groups, block.rows),
            inputs=_square(inputs, block.groups, block.columns),
        )

    owner = owners([eigen_cost(block) for block in blocks], workers)
    return share_blocks(blocks, owner, make, like=moments[0], workers=workers)


def _weights(rows: Tensor, columns: Tensor) -> Tensor:
    """1 on the diagonal, √2 off it."""
    return torch.where(rows == columns, 1.0, math.sqrt(2))


def _triangle(matrices: Tensor) -> Tensor:
    """(n, groups, k, k), symmetric, to (n, groups·k(k+1)/2) of the same norms."""
    rows, columns = torch.triu_indices(*matrices.shape[2:], device=matrices.device)
    return (matrices[:, :, rows, columns] * _weights(rows, columns).to(matrices)).flatten(1)


def _square(triangle: Tensor, groups: int, k: int) -> Tensor:
    """Inverse of :func:`_triangle` for one matrix a group: (groups·k(k+1)/2,) to (groups, k, k)."""
    rows, columns = torch.triu_indices(k, k, device=triangle.device)
    values = triangle.reshape(groups, -1) / _weights(rows, columns).to(triangle)
    matrices = triangle.new_zeros(groups, k, k)
    matrices[:, rows, columns] = values
    matrices[:, columns, rows] = values
    return matrices
