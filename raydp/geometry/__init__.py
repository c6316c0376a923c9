"""Linear maps in which per-example gradients are clipped and noised."""

from raydp.geometry.base import Geometry
from raydp.geometry.identity import Identity
from raydp.geometry.support import Support, support_size, top_k

__all__ = ["Geometry", "Identity", "Support", "support_size", "top_k"]
