"""A real Ray head of a test's own: own ports, own directory, a token; ended by the ids of what it started."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import requests

from raydp import cluster
from raydp.errors import InvalidValue

_PATIENCE = 120.0


@dataclass(frozen=True, kw_only=True)
class Head:
    """A head that answers.

    Attributes:
        address: of its jobs API.
        token: what it asks for.
        process: which everything else of it descends from.
    """

    address: str
    token: str
    process: psutil.Process

    def driver_of(self, storage: Path) -> psutil.Process | None:
        """The process that drives the search in that run directory."""
        for child in self.process.children(recursive=True):
            try:
                command = child.cmdline()
            except psutil.NoSuchProcess:
                continue
            if str(storage) in command and "raydp" in command:
                return child
        return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def ray_head(*, cpus: int = 2) -> Iterator[Head]:
    """A head node with the jobs API and token authentication, which nobody else on the machine finds by accident."""
    directory = Path(tempfile.mkdtemp(prefix="rh-", dir="/tmp"))  # short: sockets lie below it
    token, port = secrets.token_hex(32), free_port()
    environment = {**os.environ, "RAY_TMPDIR": str(directory), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    environment.pop("RAY_ADDRESS", None)
    ray = Path(sys.executable).with_name("ray")
    command = [str(ray), "start", "--head", f"--port={free_port()}", f"--num-cpus={cpus}", "--block"]
    command += ["--include-dashboard=true", f"--dashboard-port={port}", "--disable-usage-stats"]
    command += ["--object-store-memory=200000000"]
    with (directory / "log").open("wb") as log:
        started = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    root = psutil.Process(started.pid)
    before = {name: os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")}
    os.environ["RAY_AUTH_TOKEN"] = token
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                if cluster.connect(address).interpreter is not None:
                    break
            except (InvalidValue, requests.RequestException):
                pass
            if time.monotonic() > deadline or started.poll() is not None:
                raise AssertionError(f"no head\n{(directory / 'log').read_text()[-3000:]}")
            time.sleep(0.5)
        yield Head(address=address, token=token, process=root)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        everything = [*root.children(recursive=True), root]
        for process in everything:
            try:
                process.terminate()
            except psutil.NoSuchProcess:
                continue
        _, alive = psutil.wait_procs(everything, timeout=20)
        for process in alive:
            process.kill()  # psutil refuses if the id belongs to another process by now
        started.wait(_PATIENCE)
        shutil.rmtree(directory, ignore_errors=True)
