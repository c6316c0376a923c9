"""Real worker processes for tests: forked from a server that has imported torch, joined by gloo over localhost."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raydp.training.workers import Group, Workers

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.training.processes", "tests.training.helpers"])
Job = Callable[..., Any]


@dataclass(frozen=True)
class Ended:
    """How a worker ended: with a result, an error, or without a word.

    Attributes:
        error: name of the type of its exception, or None.
        message: of the exception.
        seconds: that it took.
    """

    result: Any = None
    error: str | None = None
    message: str = ""
    seconds: float = field(default=0.0, compare=False)


class Processes:
    """``count`` processes that call ``job(workers, *arguments)``, which must be importable, at the same time."""

    def __init__(self, count: int, job: Job, *arguments: Any) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        store = Path(self._scratch.name) / "store"
        self.processes: list[BaseProcess] = []
        self._results: list[Connection] = []
        for rank in range(count):
            receiving, sending = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_work, args=(sending, rank, count, str(store), job, arguments))
            process.start()
            sending.close()
            self.processes.append(process)
            self._results.append(receiving)

    def ends(self, *, timeout: float = 120.0) -> list[Ended]:
        """How each worker ended, by rank.

        Raises:
            TimeoutError: a worker did not end in time; all are killed.
        """
        deadline, found = time.monotonic() + timeout, []
        try:
            for rank, (process, results) in enumerate(zip(self.processes, self._results, strict=True)):
                if not results.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"worker {rank} of {len(self.processes)} hangs")
                try:
                    found.append(results.recv())
                except EOFError:
                    process.join()
                    found.append(Ended(error="died", message=str(process.exitcode)))
        finally:
            for process in self.processes:
                process.kill()
                process.join()
            self._scratch.cleanup()
        return found


def together(count: int, job: Job, *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """The results of ``count`` workers; an error of one of them is raised."""
    ends = Processes(count, job, *arguments).ends(timeout=timeout)
    failed = [f"worker {rank}: {end.error}: {end.message}" for rank, end in enumerate(ends) if end.error is not None]
    assert not failed, "\n".join(failed)
    return [end.result for end in ends]


def _work(sending: Connection, rank: int, count: int, store: str, job: Job, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    begun = time.monotonic()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=60)
    )
    workers: Workers = Group()
    try:
        ended = Ended(result=job(workers, *arguments), seconds=time.monotonic() - begun)
    except Exception as error:  # noqa: BLE001 - told to the test
        ended = Ended(error=type(error).__name__, message=str(error), seconds=time.monotonic() - begun)
    sending.send(ended)
    time.sleep(60)  # a process that has failed may live on: the others must not depend on its death
