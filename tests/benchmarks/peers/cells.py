"""One cell of the comparison: all loops of a workload at a batch size, each in a process of its own, interleaved."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.serve import LoopFailed, Served

Cell = dict[str, Any]
MICRO_BATCHES = (32, 64, 128)
# XLA compiles a loop over micro-batches to several times faster code than one pass, so even 32 examples want one.
JAX_MICRO_BATCHES = (16, *MICRO_BATCHES)
PEERS = ("hooks", "functorch", "ghost", "jax")  # of Opacus three, and jax-privacy
#: loops that the second part holds against a step of ``dp_sgd``: workload -> the latter's loop, the others
GEOMETRIES: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "resnet20": (
        ("dp_sgd", ("dp_ngd 0.5", "dp_ngd 0.9", "dp_ngd 0.99")),
        ("raydp", ("topk 0.4 scattered", "topk 0.1 last layers")),
    ),
    "mlp": (("raydp", ("topk 0.4 scattered", "topk 0.1 last layers")),),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How cells are measured; those of one table are measured alike.

    Attributes:
        threads: of each loop.
        blocks: of each loop that count.
        block_seconds: what a block lasts about; of one step at least.
        hopeless: a loop that takes so many times the fastest private one's time is timed once only.
        jax_python: an interpreter that has ``jax-privacy``, or None.
    """

    threads: int = 2
    blocks: int = 7
    block_seconds: float = 0.4
    hopeless: float = 5.0
    jax_python: Path | None = None

    def facts(self) -> dict[str, Any]:
        """What a cell says of how it was measured."""
        return {
            "threads": self.threads,
            "blocks": self.blocks,
            "block_seconds": self.block_seconds,
            "hopeless": self.hopeless,
            "jax": self.jax_python is not None,
        }


def compared(workload: str, batch: int, options: Options, *, jax: bool) -> Cell:
    """Plain SGD, raydp and all peers; of each peer the whole batch and the fastest micro-batch are measured.

    Args:
        jax: whether the peer in jax has this workload; asked only where there is an interpreter.

    Raises:
        LoopFailed: raydp's own loop did, or that of SGD; a peer's failure is part of the cell.
    """
    peers = [peer for peer in PEERS if peer != "jax" or (jax and options.jax_python is not None)]
    groups = [["plain"], ["raydp"]]
    for peer in peers:
        sizes = JAX_MICRO_BATCHES if peer == "jax" else MICRO_BATCHES
        groups += [[peer], [f"{peer} {size}" for size in sizes if size < batch]]
    cell = _measured(workload, batch, options, groups)
    for own in ("plain", "raydp"):
        if own in cell["failed"]:
            raise LoopFailed(f"{own} on {workload} {batch}: {cell['failed'][own]}")
    return cell


def geometries(workload: str, batch: int, options: Options, loops: Iterable[str]) -> Cell:
    """Loops of raydp against each other."""
    return _measured(workload, batch, options, [[loop] for loop in loops])


def _measured(workload: str, batch: int, options: Options, groups: list[list[str]]) -> Cell:
    """Try every loop, then interleave the fastest of each group."""
    cell: Cell = {"workload": workload, "batch": batch, "tried": {}, "memory": {}, "failed": {}, "facts": {}}
    load = os.getloadavg()[0]
    loops: dict[str, Served] = {}
    with ExitStack() as stack:
        stack.callback(lambda: _close(loops.values()))
        for group in groups:
            best: str | None = None
            for name in group:
                try:
                    served = _tried(_command(name, workload, batch, options), name, cell)
                except LoopFailed as failure:
                    cell["failed"][name] = str(failure)
                    continue
                loops[name] = served
                if best is not None:
                    slower = max(best, name, key=lambda each: cell["tried"][each])
                    loops.pop(slower).close()
                best = name if best is None or best not in loops else best
        private = [cell["tried"][name] for name in loops if name != "plain"]
        for name in list(loops):
            if cell["tried"][name] > options.hopeless * min(private, default=0.0) and name not in ("plain", "raydp"):
                loops.pop(name).close()
        _interleave(loops, cell, options)
    cell["load"] = [load, os.getloadavg()[0]]
    return cell


def _close(loops: Iterable[Served]) -> None:
    for served in loops:
        served.close()


def _tried(command: list[str], name: str, cell: Cell) -> Served:
    """Start a loop and note a first time and the memory that it takes."""
    served = Served(command)
    cell["facts"].update(served.facts)
    first, _ = served.run(1)
    cell["tried"][name] = served.run(min(10, max(1, round(0.2 / first))))[0]
    cell["memory"][name] = served.memory()
    return served


def _interleave(loops: dict[str, Served], cell: Cell, options: Options) -> None:
    """Blocks of all loops in turn; a loop that ends in between counts as failed."""
    steps = {name: max(1, round(options.block_seconds / cell["tried"][name])) for name in loops}
    cell["wall"], cell["cpu"] = {name: [] for name in loops}, {name: [] for name in loops}
    for _ in range(options.blocks):
        for name, served in list(loops.items()):
            try:
                wall, cpu = served.run(steps[name])
            except LoopFailed as failure:
                cell["failed"][name] = str(failure)
                del loops[name], cell["wall"][name], cell["cpu"][name]
                continue
            cell["wall"][name].append(wall)
            cell["cpu"][name].append(cpu)


def _command(name: str, workload: str, batch: int, options: Options) -> list[str]:
    if name.split()[0] == "jax":
        size = name.partition(" ")[2] or str(batch)
        module = [str(options.jax_python), "-m", "tests.benchmarks.peers.jax_loop", workload, str(batch), size]
    else:
        module = [sys.executable, "-m", "tests.benchmarks.peers.torch_loop", workload, str(batch), name]
    return [*module, str(options.threads)]
