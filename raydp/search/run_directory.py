"""The run directory: everything that a search knows, in files whose loss or damage is noticed.

Layout (version 2)::

    raydp.json          layout version, id, definition of the search, software versions, time of creation
    journal.jsonl       one event a line, fsynced and chained: the truth about the trials (see raydp.search.records)
    lock                held by the one driver that may write
    search.py           a copy of the search's file, if it came from one
    trials.parquet      one row a trial, derived from the journal (see raydp.search.results)
    statement.json, statement.txt   what was spent, and what that leaves out (see raydp.search.statement)
    report.html         a page about the search (see raydp.search.report)
    trials/<key>/       config.json, plan.json
    trials/<key>/seed-<i>/   ledger.jsonl, metrics.jsonl, checkpoints
                        (of a private hold-out with a budget also holdout-plan.json and holdout-ledger.jsonl)
    earlier/<id>/       what earlier searches spent, from which this one goes on (see raydp.search.earlier)
    secrets/            mode 0700: noise keys of the trials that are not done
    private/            mode 0700: all trials of a search under random stopping, a run directory of its own (see
                        raydp.search.secrecy)
    tracking.json, mlflow.db, mlartifacts/   the tracker's (see raydp.search.tracking)

Only ``journal.jsonl``, the plans and the ledgers are needed to resume and to verify; the rest is derived from them.
A reader needs no lock and writes nothing. The journal's first line continues the content of ``raydp.json``, and each
line the one before it (:mod:`raydp.privacy.chain`), so an edited definition or journal is noticed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from raydp import _validate
from raydp.errors import CorruptFile, InvalidValue, RaydpError
from raydp.privacy import chain
from raydp.privacy.budget import Budget
from raydp.privacy.ledger import Ledger
from raydp.privacy.plan import Plan
from raydp.search.records import TrialRecord, finite, fold

LAYOUT = 2
#: Name of the field of the journal that says what a trial may release of a private hold-out under random stopping.
HELD = "holdout_trial_budget"
DEFINITION, JOURNAL, LOCK, SOURCE = "raydp.json", "journal.jsonl", "lock", "search.py"
EARLIER = "earlier"
COPY = "copy.json"  # marks a copy of what a search elsewhere released (see raydp.search.copies)
SOFTWARE = [
    "raydp-search",
    "torch",
    "opacus",
    "ray",
    "optuna",
    "mlflow",
    "dp-accounting",
    "prv-accountant",
    "numpy",
    "scipy",
    "pyarrow",
]


class RunDirectory:
    """A run directory that exists. Made by :meth:`create` or :meth:`open`.

    Attributes:
        path: absolute path.
        header: the content of raydp.json (``layout``, ``id``, ``created``, ``software``, ``definition``).
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self.header = dict(header)
        self._plans: dict[str, Plan] = {}  # by digest: plans are immutable, and records() is called after every trial

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], definition: Mapping[str, Any], *, source_file: Path | None = None
    ) -> RunDirectory:
        """A new run directory at ``path``, which must not exist or be empty.

        ``raydp.json`` is written last: a directory that has one is complete.

        Raises:
            InvalidValue: the directory is in use or ``path`` is a file.
            RaydpError: the disk is full, or the directory cannot be written.
        """
        root = cls.require_new(path)
        header = {
            "layout": LAYOUT,
            "id": uuid.uuid4().hex,
            "created": _now(),
            "software": _software(),
            "definition": dict(definition),
        }
        with _storage_errors(root):
            (root / "trials").mkdir(parents=True)
            (root / "secrets").mkdir(mode=0o700)
            os.chmod(root / "secrets", 0o700)  # whatever the umask
            (root / JOURNAL).touch()
            if source_file is not None:
                shutil.copyfile(source_file, root / SOURCE)
            directory = cls(root, header)
            directory.write_json(DEFINITION, header)
        return directory

    @staticmethod
    def require_new(path: str | os.PathLike[str]) -> Path:
        """The absolute path, if :meth:`create` could make a run directory there. Raises InvalidValue."""
        root = Path(path).absolute()
        if (root / DEFINITION).exists():
            raise InvalidValue(
                "storage", str(root), "must not hold a search already", f"Continue it with `raydp resume {root}`."
            )
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise InvalidValue("storage", str(root), "must be new or empty", "Choose another directory.")
        return root

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """The run directory at ``path``; nothing is written.

        Raises:
            InvalidValue: there is no run directory.
            CorruptFile: raydp.json is damaged, or of another layout version.
        """
        root = Path(path).absolute()
        try:
            text = (root / DEFINITION).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError) as error:
            found = f"it has no {DEFINITION}" if root.is_dir() else "there is none of that name"
            raise InvalidValue(
                "run directory",
                str(root),
                f"must be a directory that raydp made ({found})",
                "Pass the directory that `raydp run` printed.",
            ) from error
        except UnicodeDecodeError as error:
            raise CorruptFile(f"{root / DEFINITION} is damaged ({error}); restore it from a copy.") from error
        try:
            header = _validate.json_object(text)
        except ValueError as error:
            raise CorruptFile(f"{root / DEFINITION} is damaged ({error}); restore it from a copy.") from error
        layout = header.get("layout", LAYOUT)
        if layout != LAYOUT:
            raise CorruptFile(
                f"{root} has layout version {layout!r}, this raydp reads version {LAYOUT}. Open it with the raydp that "
                f"wrote it ({_written_by(header)}), or start a new search."
            )
        missing = [name for name in ("layout", "definition", "id") if name not in header]
        if missing:
            raise CorruptFile(
                f"{root / DEFINITION} is damaged (it lacks {', '.join(missing)}); restore it from a copy."
            )
        if not isinstance(header["definition"], dict):
            raise CorruptFile(f"{root / DEFINITION} is damaged (definition is no object); restore it from a copy.")
        return cls(root, header)

    @property
    def definition(self) -> dict[str, Any]:
        """The definition of the search, as given to :meth:`create`."""
        definition: dict[str, Any] = self.header["definition"]
        return definition

    @property
    def secrets(self) -> Path:
        """The directory (mode 0700) of the noise keys."""
        return self.path / "secrets"

    def trial_directory(self, key: str) -> Path:
        """trials/<key>; the caller makes it."""
        if set(_validate.name("key", key)) == {"."}:  # '..' is made of allowed characters
            raise InvalidValue("key", key, "must name a trial", "Keys look like t0000.")
        return self.path / "trials" / key

    def run_path(self, key: str, seed: int) -> Path:
        """trials/<key>/seed-<i>; the caller makes it."""
        return self.trial_directory(key) / f"seed-{_validate.integer('seed', seed, low=0)}"

    def runs(self, key: str) -> list[tuple[int, Path]]:
        """(seed, path) of the runs of a trial that have a directory, by seed."""
        found = []
        for path in self.trial_directory(key).glob("seed-*"):
            suffix = path.name.removeprefix("seed-")
            if suffix.isdecimal() and path.is_dir():
                found.append((int(suffix), path))
        return sorted(found)

    def trial_keys(self) -> list[str]:
        """Keys of the trials that have a directory, whether the journal knows them or not."""
        trials = self.path / "trials"
        if not trials.is_dir():
            return []
        return sorted(path.name for path in trials.glob("t[0-9]*") if path.is_dir())

    # Writing: by the one driver that holds the lock.

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only driver of this directory for the length of the block.

        The lock dies with the process that holds it, however it dies.

        Raises:
            RaydpError: another driver holds it (its process id is named), the file system has no locks, or this is a
                copy of a search that is driven elsewhere.
        """
        if (self.path / COPY).exists():
            raise RaydpError(
                f"{self.path} is a copy, without keys, of a search that ran elsewhere ({COPY} says where); it can be "
                "read, reported and verified. Go on with the search itself: raydp submit."
            )
        with _storage_errors(self.path):
            handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(handle, 64, 0).decode("ascii", "replace").strip() or "unknown"
                raise RaydpError(
                    f"{self.path} is being driven by another process ({holder}). Wait for it, or stop it and then "
                    f"`raydp resume {self.path}`."
                ) from error
            except OSError as error:
                raise RaydpError(
                    f"{self.path / LOCK} cannot be locked ({error.strerror}); the file system must support flock. "
                    "Choose a run directory on a local disk."
                ) from error
            with _storage_errors(self.path):
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"pid {os.getpid()} on {platform.node()}\n".encode(), 0)
            yield
            os.ftruncate(handle, 0)
        finally:
            os.close(handle)  # releases the lock; the file stays, for removing it would race with the next driver

    def append(self, event: Mapping[str, Any]) -> None:
        """Write one event, with a time stamp, as one line; durable on return.

        Non-finite values in ``metrics`` are written as null (JSON has no NaN). A half line that a crash left at the
        end is cut off first. If the disk is full, the file is as it was before the call.

        Raises:
            InvalidValue: the event has no name or does not fit into JSON.
            RaydpError: the line could not be written.
        """
        record = {"time": _now(), **event}
        if not isinstance(record.get("event"), str):
            raise InvalidValue("event", record.get("event"), "must be a string", "Name the event.")
        if isinstance(record.get("metrics"), Mapping):
            record["metrics"] = {name: [finite(v) for v in values] for name, values in record["metrics"].items()}
        _dumps(record)
        journal = self.path / JOURNAL
        with _storage_errors(journal):
            handle = os.open(journal, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                size = _cut_torn_line(handle)
                line, _ = chain.link(record, self._head(handle, size))
                try:
                    if os.write(handle, line) != len(line):
                        raise OSError(errno.ENOSPC, "the line was written in part only")
                    os.fsync(handle)
                except OSError:
                    os.ftruncate(handle, size)
                    raise
            finally:
                os.close(handle)

    def stamp(self) -> None:
        """Write the present as the time of creation, where the time that a search took is a secret.

        Raises:
            RaydpError: the journal has begun, and continues the header as it was.
        """
        if self.events():
            raise RaydpError(f"{self.path} has events, which continue its header as it is; it cannot be stamped anew.")
        self.header["created"] = _now()
        self.write_json(DEFINITION, self.header)

    def write_json(self, path: str | os.PathLike[str], obj: Any, *, indent: int | None = 2) -> Path:
        """Write ``obj`` as JSON, atomically and durably: a reader sees the old file or the new one.

        ``path`` is relative to the run directory; missing parents are made. Without an indent it is written many times
        as fast.
        """
        target = self.path / path
        text = _dumps(obj, indent=indent) + "\n"
        with _storage_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(target) as temporary:
                temporary.write_text(text, encoding="utf-8")
        return target

    # Reading: by anyone.

    def events(self) -> list[dict[str, Any]]:
        """All events of the journal. A torn last line (a crash in the middle of a write) is left out.

        Raises:
            CorruptFile: any other line cannot be read, or is not the one that was written there; its number is named.
        """
        return [event for event, _ in self.chained_events()]

    def chained_events(self) -> list[tuple[dict[str, Any], str]]:
        """(event, digest of the chain up to it) of all events of the journal. Raises as :meth:`events`."""
        found: list[tuple[dict[str, Any], str]] = []
        head = self._start
        for number, line in _lines(self.path / JOURNAL):
            try:
                event, head = chain.follow(line, head)
            except chain.BrokenChain as error:
                first = f" ({DEFINITION}, for the first line)" if number == 1 else ""
                raise CorruptFile(
                    f"{self.path / JOURNAL}, line {number} is not the one that was written{first}: {error}. "
                    "Restore the directory."
                ) from error
            except ValueError as error:
                raise _damaged(self.path / JOURNAL, number, line, error) from error
            found.append((event, head))
        return found

    def heads(self, key: str, file: str = "ledger.jsonl") -> dict[str, str | None]:
        """Seed (as text) -> head of the ledger in that file of that run of the trial; None for a damaged ledger."""
        found: dict[str, str | None] = {}
        for seed, path in self.runs(key):
            ledger = path / file
            if ledger.exists():
                try:
                    found[str(seed)] = Ledger.read(ledger).head
                except CorruptFile:
                    found[str(seed)] = None
        return found

    def records(self) -> dict[str, TrialRecord]:
        """Trial key -> record, in the order of the trials' numbers.

        Raises:
            CorruptFile: the journal or a plan is damaged, or a plan is not the one that the journal speaks of.
        """
        return fold(self.events(), self._plan_of)

    def plan(self, key: str, file: str = "plan.json") -> Plan | None:
        """The plan in a file of trials/<key>, or None if there is no such file. Raises CorruptFile."""
        path = self.trial_directory(key) / file
        try:
            return Plan.from_json(_validate.json_object(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptFile(f"{path} is damaged: {error}. Restore it from a copy.") from error

    @property
    def _start(self) -> str:
        """What the first line of the journal continues."""
        return chain.start(_dumps(self.header))

    def _head(self, handle: int, size: int) -> str:
        """The digest of the journal's last line."""
        if size == 0:
            return self._start
        block = 4096
        while b"\n" not in (tail := os.pread(handle, block, max(0, size - block))[:-1]) and block < size:
            block *= 2
        try:
            return str(_validate.json_object(tail.rpartition(b"\n")[2])[chain.FIELD])
        except (ValueError, KeyError) as error:
            journal = self.path / JOURNAL
            raise CorruptFile(f"{journal}: its last line is damaged ({error}). Restore the file.") from error

    def _plan_of(self, key: str, digest: str) -> Plan | None:
        if digest not in self._plans:
            plan = self.plan(key)
            if plan is None:
                return None
            if plan.digest != digest:
                raise CorruptFile(
                    f"{self.trial_directory(key) / 'plan.json'} has digest {plan.digest[:12]}…, the journal says "
                    f"{digest[:12]}…: the plan was exchanged after it was proposed. Restore it from a copy."
                )
            self._plans[digest] = plan
        return self._plans[digest]


def trial_budget(directory: RunDirectory, field: str = "trial_budget") -> Budget | None:
    """The budget of a trial that the journal of a search under random stopping states; None for other searches.

    Args:
        field: :data:`HELD` for what a trial may release of a private hold-out.
    """
    for event in directory.events():
        if event["event"] == "selection" and event.get(field) is not None:
            return Budget.from_json(event[field])
    return None


def free_directory(name: str) -> Path:
    """``runs/name-1``, or with the first number that is free."""
    number = 1
    while (path := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return path


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a JSON-lines file; a last line without a line feed is a write that never ended, and left out.

    Raises:
        CorruptFile: another line is not a JSON object; the line number (from 1) is named.
    """
    records = []
    for number, line in _lines(path):
        try:
            records.append(_validate.json_object(line))
        except ValueError as error:
            raise _damaged(path, number, line, error) from error
    return records


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of a file, without what follows its last line feed; none for a missing file."""
    with contextlib.suppress(FileNotFoundError):
        yield from enumerate(path.read_bytes().split(b"\n")[:-1], start=1)


def _damaged(path: Path, number: int, line: bytes, error: ValueError) -> CorruptFile:
    return CorruptFile(f"{path}, line {number} is damaged ({error}): {line[:80]!r}. Restore the file.")


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """A temporary path beside ``target`` that replaces it, durably, when the block ends without an exception."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        _fsync(temporary)
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide the file from the people who share the directory
        os.replace(temporary, target)
        _fsync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cut_torn_line(handle: int) -> int:
    """Cut what follows the last line feed; the size that is left."""
    size = os.fstat(handle).st_size
    end, block = size, 4096
    while end > 0:
        start = max(0, end - block)
        feed = os.pread(handle, end - start, start).rfind(b"\n")
        if feed >= 0:
            end = start + feed + 1
            break
        end = start
    if end != size:
        os.ftruncate(handle, end)
    return end


@contextlib.contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a message that says where and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "The disk is full: free some space, then `raydp resume` the run directory."
        else:
            remedy = "Check that the directory exists and can be written, then `raydp resume` it."
        raise RaydpError(f"{path} could not be written ({error.strerror or error}). {remedy}") from error


def _dumps(obj: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(obj, allow_nan=False, indent=indent)
    except (TypeError, ValueError) as error:
        raise InvalidValue("record", obj, f"must fit into JSON ({error})", "Use plain finite values.") from error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _software() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in SOFTWARE:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _written_by(header: Mapping[str, Any]) -> str:
    software = header.get("software")
    version = software.get("raydp-search") if isinstance(software, Mapping) else None
    return f"raydp-search {version}" if version else "version unknown"
