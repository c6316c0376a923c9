"""A copy of a run directory: what was released, nothing secret, and not to be driven."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from raydp.errors import InvalidValue, RaydpError
from raydp.search import copies, runner
from raydp.search.results import Result
from raydp.search.run_directory import COPY, RunDirectory
from raydp.search.verify import verify
from tests.search.helpers import session_in, small_search
from tests.search.synthetic import splits_run


def everything(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_a_copy_holds_what_was_released_and_no_secret(tmp_path: Path) -> None:
    path = splits_run(tmp_path / "run", lambda fraction, share, seed: 0.9)
    for name in (
        "secrets/t0000-0.key",
        "private/raydp.json",
        "private/journal.jsonl",
        "trials/t0000/seed-0/checkpoint-000000010.pt",
        "trials/t0000/seed-0/error.txt",
        "trials/t0000/secret.key",
        "mlflow.db",
        "ray/tune/tuner.pkl",
        "lock",
    ):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("SECRET")
    (path / "trials" / "t0000" / "seed-0" / "weights.pt").write_bytes(b"weights")
    (path / "statement.txt").symlink_to(path / "secrets" / "t0000-0.key")
    with (path / "trials" / "t0001" / "seed-0" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "metr')  # being written
    opened = RunDirectory.open(path)
    copies.pack(opened, tmp_path / "copy.tar.gz", source="/shared/run")
    copy = copies.unpack(tmp_path / "copy.tar.gz", tmp_path / "copy")

    there = everything(copy.path)
    assert not any("SECRET" in (copy.path / name).read_text(errors="ignore") for name in there)
    assert {"raydp.json", "journal.jsonl", COPY, "trials/t0000/seed-0/weights.pt", "trials/t0000/plan.json"} <= there
    assert not {name.split("/")[0] for name in there} & {
        "secrets",
        "private",
        "lock",
        "mlflow.db",
        "ray",
        "statement.txt",
    }
    assert not any(name.endswith((".key", "error.txt")) or "checkpoint" in name for name in there)
    assert (copy.path / "trials/t0001/seed-0/metrics.jsonl").read_bytes().endswith(b"\n")
    assert json.loads((copy.path / COPY).read_text())["source"] == "/shared/run"
    assert Result.load(copy.path).to_json()["trials"] == Result.load(path).to_json()["trials"]
    assert verify(copy.path)["ok"] == verify(path)["ok"]


def test_a_copy_refuses_to_be_driven_and_takes_a_later_copy_of_the_same_search_only(tmp_path: Path) -> None:
    search = small_search(trials=1)
    session_in(tmp_path / "run", search)
    session_in(tmp_path / "other", search)
    archives = {}
    for name in ("run", "other"):
        archives[name] = tmp_path / f"{name}.tar.gz"
        copies.pack(RunDirectory.open(tmp_path / name), archives[name], source=name)
    for _ in range(2):
        copies.unpack(archives["run"], tmp_path / "copy")
    with pytest.raises(InvalidValue, match="must be new or an earlier copy"):
        copies.unpack(archives["other"], tmp_path / "copy")
    with pytest.raises(RaydpError, match=r"is a copy, without keys.*raydp submit"):
        runner.resume(tmp_path / "copy", quiet=True)
    with pytest.raises(RaydpError, match="is a copy"):
        search.run(storage=tmp_path / "copy", quiet=True)
    assert not (tmp_path / "copy" / "secrets").exists()


def test_an_archive_that_holds_more_than_a_copy_is_refused(tmp_path: Path) -> None:
    for number, name in enumerate(
        ("../outside", "/etc/passwd", "secrets/x.key", "trials/t0000/../../x", "trials/a/b/c")
    ):
        archive = tmp_path / f"{number}.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))
        with pytest.raises(RaydpError, match="is no copy"):
            copies.unpack(archive, tmp_path / "copy")
    assert not (tmp_path / "copy").exists() and not os.path.lexists(tmp_path / "outside")
