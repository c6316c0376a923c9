"""GEP's geometry: a public subspace and its residual, clipped apart (Yu et al. 2021, arXiv 2102.12677).

A per-example gradient g is taken apart into its embedding w = Vᵀg in an orthonormal basis V of public gradients and the
residual r = g − Vw. Most of the signal is in few coordinates w, so little of the noise reaches it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raydp import _validate
from raydp.errors import Diverged, InvalidValue
from raydp.geometry.clipping import clip
from raydp.geometry.kfac import example_gradients

#: The clip norm of a phase in this geometry: two parts, each of norm at most 1.
SUBSPACE_CLIP_NORM = math.sqrt(2)
_BATCH = 64  # public examples at a time: bounds the memory of their gradients


@dataclass(frozen=True, kw_only=True)
class Subspace:
    """Coordinates (clip(w, C_w)/C_w, clip(r, C_r)/C_r): both parts of every example, each in the unit ball.

    ``project`` clips, so unlike other geometries it is not linear. That is sound because it treats each example alone:
    the joint vector has norm at most √2 whatever the example is, which is the sensitivity of the sum. With the phase's
    clip norm √2 the noise has standard deviation √2·σ on each scaled part, √2·σ·C_w on the embedding and √2·σ·C_r on
    the residual, and both together are *one* Gaussian mechanism of noise multiplier σ on one sample. The phase's own
    clipping, to √2, finds nothing left to do. ``lift`` undoes the scaling: V (C_w w̃) + C_r r̃.

    Attributes:
        bases: V of each parameter tensor, (size, k), orthonormal columns; from public data and released weights only.
        embedding_clip_norm: C_w > 0, over the embeddings of all tensors together.
        residual_clip_norm: C_r > 0, over the residuals of all tensors together.

    >>> import torch
    >>> from raydp.geometry import Subspace
    >>> first_axis = Subspace(bases=(torch.eye(3)[:, :1],), embedding_clip_norm=1.0, residual_clip_norm=1.0)
    >>> embedding, residual = first_axis.project([torch.tensor([[0.5, 0.25, 0.0]])])
    >>> embedding, residual
    (tensor([[0.5000]]), tensor([[0.0000, 0.2500, 0.0000]]))
    """

    bases: tuple[Tensor, ...]
    embedding_clip_norm: float
    residual_clip_norm: float

    def __post_init__(self) -> None:
        _validate.positive("embedding_clip_norm", self.embedding_clip_norm)
        _validate.positive("residual_clip_norm", self.residual_clip_norm)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The embedding of each tensor, then the residual of each."""
        return tuple(basis.shape[1] for basis in self.bases) + tuple(basis.shape[0] for basis in self.bases)

    @property
    def support(self) -> None:
        return None

    def project(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        vectors = [gradient.flatten(1) for gradient in gradients]
        embeddings = [vector @ basis for vector, basis in zip(vectors, self.bases, strict=True)]
        residuals = [
            torch.addmm(vector, embedding, basis.T, alpha=-1)
            for vector, embedding, basis in zip(vectors, embeddings, self.bases, strict=True)
        ]
        return unit_ball(embeddings, self.embedding_clip_norm) + unit_ball(residuals, self.residual_clip_norm)

    def lift(self, released: Sequence[Tensor]) -> list[Tensor]:
        count = len(self.bases)
        return [
            basis @ (self.embedding_clip_norm * embedding) + self.residual_clip_norm * residual
            for basis, embedding, residual in zip(self.bases, released[:count], released[count:], strict=True)
        ]


def unit_ball(coordinates: Sequence[Tensor], radius: float) -> list[Tensor]:
    """Each example's joint vector clipped to norm ``radius`` and divided by it: (n, size) each, norm at most 1."""
    return clip([part / radius for part in coordinates], 1.0)


def share_out(total: int, sizes: Sequence[int], *, limit: int) -> tuple[int, ...]:
    """How many basis vectors each tensor gets: at least 1, in proportion to the root of its size, ``total`` in all.

    Args:
        total: basis vectors of all tensors together.
        sizes: entries of each tensor.
        limit: no tensor gets more than this (the number of public examples), or than it has entries.

    Raises:
        InvalidValue: ``total`` is below the number of tensors or above what they can take.

    >>> from raydp.geometry.subspace import share_out
    >>> share_out(12, [900, 100, 10], limit=50)
    (8, 3, 1)
    """
    room = [min(size, limit) for size in sizes]
    if not len(sizes) <= total <= sum(room):
        raise InvalidValue(
            "subspace",
            total,
            f"must lie in [{len(sizes)}, {sum(room)}]: one vector at least for each of {len(sizes)} parameter tensors, "
            f"and no more than a tensor's entries or the {limit} public examples",
            "Choose subspace in that range, or name more public examples.",
        )
    counts = [1] * len(sizes)
    for _ in range(total - len(sizes)):
        # The next vector goes where there is room and a vector stands for the most root-entries.
        open_ = [index for index in range(len(sizes)) if counts[index] < room[index]]
        counts[max(open_, key=lambda index: math.sqrt(sizes[index]) / counts[index])] += 1
    return tuple(counts)


def principal_bases(
    model: nn.Module,
    images: Tensor,
    *,
    subspace: int,
    iterations: int,
    seed: int,
    fisher_labels: str = "model",
    labels: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """An orthonormal basis (size, k) of the leading public per-example gradients of each parameter tensor.

    By orthogonal power iteration on Σ g gᵀ from a random start. Gradients are computed again in each pass instead of
    being kept, so memory is that of the basis and one batch.

    Args:
        model: in which no layer mixes examples; its weights may be private outputs.
        images: (n, C, H, W), n >= 1, public.
        subspace: basis vectors of all tensors together; see :func:`share_out`.
        iterations: passes over the examples, >= 1.
        seed: of the start and of labels that are drawn; public randomness.
        fisher_labels, labels: as for :func:`raydp.geometry.kfac.estimate_curvature`.

    Raises:
        Diverged: a gradient is not finite. InvalidValue: no example, or a subspace out of range.
    """
    if len(images) == 0:
        raise InvalidValue("public", 0, "must hold at least one example", "Name a public set that is not empty.")
    _validate.integer("power_iterations", iterations, low=1)
    parameters = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
    counts = share_out(subspace, [parameter.numel() for parameter in parameters], limit=len(images))
    start = torch.Generator().manual_seed(seed)
    bases = [
        torch.randn(parameter.numel(), count, generator=start).to(parameter)
        for parameter, count in zip(parameters, counts, strict=True)
    ]
    for _ in range(iterations):
        generator = torch.Generator().manual_seed(seed)  # each pass sees the same labels
        products = [torch.zeros_like(basis) for basis in bases]
        for first in range(0, len(images), _BATCH):
            piece = slice(first, first + _BATCH)
            gradients = example_gradients(
                model,
                images[piece],
                generator=generator,
                fisher_labels=fisher_labels,
                labels=None if labels is None else labels[piece],
            )
            for product, basis, gradient in zip(products, bases, gradients, strict=True):
                vectors = gradient.detach().flatten(1)
                product += vectors.T @ (vectors @ basis)
        bases = [_orthonormal(product) for product in products]
    return tuple(bases)


def _orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis whose span holds the columns'; where they are dependent, further directions fill it up."""
    # Gradients of a confident model are tiny: scaled, so that a product of squares is no zero column in float32.
    scaled = columns.double() / columns.abs().max().double().clamp(min=torch.finfo(torch.float64).tiny)
    if not bool(torch.isfinite(scaled).all()):
        raise Diverged("the gradients of public examples are not finite")
    return torch.linalg.qr(scaled).Q.to(columns.dtype)
