"""A secret part of a data set: the Poisson subsample that a search tunes on, or the rest."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from raydp.data.sources import Dataset
from raydp.privacy.noise import NoiseKey


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which private examples a run may see, told without telling them.

    Attributes:
        key_file: the secret that the subsample follows from, one for the whole search.
        fraction: in (0, 1), the probability with which an example is in the subsample.
        rest: everything that is *not* in the subsample.
        insecure_seed: None, or the seed of a debugging search, whose subsample anyone can recompute.
    """

    key_file: Path
    fraction: float
    rest: bool
    insecure_seed: int | None = None

    def of(self, dataset: Dataset) -> Dataset:
        """The data set with that part of its private examples.

        Raises:
            InvalidValue, CorruptFile: the key is gone or cannot be read.
        """
        key = NoiseKey.load(self.key_file) if self.insecure_seed is None else NoiseKey.insecure(self.insecure_seed)
        private = dataset.private.part(key=key, fraction=self.fraction, rest=self.rest)
        return dataclasses.replace(dataset, private=private)


__all__ = ["Part"]
