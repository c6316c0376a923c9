"""A trial inside a Ray process: its runs one after the other, a report at a time.

A class trainable, so that Tune hands the same process to the next trial: torch is imported and the data decoded once.
The trial keeps its own state on disk (:mod:`raydp.training.run`), so Tune's checkpoints are not used; a trial that is
started again goes on from there.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune

from raydp._workers import ALONE, Workers
from raydp.errors import Diverged, RaydpError, WorkerFailed, WorkerLost
from raydp.training.watchdog import watched

if TYPE_CHECKING:
    from raydp.data import Part
    from raydp.privacy.plan import Plan
    from raydp.search.run_directory import RunDirectory

#: State of an outcome that is no end: the storage failed, so the trial goes on from its checkpoint when it works again.
INTERRUPTED = "interrupted"
#: In the directory of a trial: where its processes were when they took too long; workers have hang-<rank>.txt.
HANG = "hang-0.txt"


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Everything that a process needs to run a trial; it travels through Ray, so it holds no secret.

    Attributes:
        directory: the run directory of the search; it must be the same path on every node.
        key: of the trial; config.json and plan.json of its directory hold the rest.
        plan: digest of the plan in plan.json, as the journal has it.
        method, config: the method and its hyperparameters.
        seeds: initial seeds, one run each.
        holdout_plan: digest of the plan in holdout-plan.json; None where the hold-out is measured without noise.
        metric: the one that is then released.
        part: ``subsample`` or ``rest``, a secret part of the private data; None for all of it.
        fraction: of the subsample.
        threads, gpus: of each worker.
        workers: the least and the greatest number of them.
        time_limit: seconds that may pass without a report; None for no limit.
    """

    directory: str
    key: str
    plan: str
    method: str
    config: Mapping[str, Any]
    seeds: tuple[int, ...]
    data: str
    data_limit: int | None
    task: str
    public: str | None
    public_limit: int | None
    model: str
    paired: bool
    insecure_seed: int | None
    reports: int
    micro_batch: int
    threads: int
    device: str
    workers: tuple[int, int] = (1, 1)
    gpus: float = 0.0
    time_limit: float | None = None
    holdout_plan: str | None = None
    engine: str = "auto"
    precision: str = "float32"
    metric: str | None = None
    part: str | None = None
    fraction: float | None = None


def outcomes(assignment: Assignment, workers: Workers = ALONE) -> Iterator[dict[str, Any]]:
    """Run the trial, yielding what becomes visible: progress, and at the end ``state``, ``reason`` and ``metrics``.

    The state at the end is one of the journal's, or :data:`INTERRUPTED`.

    Each item has ``done``; a progress item has ``seed`` (position), ``fraction`` of the whole trial, ``step`` and
    ``metrics``. The last has ``metrics`` as name -> one value a finished seed.

    Args:
        assignment: the trial.
        workers: the processes that run it together, each of which calls this; all yield the same.

    Raises:
        WorkerFailed, WorkerLost: another worker ended, which is for that one to explain, or for nobody; the trial goes
            on from its checkpoint.
    """
    from raydp import data
    from raydp.privacy.noise import NoiseKey
    from raydp.search.run_directory import RunDirectory
    from raydp.training.run import RunSpec, execute

    directory = RunDirectory.open(assignment.directory)
    plan = _allowed(directory, assignment.key, "plan.json", assignment.plan)
    held = assignment.holdout_plan
    holdout_plan = None if held is None else _allowed(directory, assignment.key, "holdout-plan.json", held)
    # What the accounts go by decides. Run directories of earlier versions do not say.
    family = bool(directory.definition.get("family", data.is_family(assignment.data)))
    results: dict[str, list[float]] = {}
    state, reason = "complete", None
    begun = time.monotonic()
    for position, seed in enumerate(assignment.seeds):
        spec = RunSpec(
            directory=directory.run_path(assignment.key, position),
            key_file=directory.secrets / f"{assignment.key}-{position}.key",
            method=assignment.method,
            config=assignment.config,
            plan=plan,
            data=assignment.data,
            data_limit=assignment.data_limit,
            member=position if family else 0,
            task=assignment.task,
            public=assignment.public,
            public_limit=assignment.public_limit,
            model=assignment.model,
            seed=seed,
            pairing_file=directory.secrets / "pairing.key" if assignment.paired else None,
            insecure_seed=assignment.insecure_seed,
            holdout_plan=holdout_plan,
            metric=assignment.metric,
            part=_part(assignment, directory),
            reports=assignment.reports,
            micro_batch=assignment.micro_batch,
            engine=assignment.engine,
            precision=assignment.precision,
            device=assignment.device,
        )
        try:
            for report in execute(spec, workers):
                yield {
                    "done": False,
                    "seed": position,
                    "fraction": (position + report.step / report.steps) / len(assignment.seeds),
                    "step": report.step,
                    "metrics": {**report.metrics, **report.diagnostics},
                }
        except (WorkerFailed, WorkerLost):
            raise
        except Diverged as error:
            state, reason = "diverged", str(error)
        except Exception as error:  # noqa: BLE001 - whatever a trial dies of, the search goes on and says so
            if isinstance(error, OSError) or isinstance(error.__cause__, OSError):  # a full disk, say
                state, reason = INTERRUPTED, str(error)
                break  # with its key
            state, reason = "failed", f"{type(error).__name__}: {error}"
            _keep_traceback(spec.directory, workers.rank)
        if workers.count == 1:  # else another worker may still be at work on it, see _together
            NoiseKey.destroy(spec.key_file)  # the run is over, so its steps will not be replayed
        if state != "complete":
            break
        for name, value in report.metrics.items():
            results.setdefault(name, []).append(value)
    yield {
        "done": True,
        "state": state,
        "reason": reason,
        "metrics": results,
        "seconds": time.monotonic() - begun,
    }


def _part(assignment: Assignment, directory: RunDirectory) -> Part | None:
    """The secret part of the private data that the trial may see."""
    from raydp.data import Part

    if assignment.part is None or assignment.fraction is None:
        return None
    return Part(
        key_file=directory.secrets / "subsample.key",
        fraction=assignment.fraction,
        rest=assignment.part == "rest",
        insecure_seed=assignment.insecure_seed,
    )


def _allowed(directory: RunDirectory, key: str, file: str, digest: str) -> Plan:
    """The plan in a file of the trial, which must be the one that the journal speaks of."""
    plan = directory.plan(key, file)
    if plan is None:
        raise RaydpError(f"trial {key} in {directory.path} has no {file}, and only a plan runs.")
    if plan.digest != digest:
        raise RaydpError(
            f"{file} of trial {key} in {directory.path} has digest {plan.digest[:12]}, the journal says "
            f"{digest[:12]}: it was exchanged. Restore it from a copy."
        )
    return plan


def _keep_traceback(directory: Path, rank: int) -> None:
    """Into error.txt, for the owner alone: what a private step failed of may hold private numbers."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / ("error.txt" if rank == 0 else f"error-{rank}.txt")
    file.unlink(missing_ok=True)  # of an earlier attempt, with whatever mode
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(traceback.format_exc())


def _guarded(text: str, workers: Workers = ALONE) -> Iterator[dict[str, Any]]:
    """:func:`outcomes` of the assignment in ``text``; what goes wrong before its first run is an outcome too."""
    import torch

    try:
        assignment = Assignment(**json.loads(text))
        torch.set_num_threads(assignment.threads)
        yield from outcomes(assignment, workers)
    except (WorkerFailed, WorkerLost):
        raise
    except Exception as error:  # noqa: BLE001 - said as the trial's reason; a dead process could not say it
        yield _failed(error)


def _together(text: str) -> Iterator[dict[str, Any]]:
    """The same by several workers, of which this process is none.

    Raises:
        Gone: they ended without an outcome, so this trial's process does.
    """
    from raydp.privacy.noise import NoiseKey
    from raydp.search.run_directory import RunDirectory
    from raydp.training import gang

    try:
        assignment = Assignment(**json.loads(text))
        directory = RunDirectory.open(assignment.directory)
        home = directory.trial_directory(assignment.key)
    except Exception as error:  # noqa: BLE001 - as above
        yield _failed(error)
        return
    scale = gang.Scale(
        workers=(assignment.workers[0], assignment.workers[1]),
        cpus=assignment.threads,
        gpus=int(assignment.gpus),
        time_limit=assignment.time_limit,
    )
    try:
        for item in gang.train(_guarded, text, scale=scale, home=home):
            if item["done"] and item["state"] != INTERRUPTED:
                for position in range(len(assignment.seeds)):
                    NoiseKey.destroy(directory.secrets / f"{assignment.key}-{position}.key")
            yield item
    except gang.NoRoom as error:
        yield {"done": True, "state": INTERRUPTED, "reason": str(error), "metrics": {}, "seconds": None}


def _failed(error: Exception) -> dict[str, Any]:
    reason = f"{type(error).__name__}: {error}"
    return {"done": True, "state": "failed", "reason": reason, "metrics": {}, "seconds": None}


def _items(text: str) -> Iterator[dict[str, Any]]:
    """The trial's items, by this process or by workers of its own."""
    assignment = json.loads(text)
    if list(assignment["workers"]) != [1, 1]:
        return _together(text)
    home = Path(assignment["directory"]) / "trials" / assignment["key"]
    return watched(_guarded(text), assignment["time_limit"], home / HANG)


class TrialProcess(tune.Trainable):
    """Tune's view of :func:`outcomes`: one step, one item, as JSON so that Tune has nothing to interpret.

    Of a trial with several workers it only looks after them (:mod:`raydp.training.gang`), and needs no core for that.
    """

    def setup(self, config: dict[str, Any]) -> None:
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take the next trial in the same process."""
        self._items = _items(new_config["task"])
        return True

    def step(self) -> dict[str, Any]:
        item = next(self._items)
        return {"item": json.dumps(item), "done": item["done"]}

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Nothing to add: the run's own checkpoints are on disk already."""
        return {}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Nothing to load: :func:`raydp.training.run.execute` goes on from the run's own checkpoint."""

    def cleanup(self) -> None:
        """Let the run commit its ledger and release its locks."""
        self._items.close()  # type: ignore[attr-defined]
