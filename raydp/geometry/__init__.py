"""Linear maps in which per-example gradients are clipped and noised."""

from raydp.geometry.base import Geometry
from raydp.geometry.diagonal import Diagonal
from raydp.geometry.identity import Identity
from raydp.geometry.preconditioning import PostConditioning, PreConditioning
from raydp.geometry.subspace import Subspace
from raydp.geometry.support import Support, support_size, top_k
from raydp.geometry.whitening import Whitening

__all__ = [
    "Diagonal",
    "Geometry",
    "Identity",
    "PostConditioning",
    "PreConditioning",
    "Subspace",
    "Support",
    "Whitening",
    "support_size",
    "top_k",
]
