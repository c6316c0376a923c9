"""Looks at this machine as a search would find it, and says what to do about what it finds."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from raydp.errors import RaydpError
from raydp.search.run_directory import SOFTWARE

STATUSES = ("ok", "warn", "fail")
_GIGABYTE = 1e9
_SECONDS = 90  # for a local cluster to start and answer
_SKEW = 2.0  # seconds that a file's time may differ from the clock

_START_RAY = """
import logging, os, sys, ray
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
address = sys.argv[1] or None
options = {} if address else {"num_cpus": 1, "include_dashboard": False}
ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
assert ray.get(ray.remote(lambda: 1).remote(), timeout=60) == 1
print("cluster", ray.cluster_resources().get("CPU", 0), ray.cluster_resources().get("GPU", 0))
ray.shutdown()
"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor.

    Attributes:
        name: what was looked at.
        status: ``ok``; ``warn``: a search runs, but worse than it could; ``fail``: it would not run.
        found: what is there.
        advice: what to do; empty when ok.
    """

    name: str
    status: str
    found: str
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        """Every field."""
        return asdict(self)


def examine(*, tracking_uri: str | None = None, address: str | None = None, quick: bool = False) -> list[Finding]:
    """Look at Python, the packages, processors, memory, disk, clocks, GPUs, Ray and the tracker.

    Args:
        tracking_uri: of an MLflow server to ask; None tries a database in a temporary directory.
        address: of a Ray cluster to ask; None starts one on this machine and ends it again.
        quick: leave out Ray and the tracker, which take seconds each.

    Returns:
        One finding each, in that order. Nothing is left behind.
    """
    checks: list[Callable[[], Finding]] = [
        _python,
        _packages,
        _namesake,
        _threads,
        _memory,
        _shared_memory,
        _disk,
        _locks,
        _clocks,
        _open_files,
        _gpus,
    ]
    if not quick:
        checks += [lambda: _ray(address), lambda: _tracker(tracking_uri)]
    return [check() for check in checks]


def _python() -> Finding:
    # An older one cannot import this file, and pip refuses to install it there.
    return Finding(name="Python", status="ok", found=f"{platform.python_version()} at {sys.executable}")


def _packages() -> Finding:
    """The versions of what a search computes with, against what raydp asks for."""
    from packaging.requirements import Requirement

    missing, wrong, found = [], [], []
    try:
        wanted = [Requirement(text) for text in importlib.metadata.requires("raydp-search") or ()]
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            name="packages",
            status="warn",
            found="raydp is imported from its sources; it is not installed",
            advice="Install it with `pip install .`, so that its dependencies are checked.",
        )
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(requirement.name)
            continue
        if requirement.name in SOFTWARE:
            found.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} (wants {requirement.specifier})")
    if missing:
        listed = ", ".join(missing)
        return Finding(
            name="packages", status="fail", found=f"missing: {listed}", advice="Install raydp again: `pip install .`"
        )
    if wrong:
        return Finding(
            name="packages", status="warn", found=", ".join(wrong), advice="Install the versions that raydp asks for."
        )
    return Finding(name="packages", status="ok", found=", ".join(found))


def _namesake() -> Finding:
    """The index has another project called raydp (Spark on Ray), which has the same import name."""
    try:
        version = importlib.metadata.version("raydp")
    except importlib.metadata.PackageNotFoundError:
        return Finding(name="namesake", status="ok", found="no other package called raydp")
    return Finding(
        name="namesake",
        status="fail",
        found=f"the package raydp {version} (Spark on Ray), which has the same import name",
        advice="Use an environment without it: `pip uninstall raydp`, then `pip install .` again.",
    )


def _cpus() -> int:
    """Cores that this process may use: of the affinity mask and of a container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # not in a container with such a file
        return count
    return count


def _threads() -> Finding:
    import torch

    usable, cores, threads = _cpus(), os.cpu_count() or 1, torch.get_num_threads()
    found = f"{usable} usable of {cores} cores; torch {torch.__version__} computes with {threads} threads"
    if usable < cores:
        return Finding(
            name="processors",
            status="warn",
            found=found,
            advice=f"Ray would count {cores}: run with --set resources.total_cpus={usable}.",
        )
    return Finding(name="processors", status="ok", found=found)


def _memory() -> Finding:
    free = psutil.virtual_memory().available / _GIGABYTE
    found = f"{free:.1f} GB free of {psutil.virtual_memory().total / _GIGABYTE:.1f} GB"
    if free < 2:
        advice = "A trial takes about 1 GB: end other programs, or set resources.max_concurrent=1."
        return Finding(name="memory", status="warn", found=found, advice=advice)
    return Finding(name="memory", status="ok", found=found)


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding(name="shared memory", status="ok", found="no /dev/shm on this system; Ray uses files")
    total = shutil.disk_usage(path).total / _GIGABYTE
    if total < 1:
        return Finding(
            name="shared memory",
            status="warn",
            found=f"{total:.2f} GB at /dev/shm",
            advice="Ray falls back to slow files: start the container with --shm-size=2g or more.",
        )
    return Finding(name="shared memory", status="ok", found=f"{total:.1f} GB at /dev/shm")


def _disk() -> Finding:
    """Free space where run directories and where Ray's sessions go."""
    places = {str(Path.cwd()): Path.cwd(), tempfile.gettempdir(): Path(tempfile.gettempdir())}
    free = {name: shutil.disk_usage(path).free / _GIGABYTE for name, path in places.items()}
    found = ", ".join(f"{size:.1f} GB free at {name}" for name, size in free.items())
    least = min(free.values())
    if least < 0.5:
        return Finding(name="disk", status="fail", found=found, advice="Free at least 0.5 GB, or work elsewhere.")
    if least < 5:
        return Finding(name="disk", status="warn", found=found, advice="Long searches keep checkpoints: free 5 GB.")
    return Finding(name="disk", status="ok", found=found)


def _locks() -> Finding:
    """Run directories need locks and durable writes; some network file systems have neither."""
    here = Path.cwd()
    try:
        with tempfile.TemporaryFile(dir=here) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            begun = time.perf_counter()
            for _ in range(3):
                file.write(b"0123456789")
                file.flush()
                os.fsync(file.fileno())
            took = (time.perf_counter() - begun) / 3
    except OSError as error:
        return Finding(
            name="file system",
            status="fail",
            found=f"{here} cannot be written and locked ({error.strerror})",
            advice="Work in a directory on a local disk, or give one with --storage.",
        )
    found = f"{here} has locks; a durable write takes {1e3 * took:.1f} ms"
    if took > 0.2:
        advice = "Checkpoints will be slow: choose a local disk with --storage."
        return Finding(name="file system", status="warn", found=found, advice=advice)
    return Finding(name="file system", status="ok", found=found)


def _clocks() -> Finding:
    """The journal's times and the tracker's come from this clock; files' times from the file system's."""
    try:
        with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
            file.write(b"0")
            file.flush()
            skew = os.stat(file.name).st_mtime - time.time()
    except OSError as error:
        found = f"not compared ({error.strerror})"
        return Finding(name="clocks", status="warn", found=found, advice="Work in a directory that can be written.")
    found = f"{time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}; the file system differs by {skew:+.1f} s"
    if abs(skew) > _SKEW or time.gmtime().tm_year < 2025:
        advice = "Set the clock (systemd-timesyncd, chrony): times in the journal and in MLflow would be wrong."
        return Finding(name="clocks", status="warn", found=found, advice=advice)
    return Finding(name="clocks", status="ok", found=found)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        fix = f"Run `ulimit -n {min(hard, 65536) if hard > 0 else 65536}` before a search on many cores."
        return Finding(name="open files", status="warn", found=f"at most {soft}", advice=fix)
    return Finding(name="open files", status="ok", found=f"at most {soft}")


def _gpus() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = [
            f"{torch.cuda.get_device_name(index)}, {torch.cuda.get_device_properties(index).total_memory / 1e9:.0f} GB"
            for index in range(torch.cuda.device_count())
        ]
        return Finding(name="GPUs", status="ok", found="; ".join(names) + " (use resources.gpus_per_worker)")
    if shutil.which("nvidia-smi"):
        return Finding(
            name="GPUs",
            status="warn",
            found=f"nvidia-smi is there, but torch {torch.__version__} sees no GPU",
            advice="Install a torch built for CUDA, or repair the driver; otherwise trials train on the CPU.",
        )
    return Finding(name="GPUs", status="ok", found="none; trials train on the CPU")


def _ray(address: str | None) -> Finding:
    """Start (or reach) a cluster in a process of its own and let it compute something."""
    what = f"the cluster at {address}" if address else "a cluster on this machine"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _START_RAY, address or ""], capture_output=True, text=True, timeout=_SECONDS
        )
        line = re.search(r"^cluster (\S+) (\S+)$", done.stdout, re.MULTILINE)
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    except subprocess.TimeoutExpired:
        line, last = None, f"no answer within {_SECONDS} s"
    version = importlib.metadata.version("ray")
    if line is None:
        advice = f"Check `ray status --address {address}`." if address else "Look into /tmp/ray/session_latest/logs."
        return Finding(name="Ray", status="fail", found=f"ray {version}: {what} does not work ({last})", advice=advice)
    found = f"ray {version}: {what} computes"
    return Finding(name="Ray", status="ok", found=f"{found}, {line[1]} CPU, {line[2]} GPU" if address else found)


def _tracker(uri: str | None) -> Finding:
    """Open the tracker as a search would."""
    from raydp.search.tracking import probe

    version = importlib.metadata.version("mlflow")
    with tempfile.TemporaryDirectory() as directory:
        try:
            probe(uri or f"sqlite:///{directory}/mlflow.db")
        except RaydpError as error:
            advice = "Start the server, or leave --tracking-uri out to track into the run directory."
            return Finding(name="tracker", status="fail", found=f"mlflow {version}: {error}", advice=advice)
    where = uri or "a database in the run directory"
    return Finding(name="tracker", status="ok", found=f"mlflow {version}: {where} can be opened")


__all__ = ["STATUSES", "Finding", "examine"]
