"""Searches as Ray jobs: one job a run directory, tried as often as it takes.

A Ray job runs once and dies with its cluster; retries are the submitter's business. So raydp's job is the run
directory: its id follows from the search's name and the storage, and each time that it has to be started anew is an
*attempt*, a Ray job of its own (``ID-1``, ``ID-2``, …). Submitting a job that is running starts nothing, and every
attempt runs ``raydp run``, which goes on with the search where the run directory holds it already.

Stopping a job is one Ctrl-C to its driver: trials end at their checkpoints, and the next attempt goes on from there.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ray.job_submission import JobDetails

from raydp import __version__
from raydp.cluster import package as packages
from raydp.cluster.connection import Connection, connect
from raydp.errors import InvalidValue, RaydpError, UnknownName

#: Where a job's search lies on the cluster unless said otherwise; a directory that all nodes see should be named.
RUNS = "~/raydp-runs"
STOP_SECONDS = 600  # that trials get to write a checkpoint after a stop, before Ray kills the driver
_JOB, _ATTEMPT, _FILE, _STORAGE, _CONTENT = "raydp_job", "raydp_attempt", "raydp_file", "raydp_storage", "raydp_content"
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
_FRAME = "raydp-copy "  # begins the lines in which a file comes back
_POLL = 1.0
_START_SECONDS = 60.0  # that a head may take until it has an agent to run jobs


@dataclass(frozen=True, kw_only=True)
class Job:
    """A search on a cluster, with its latest attempt.

    Attributes:
        id: of the job, which all attempts share.
        attempt: number of the latest attempt, from 1.
        submission: that attempt's id in Ray.
        status: of that attempt, in Ray's words: PENDING, RUNNING, STOPPED, SUCCEEDED, FAILED.
        message: what Ray says about it.
        file, storage: what was submitted, and the run directory on the cluster.
        started: seconds since 1970, or None.
        content: digest of the file and its options.
    """

    id: str
    attempt: int
    submission: str
    status: str
    message: str
    file: str
    storage: str
    started: float | None
    content: str = field(repr=False, default="")

    @property
    def ended(self) -> bool:
        return self.status in _ENDED

    def to_json(self) -> dict[str, Any]:
        names = ("id", "attempt", "submission", "status", "message", "file", "storage", "started")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What became of a submission.

    Attributes:
        job: the job as it is now.
        outcome: ``started`` (a first attempt), ``resumed`` (a further one), ``attached`` (it was running already) or
            ``complete`` (it has nothing left to do).
        package: what was sent, in words; None where nothing was.
    """

    job: Job
    outcome: str
    package: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"outcome": self.outcome, "package": self.package, "job": self.job.to_json()}


def submit(
    file: Path,
    *,
    name: str,
    address: str,
    storage: str | None = None,
    working_dir: Path | None = None,
    excludes: Sequence[str] = (),
    options: Sequence[str] = (),
    python: str | None = None,
    notify: Callable[[str], None] = lambda line: None,
) -> Submission:
    """Run a search file on a cluster, or attach to the job that runs it already.

    Args:
        file: of the search; inside the working directory.
        name: of the search, for the job's id.
        address: of the cluster's jobs API.
        storage: run directory on the cluster; by default one below :data:`RUNS` whose name follows from the file's
            content and the options. It must be the same path on all nodes.
        working_dir: what is packed; by default the file's directory.
        excludes: further names or patterns to leave out.
        options: of ``raydp run``.
        python: interpreter on the cluster; by default that of its workers.
        notify: told what is about to happen, line by line.

    Raises:
        InvalidValue: everything that is wrong with the cluster, the token, the versions, the working directory or the
            storage, before anything is packed.
        RaydpError: the cluster refused the job.
    """
    root = (working_dir or file.parent).resolve()
    if not file.resolve().is_relative_to(root):
        raise InvalidValue("FILE", str(file), f"must lie in the working directory {root}", "Give --working-dir.")
    content = hashlib.sha256(file.read_bytes() + "\0".join(options).encode()).hexdigest()
    place = storage or f"{RUNS}/{name}-{content[:8]}"
    if not (place.startswith(("/", "~/")) and ".." not in PurePosixPath(place).parts):
        raise InvalidValue("--storage", place, "must be an absolute path on the cluster", "Write /shared/runs/NAME.")
    job_id = f"raydp-{name}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"

    connection = connect(address)
    connection.require_same_versions()
    interpreter = python or connection.interpreter
    if interpreter is None:
        raise InvalidValue(
            "--python", None, "must be given, for the cluster does not say which Python it uses", "Name its path."
        )
    known = {job.id: job for job in _listed(connection)}
    earlier = known.get(job_id)
    if earlier is not None:
        if earlier.content != content:
            raise InvalidValue(
                "--storage",
                place,
                f"is the run directory of job {job_id}, which was submitted from another file or with other options",
                "Choose another --storage, or submit what was submitted.",
            )
        if not earlier.ended:
            return Submission(job=earlier, outcome="attached")
        if earlier.status == "SUCCEEDED":
            return Submission(job=earlier, outcome="complete")
    attempt = 1 if earlier is None else earlier.attempt + 1

    package = packages.choose(root, excludes=excludes)
    described = package.describe()
    notify(described)
    relative = file.resolve().relative_to(root).as_posix()
    command = [interpreter, "-m", "raydp", "run", relative, "--address", "auto", *options]
    entrypoint = f"exec {shlex.join(command)} --storage {_shell_path(place)}"
    notify(f"{connection.address} (Ray {connection.ray_version}, Python {connection.python_version}): {entrypoint}")
    submission = f"{job_id}-{attempt}"
    with tempfile.TemporaryDirectory(prefix="raydp-submit-") as directory:
        archive = package.write(Path(directory))
        notify(f"sending {archive.stat().st_size / 2**20:.1f} MiB")
        try:
            _start(
                connection,
                entrypoint=entrypoint,
                submission_id=submission,
                runtime_env={
                    "working_dir": str(archive),
                    "env_vars": {
                        "RAY_JOB_STOP_SIGNAL": "SIGINT",
                        "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS),
                        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # workers run under the named interpreter too
                    },
                },
                metadata={
                    _JOB: job_id,
                    _ATTEMPT: str(attempt),
                    _FILE: relative,
                    _STORAGE: place,
                    _CONTENT: content,
                    "raydp_package": package.digest(),
                    "raydp_version": __version__,
                },
            )
        except RuntimeError as error:
            running = {job.id: job for job in _listed(connection)}.get(job_id)
            if running is not None and running.attempt >= attempt:  # somebody else submitted it at the same time
                return Submission(job=running, outcome="attached")
            raise RaydpError(f"{connection.address} refused the job: {error}") from error
    started = {job.id: job for job in _listed(connection)}[job_id]
    return Submission(job=started, outcome="started" if attempt == 1 else "resumed", package=described)


def jobs(address: str) -> list[Job]:
    """The searches that were submitted to a cluster, the latest first. Raises as :func:`connect`."""
    return _listed(connect(address))


def find(job_id: str, address: str) -> Job:
    """A job by its id, or by that of its latest attempt.

    Raises:
        UnknownName: there is none; near ids are suggested.
        InvalidValue: as :func:`connect`.
    """
    return _find(connect(address), job_id)


def logs(job_id: str, address: str) -> str:
    """What the latest attempt's driver has printed so far. Raises as :func:`find`."""
    connection = connect(address)
    return str(connection.client.get_job_logs(_find(connection, job_id).submission))


async def follow(job_id: str, address: str) -> AsyncIterator[str]:
    """What the latest attempt's driver prints, from the beginning until it ends. Raises as :func:`find`."""
    connection = connect(address)
    async for text in connection.client.tail_job_logs(_find(connection, job_id).submission):
        yield text


def stop(job_id: str, address: str, *, timeout: float = 120.0) -> Job:
    """End a job as one Ctrl-C would, and wait until it has ended; submitting it again goes on with it.

    Returns:
        The job; not ended if its trials need longer than ``timeout`` seconds for their checkpoints.

    Raises:
        UnknownName, InvalidValue: as :func:`find`.
        RaydpError: the cluster refused.
    """
    connection = connect(address)
    job = _find(connection, job_id)
    if job.ended:
        return job
    try:
        connection.client.stop_job(job.submission)
    except RuntimeError as error:
        raise RaydpError(f"{connection.address} did not stop {job.id}: {error}") from error
    return _wait(connection, job.id, timeout)


def receive(job: Job, address: str, target: Path, *, command: Sequence[str], timeout: float = 3600.0) -> None:
    """Run ``python -m COMMAND STORAGE`` on the cluster, and write the file that it sends to ``target``.

    The file comes back through the log of a small job of its own, in lines made by :func:`send`, and is checked against
    its digest: the jobs API has no other way to this machine.

    Raises:
        RaydpError: the command failed, or the file is not whole; the end of the log is shown.
        InvalidValue: as :func:`connect`.
    """
    connection = connect(address)
    details = connection.client.get_job_info(job.submission)
    helper = f"raydp-copy-{time.time_ns():x}"
    interpreter = shlex.split(details.entrypoint)[1]  # after "exec"
    _start(
        connection,
        entrypoint=f"exec {shlex.join([interpreter, '-m', *command])} {_shell_path(job.storage)}",
        submission_id=helper,
        runtime_env={"working_dir": (details.runtime_env or {})["working_dir"]},
        metadata={},
    )
    deadline = time.monotonic() + timeout
    while (status := str(connection.client.get_job_status(helper).value)) not in _ENDED:
        if time.monotonic() > deadline:
            connection.client.stop_job(helper)
            raise RaydpError(f"{connection.address} did not send {job.storage} within {timeout:g} s. Try again.")
        time.sleep(_POLL)
    lines = _lines_of(connection, helper)
    digest = hashlib.sha256()
    last: str | None = None
    said: list[str] = []
    try:
        with target.open("wb") as file:
            for line in lines:
                if not line.startswith(_FRAME):
                    said = [*said[-4:], line]
                    continue
                if last is not None:
                    content = base64.b64decode(last, validate=True)
                    digest.update(content)
                    file.write(content)
                last = line.removeprefix(_FRAME)
    except binascii.Error as error:
        raise RaydpError(f"what {connection.address} sent of {job.storage} is damaged ({error}). Try again.") from error
    if status != "SUCCEEDED" or last is None:
        raise RaydpError(f"{connection.address} could not send {job.storage}: {' '.join(said) or status}")
    if digest.hexdigest() != last:
        raise RaydpError(f"what {connection.address} sent of {job.storage} is not whole. Try again.")
    with contextlib.suppress(RuntimeError):  # it is of no use any more; a cluster that keeps it does no harm
        connection.client.delete_job(helper)


def send(file: Path) -> Iterator[str]:
    """The lines to print for :func:`receive`: the file in pieces, and its digest."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(48 * 1024):
            digest.update(piece)
            yield _FRAME + base64.b64encode(piece).decode("ascii")
    yield _FRAME + digest.hexdigest()


def _start(
    connection: Connection,
    *,
    entrypoint: str,
    submission_id: str,
    runtime_env: dict[str, Any],
    metadata: dict[str, str],
) -> None:
    """Submit a Ray job, with patience for a head that has just been started. Raises RuntimeError as Ray does."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            connection.client.submit_job(
                entrypoint=entrypoint, submission_id=submission_id, runtime_env=runtime_env, metadata=metadata
            )
            return
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(_POLL)


def _lines_of(connection: Connection, submission: str) -> Iterator[str]:
    """The lines that an ended job has printed, a few at a time: a run directory may be larger than the memory."""
    loop = asyncio.new_event_loop()  # of our own, in a thread of our own: a notebook's thread has one that runs
    with ThreadPoolExecutor(1) as thread:
        chunks = connection.client.tail_job_logs(submission).__aiter__()
        rest = ""
        try:
            while True:
                try:
                    text = thread.submit(loop.run_until_complete, anext(chunks)).result()
                except StopAsyncIteration:
                    break
                *lines, rest = (rest + text).split("\n")
                yield from lines
        finally:
            thread.submit(loop.run_until_complete, loop.shutdown_asyncgens()).result()
            loop.close()
    if rest:
        yield rest


def _listed(connection: Connection) -> list[Job]:
    """The latest attempt of each search."""
    found: dict[str, Job] = {}
    for details in connection.client.list_jobs():
        job = _job(details)
        if job is not None and (job.id not in found or found[job.id].attempt < job.attempt):
            found[job.id] = job
    return sorted(found.values(), key=lambda job: -(job.started or 0.0))


def _job(details: JobDetails) -> Job | None:
    """A Ray job as ours; None if it is somebody else's."""
    metadata = details.metadata or {}
    if _JOB not in metadata or details.submission_id is None:
        return None
    return Job(
        id=metadata[_JOB],
        attempt=int(metadata[_ATTEMPT]),
        submission=details.submission_id,
        status=str(details.status.value),
        message=details.message or "",
        file=metadata[_FILE],
        storage=metadata[_STORAGE],
        started=None if details.start_time is None else details.start_time / 1000,
        content=metadata[_CONTENT],
    )


def _find(connection: Connection, job_id: str) -> Job:
    jobs = {job.id: job for job in _listed(connection)}
    for job in jobs.values():
        if job_id in (job.id, job.submission):
            return job
    raise UnknownName("job", job_id, jobs)


def _wait(connection: Connection, job_id: str, timeout: float) -> Job:
    deadline = time.monotonic() + timeout
    while not (job := _find(connection, job_id)).ended and time.monotonic() < deadline:
        time.sleep(_POLL)
    return job


def _shell_path(path: str) -> str:
    """The path as the cluster's shell reads it; ``~`` is the home directory there."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
