"""Checkpoints survive crashes, damage and full disks, and never execute what they hold."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
from pathlib import Path

import pytest
import torch

from raydp.errors import CorruptFile, RaydpError
from raydp.training import checkpoint


def test_the_newest_is_loaded_and_two_are_kept(tmp_path: Path) -> None:
    for step in (3, 6, 9, 12):
        checkpoint.save(tmp_path, step, {"step": step, "weights": torch.full((3,), float(step))})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["checkpoint-000000009.pt", "checkpoint-000000012.pt"]
    state = checkpoint.load_latest(tmp_path)
    assert state is not None and state["step"] == 12 and torch.equal(state["weights"], torch.full((3,), 12.0))


@pytest.mark.parametrize("damage", ["torn", "flipped", "empty"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(tmp_path, 1, {"step": 1})
    path = checkpoint.save(tmp_path, 2, {"step": 2})
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes({"torn": bytes(content[:-20]), "flipped": bytes(content), "empty": b""}[damage])
    state = checkpoint.load_latest(tmp_path)
    assert state is not None and state["step"] == 1
    assert path.name in caplog.text


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    assert os.stat(checkpoint.save(tmp_path, 1, {"step": 1})).st_mode & 0o077 == 0


def test_pickled_code_is_not_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    path = checkpoint.save(tmp_path, 1, {"step": 1, "evil": Evil()})
    with pytest.raises(CorruptFile, match="does not hold tensors and plain values"):
        checkpoint.load(path)
    assert checkpoint.load_latest(tmp_path) is None
    for payload in (pickle.dumps(Evil()), pickle.dumps({"step": Evil()}, protocol=0), b"", b"PK\x03\x04"):
        _forge(path, payload)
        with pytest.raises(CorruptFile):
            checkpoint.load(path)
    assert not (tmp_path / "executed").exists()


def _forge(path: Path, payload: bytes) -> None:
    """A checkpoint whose checksum is right, whatever it holds."""
    path.write_bytes(b"raydp checkpoint 1 " + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)


@pytest.mark.parametrize("content", [[1, 2], {1: 2}, torch.zeros(2), None])
def test_what_is_no_state_is_refused(tmp_path: Path, content: object) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path = tmp_path / "checkpoint-000000001.pt"
    _forge(path, buffer.getvalue())
    with pytest.raises(CorruptFile, match="does not hold the state of a run"):
        checkpoint.load(path)


def test_a_full_disk_keeps_the_old_checkpoint_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, 1, {"step": 1})

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RaydpError, match=r"No space left.*raydp resume"):
            checkpoint.save(tmp_path, 2, {"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000000001.pt"]


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-000000001.pt").write_bytes(b"something else")
    with pytest.raises(CorruptFile, match="not a checkpoint"):
        checkpoint.load(tmp_path / "checkpoint-000000001.pt")
    assert checkpoint.load_latest(tmp_path) is None
