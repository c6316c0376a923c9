"""When steps may run again: what must be the same, and what a checkpoint notes about it.

A step that runs again with the same noise releases nothing new only if it is the same computation to the last bit.
Otherwise both outcomes have their noise in common, and whoever has seen both learns the difference of two sums without
any: the examples in which two data sets differ, or, from weights that drifted apart by rounding, a derivative of the
private gradient.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from raydp import __version__
from raydp.errors import RaydpError
from raydp.methods.base import Config
from raydp.privacy.noise import NoiseKey


def conditions(
    *,
    device: str,
    micro_batch: int,
    config: Config,
    public: str | None,
    model: str | None,
    workers: int = 1,
    engine: str = "auto",
    precision: str = "float32",
) -> dict[str, Any]:
    """What decides a step's result to the last bit, besides the plan, the key, the private data and the seed.

    The type of the processor enters as far as torch tells it. Plain values, fit for a checkpoint.

    Args:
        device: ``cpu`` or ``cuda``.
        micro_batch: how many gradients are summed up at once.
        engine: how per-example gradients come about.
        precision: of forward and backward passes.
        config: the hyperparameters.
        public: digest of the public examples, or None.
        model: digest of the file that the model comes from, or None.
        workers: how many processes share the run: a batch may be cut otherwise for them.
    """
    capability = torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {
        "raydp": __version__,
        **{name: importlib.metadata.version(name) for name in ("torch", "numpy", "opacus")},
        "device": f"{device}, {platform.machine()}, {capability}",
        "threads": torch.get_num_threads(),
        "micro_batch": micro_batch,
        "engine": engine,
        "precision": precision,
        "workers": workers,
        "config": dict(config),
        "public": public,
        "model": model,
    }


def agreed(workers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The conditions of a run, from those of its workers by rank. Only their devices may differ.

    Raises:
        RaydpError: anything else differs.
    """
    first = workers[0]
    for rank, other in enumerate(workers):
        for name, value in other.items():
            if name != "device" and value != first[name]:
                raise RaydpError(
                    f"worker {rank} has {name} = {value!r}, worker 0 has {first[name]!r}. Start all workers of a run "
                    "alike."
                )
    devices = [other["device"] for other in workers]
    return {**first, "device": devices[0] if len(set(devices)) == 1 else " | ".join(devices)}


def data_mark(root: NoiseKey, fingerprint: str) -> str:
    """Which data a run is about, told by its secret: a plain hash would let anyone test guesses of the data."""
    return root.generator("data", fingerprint).read(16).hex()


def check(
    state: Mapping[str, Any] | None, *, seen: int, data_mark: str, conditions: Mapping[str, Any], where: Path
) -> None:
    """Refuse to run steps again whose outcome has been seen, unless they are the very same computation.

    Steps that were not seen may run under other conditions, for what they were before is lost. On other data none may:
    a run is about one data set.

    Args:
        state: of the newest usable checkpoint; None if there is none.
        seen: how many of the first steps have been reported.
        data_mark, conditions: of the process that wants to go on.
        where: the run's directory, for messages.

    Raises:
        RaydpError: the data changed since the checkpoint, or seen steps would run again under other conditions.
    """
    if state is None:
        if seen:
            raise RaydpError(
                f"{where} has reports up to step {seen} and no usable checkpoint, so those steps would run again, "
                "perhaps not the same to the last bit. The run is over; start a new trial."
            )
        return
    if state.get("data") != data_mark:
        raise RaydpError(
            f"the private data are not those with which the run in {where} began. Restore them before you resume, or "
            "start a new trial."
        )
    before = state.get("conditions", {})
    changed = sorted(name for name, value in conditions.items() if before.get(name) != value)
    if changed and seen > state["step"]:
        raise RaydpError(
            f"the newest usable checkpoint in {where} is of step {state['step']}, but reports go up to step {seen}, "
            f"and {', '.join(changed)} changed since: the steps in between would run again with the same noise and "
            "another result. Resume under the old conditions, or start a new trial."
        )
