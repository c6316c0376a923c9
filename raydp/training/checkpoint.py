"""Checkpoints: atomic, durable, checksummed, loaded without executing anything.

A checkpoint is one file: a header line with the SHA-256 of the payload, then ``torch.save`` of tensors and plain
values.
It is written to a scratch name, fsynced and renamed, so that a crash leaves the old one. The last two are kept; a
damaged
newest one falls back to the one before, which is safe because replayed steps draw the same batches and noise.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from raydp.errors import CorruptFile, RaydpError

_MAGIC = b"raydp checkpoint 1 "
_KEEP = 2
logger = logging.getLogger(__name__)


def save(directory: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the checkpoint of logical step ``step`` durably, then drop all but the last two.

    Raises:
        RaydpError: the disk is full or not writable; the checkpoints that were there are untouched.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getvalue()
    path = directory / f"checkpoint-{step:09d}.pt"
    scratch = path.with_suffix(".tmp")
    try:
        with open(scratch, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(_MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n")
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
        _sync_directory(directory)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise RaydpError(
            f"checkpoint {path} could not be written ({error.strerror}). Free some space and run `raydp resume`; "
            "the trial goes on from the checkpoint before."
        ) from error
    for old in _newest_first(directory)[_KEEP:]:
        old.unlink()
    return path


def load_latest(directory: Path, *, device: str = "cpu") -> dict[str, Any] | None:
    """The state of the newest undamaged checkpoint, or None if there is none. Damaged ones are named in a warning."""
    for path in _newest_first(directory):
        try:
            return load(path, device=device)
        except CorruptFile as error:
            logger.warning("%s Falling back to the checkpoint before it.", error)
    return None


def load(path: Path, *, device: str = "cpu") -> dict[str, Any]:
    """The state in one checkpoint file, its tensors on the CPU, or, if they were on a GPU, on ``device``.

    Raises:
        CorruptFile: the file is torn, altered, of another layout, or holds anything but tensors and plain values.
            Nothing of what it holds is executed.
    """
    content = path.read_bytes()
    header, separator, payload = content.partition(b"\n")
    if not separator or not header.startswith(_MAGIC):
        raise CorruptFile(f"{path} is not a checkpoint of layout 1.")
    if hashlib.sha256(payload).hexdigest().encode() != header[len(_MAGIC) :]:
        raise CorruptFile(f"{path} does not match its checksum.")
    try:
        state = torch.load(io.BytesIO(payload), map_location=placing(device), weights_only=True)
    # torch's reader fails on hostile input in ways that it does not list: EOFError, KeyError, RuntimeError, ….
    except Exception as error:
        raise CorruptFile(f"{path} does not hold tensors and plain values ({type(error).__name__}).") from error
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise CorruptFile(f"{path} does not hold the state of a run.")
    return state


def placing(device: str) -> Callable[[Any, str], Any]:
    """Where tensors are put that are read: those of a GPU (another one, or on another machine) on ``device``."""

    def place(storage: torch.UntypedStorage, location: str) -> Any:
        return storage if location == "cpu" or device == "cpu" else storage.cuda(torch.device(device))

    return place


def remove(directory: Path) -> None:
    """Delete all checkpoints of a finished run."""
    for path in _newest_first(directory):
        path.unlink()


def _newest_first(directory: Path) -> list[Path]:
    return sorted(directory.glob("checkpoint-*.pt"), reverse=True)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
