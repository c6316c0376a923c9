"""A loop in a process of its own, which is told when to run: what it does then is all that its time and memory hold.

The process answers lines on its standard input by one JSON object a line: ``run N`` runs N steps and gives their
seconds, on the wall's clock and on the processor's (all threads together); ``memory`` gives megabytes. Linux only.
Needs nothing but the standard library, so that any interpreter can serve.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def bind(threads: int) -> None:
    """Let this process run on so many processors at most, and its libraries start no more threads than those."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)


def serve(advance: Callable[[], object], **facts: Any) -> None:
    """Answer until the input ends. Resident memory is counted from here on: what was loaded and compiled is in it.

    Not by ``ru_maxrss``, which a new process inherits from the one that started it: the peak of this process's own
    memory is reset before the first step.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    with contextlib.suppress(AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)  # what is free counts as free, or steps would seem to take nothing
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident now
    before = _megabytes("VmRSS")
    print(json.dumps(facts), file=answers)
    for line in sys.stdin:
        word, _, count = line.strip().partition(" ")
        if word == "memory":
            answer = {"before": before, "peak": _megabytes("VmHWM")}
        else:
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(int(count)):
                advance()
            answer = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(json.dumps(answer), file=answers)


def _megabytes(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


class LoopFailed(Exception):
    """A loop's process ended; says why."""


class Served:
    """The other end: a loop in another process.

    Args:
        command: what to start; it calls :func:`serve`.

    Raises:
        LoopFailed: it did not get so far.
    """

    def __init__(self, command: list[str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, cwd=ROOT
        )
        self.facts = self._answer()

    def run(self, steps: int) -> tuple[float, float]:
        """Seconds a step, on the wall's clock and on the processor's."""
        found = self._ask(f"run {steps}")
        return found["wall"] / steps, found["cpu"] / steps

    def memory(self) -> dict[str, float]:
        """Megabytes resident ``before`` the first step, and at the ``peak`` since."""
        return self._ask("memory")

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self._process.wait()
        self._errors.close()

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and the answer says why
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        code = self._process.wait()
        self._errors.seek(0)
        said = [text.strip() for text in self._errors.read().splitlines() if text.strip()]
        self.close()
        if code < 0:
            raise LoopFailed(f"killed by signal {-code}" + (", probably for memory" if code == -9 else ""))
        errors = [text for text in said if re.match(r"[\w.]+(Error|Exception)\b", text)]  # jax says more after it
        raise LoopFailed((errors or said or [f"exit status {code}"])[-1])
