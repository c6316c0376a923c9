"""What travels to a cluster, and what must not."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from raydp.cluster.package import choose
from raydp.errors import InvalidValue


def write(root: Path, *names: str, size: int = 10) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)


def own(root: Path, **options: object) -> list[str]:
    return [name for name, _, _ in choose(root, **options).files if not name.startswith("raydp/")]  # type: ignore[arg-type]


def test_run_directories_dot_files_and_ignored_files_stay_here(tmp_path: Path) -> None:
    write(tmp_path, "search.py", "lib/net.py", "drop.log", "sub/keep.txt", "sub/drop.txt", "data.bin")
    write(tmp_path, ".git/config", ".venv/lib.py", ".env", "lib/__pycache__/net.pyc", "mlruns/0", "venv/x")
    write(tmp_path, "results/quick-1/raydp.json", "results/quick-1/secrets/t0000-0.key", "results/note.txt")
    (tmp_path / ".gitignore").write_text("*.log\n")
    (tmp_path / "sub" / ".rayignore").write_text("drop.txt\n")
    (tmp_path / "loop").symlink_to(tmp_path)
    found = choose(tmp_path, excludes=["*.bin"])
    names = [name for name, _, _ in found.files if not name.startswith("raydp/")]
    assert names == ["lib/net.py", "results/note.txt", "search.py", "sub/keep.txt"]
    for name in (".git/", ".venv/", ".env", "drop.log", "results/quick-1/", "sub/drop.txt", "data.bin", "loop/"):
        assert name in found.excluded
        assert name in found.describe()
    assert f"{len(found.files)} files" in found.describe()


def test_raydp_itself_joins_it_unless_it_is_there_already(tmp_path: Path) -> None:
    write(tmp_path, "search.py")
    names = {name for name, _, _ in choose(tmp_path).files}
    assert {"raydp/__main__.py", "raydp/search/statement.schema.json"} <= names
    assert not any("__pycache__" in name for name in names)
    write(tmp_path, "raydp/__init__.py")
    assert [name for name, _, _ in choose(tmp_path).files] == ["raydp/__init__.py", "search.py"]


def test_equal_files_make_equal_packages_and_another_byte_another(tmp_path: Path) -> None:
    write(tmp_path / "a", "search.py", "x.txt")
    write(tmp_path / "b", "x.txt", "search.py")
    os.utime(tmp_path / "b" / "x.txt", (0, 0))
    first, second = (choose(tmp_path / name) for name in ("a", "b"))
    assert first.digest() == second.digest()
    packed = [found.write(tmp_path / name).read_bytes() for found, name in ((first, "a"), (second, "b"))]
    assert packed[0] == packed[1]
    with zipfile.ZipFile(tmp_path / "a" / "working_dir.zip") as archive:
        assert archive.namelist() == [name for name, _, _ in first.files]
    (tmp_path / "b" / "x.txt").write_bytes(b"y" * 10)
    assert choose(tmp_path / "b", excludes=["*.zip"]).digest() != first.digest()


def test_a_directory_over_the_limit_names_its_largest_files(tmp_path: Path) -> None:
    write(tmp_path, "search.py", "small.bin")
    write(tmp_path, "big.bin", "sub/bigger.bin", size=5 * 2**20)
    with pytest.raises(InvalidValue, match=r"holds 1\d\.\d MiB.*at most 8\.0 MiB.*bigger\.bin \(5\.0 MiB\)") as caught:
        choose(tmp_path, limit=8 * 2**20)
    assert "--exclude" in str(caught.value) and "big.bin (5.0 MiB)" in str(caught.value)
    assert "big.bin" not in own(tmp_path, excludes=["big.bin"], limit=8 * 2**20)
    with pytest.raises(InvalidValue, match="must be a directory"):
        choose(tmp_path / "nowhere")
