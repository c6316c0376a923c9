"""How many examples are held at once, and what happens where that is too many.

The size of a micro-batch changes speed and memory and nothing of the mechanism: sums are exact, and the noise is drawn
once a step. So when memory runs out in the middle of a batch, the batch is summed up again from its beginning in
smaller pieces, before anything of it is released.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import torch

from raydp.errors import CorruptFile, MemoryExhausted

T = TypeVar("T")


class MicroBatch:
    """The largest number of examples at a time: the cap, halved as often as memory ran out in this run.

    A run that goes on after a crash begins with what it ended with: it may have to run seen steps again, to the same
    last bit. So a halving is on disk before the batch is summed up again. Whether memory suffices depends on the device
    and on this number, not on which examples there are.

    Args:
        cap: >= 1.
        file: where halvings are kept.
    """

    def __init__(self, cap: int, file: Path) -> None:
        self.size, self._file = cap, file
        if file.exists():
            text = file.read_text()
            if not text.strip().isdigit() or int(text) < 1:
                raise CorruptFile(f"{file} does not hold a number of examples. Remove it, and start a new trial.")
            self.size = min(cap, int(text))

    def halve(self, used: int) -> None:
        """Take half of the ``used`` examples at a time that did not fit.

        Raises:
            MemoryExhausted: it is a single example already.
        """
        if used == 1:
            raise MemoryExhausted(
                "memory does not even suffice for a single example at a time. Give the trial more memory (fewer trials "
                "at once, another device), or choose a smaller model."
            )
        self.size = min(self.size, used) // 2
        scratch = self._file.with_suffix(".new")
        with open(scratch, "w", encoding="ascii") as file:
            file.write(f"{self.size}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, self._file)


class Batches(Generic[T]):
    """What can be gone through again, made anew each time."""

    def __init__(self, make: Callable[[], Iterable[T]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[T]:
        return iter(self._make())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this says that memory ran out: on a GPU, on the CPU, or in Python."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch's on the CPU has no type
