"""What random numbers are drawn from."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Randomness(Protocol):
    """What views of an example and the randomness of a loss are drawn from: a :class:`raydp.privacy.stream.Stream`.

    It has the methods of numpy's Generator that they need, so that a Generator serves where nothing is secret.
    """

    def random(self, size: int | tuple[int, ...]) -> np.ndarray: ...

    def integers(self, low: int, high: int, size: int | tuple[int, ...]) -> np.ndarray: ...

    def standard_normal(self, size: int | tuple[int, ...], dtype: Any = ...) -> np.ndarray: ...
