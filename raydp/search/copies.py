"""What of a run directory may be copied elsewhere: what the search released, and nothing that it needs to go on.

The keys, the private store of random stopping, checkpoints (weights that were not released yet) and tracebacks never
leave the place where the search runs, so a copy is made from a list of what may go, not of what may not. A copy can be
read, reported and verified; it refuses to be driven, because the search that it shows goes on elsewhere, and what two
drivers spent would be written down by neither.

``python -m raydp.search.copies DIR`` writes a copy of DIR to standard output for :func:`raydp.cluster.receive`.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from raydp import cluster
from raydp.errors import InvalidValue, RaydpError
from raydp.search.earlier import COPIED
from raydp.search.results import Result
from raydp.search.run_directory import COPY, DEFINITION, JOURNAL, RunDirectory
from raydp.search.tracking import Tracker

#: Patterns below the run directory, in the order in which they are read: the journal first, so that a copy of a running
#: search has every ledger at least as far as its journal says.
RELEASED = (
    DEFINITION,
    JOURNAL,
    "search.py",
    "trials.parquet",
    "statement.json",
    "statement.txt",
    "report.html",
    "trials/*/config.json",
    "trials/*/plan.json",
    "trials/*/holdout-plan.json",
    "trials/*/seed-*/ledger*.jsonl",
    "trials/*/seed-*/holdout-ledger*.jsonl",
    "trials/*/seed-*/metrics.jsonl",
    "trials/*/seed-*/weights.pt",
    *(f"earlier/*/{name}" for name in COPIED),
)


def pack(directory: RunDirectory, archive: Path, *, source: str) -> None:
    """Write what may leave into a tar file, gzipped; ``source`` says in the copy where it came from."""
    with tarfile.open(archive, "w:gz") as tar:
        for name, path in _released(directory.path):
            content = path.read_bytes()  # at once: a file that is being appended to must not change under the archive
            if name.endswith(".jsonl"):
                content = content[: content.rfind(b"\n") + 1]  # a line that is being written is none yet
            _add(tar, name, content)
        _add(tar, COPY, json.dumps({"source": source, "id": directory.header["id"]}).encode())


def unpack(archive: Path, target: Path) -> RunDirectory:
    """The run directory that a packed copy makes at ``target``, which is new, empty, or an earlier copy of the same.

    Raises:
        InvalidValue: something else is there.
        RaydpError: the archive holds what a copy must not.
    """
    with tarfile.open(archive, "r:gz") as tar:
        members = tar.getmembers()
        allowed = [member for member in members if member.isfile() and _may_leave(member.name)]
        if len(allowed) != len(members):
            raise RaydpError(f"{archive} is no copy of a run directory. Fetch it again.")
        marker = tar.extractfile(COPY)
        assert marker is not None
        _require_room(target, json.loads(marker.read())["id"])
        target.mkdir(parents=True, exist_ok=True)
        tar.extractall(target, members=sorted(members, key=lambda member: member.name != COPY), filter="data")
    return RunDirectory.open(target)


def fetch(job_id: str, *, address: str, target: Path | None = None) -> Result:
    """Bring the run directory of a job to this machine, as far as it has come; fetching again brings what is new.

    Args:
        job_id: of a job, see :func:`raydp.cluster.jobs`.
        address: of the cluster's jobs API.
        target: where to; by default ``runs/`` and the name of the run directory on the cluster.

    Raises:
        UnknownName, InvalidValue: as :func:`raydp.cluster.find`, or something else is at ``target``.
        RaydpError: the run directory could not be sent.
    """
    job = cluster.find(job_id, address)
    path = target or Path("runs") / Path(job.storage).name
    with tempfile.TemporaryDirectory(prefix="raydp-fetch-") as directory:
        archive = Path(directory) / "copy.tar.gz"
        cluster.receive(job, address, archive, command=["raydp.search.copies"])
        copy = unpack(archive, path)
    if job.ended and all(event.get("tracking_uri") is None for event in copy.events() if event["event"] == "driver"):
        _track(copy)
    return Result.load(path)


def _track(copy: RunDirectory) -> None:
    """A tracker of the copy's own: that of the search stayed where it ran, and names artifacts by paths there."""
    tracker = Tracker(uri=None, directory=copy, experiment=str(copy.definition["name"]))
    try:
        tracker.synchronise()
    finally:
        tracker.close()


def _released(root: Path) -> Iterator[tuple[str, Path]]:
    for pattern in RELEASED:
        for path in sorted(root.glob(pattern)):
            if path.is_file() and not path.is_symlink():
                yield path.relative_to(root).as_posix(), path


def _may_leave(name: str) -> bool:
    return name == COPY or any(_matches(name, pattern) for pattern in RELEASED)


def _matches(name: str, pattern: str) -> bool:
    """As a glob of paths, in which ``*`` stays within its directory."""
    parts, wanted = Path(name).parts, Path(pattern).parts
    return len(parts) == len(wanted) and all(Path(a).match(b) for a, b in zip(parts, wanted, strict=True))


def _require_room(target: Path, search: str) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    try:
        there = json.loads((target / COPY).read_text(encoding="utf-8"))["id"]
    except (OSError, ValueError, KeyError, TypeError):
        there = None
    if there != search:
        raise InvalidValue("--out", str(target), "must be new or an earlier copy of the same search", "Choose another.")


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def main(arguments: list[str]) -> None:
    directory = RunDirectory.open(arguments[0])
    with tempfile.TemporaryDirectory(prefix="raydp-copy-") as temporary:
        archive = Path(temporary) / "copy.tar.gz"
        pack(directory, archive, source=str(directory.path))
        for line in cluster.send(archive):
            print(line)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RaydpError as error:
        sys.exit(str(error))
