"""What travels to a cluster: the working directory without what has no business there, and raydp itself.

raydp packs it, not Ray, so that the size is known and named before anything is sent, so that the name of a package
follows from its content alone (ray-project/ray#53635: a glob of dot files made it constant, and old code ran), and so
that a run directory, in which keys lie, never travels.
"""

from __future__ import annotations

import hashlib
import logging
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from ray._private.runtime_env.packaging import GCS_STORAGE_MAX_SIZE, get_excludes_from_ignore_files

import raydp
from raydp.errors import InvalidValue

#: Names that are left out wherever they are. Dot files are left out as well.
EXCLUDES = ("__pycache__", "*.pyc", "venv", "node_modules", "mlruns", "mlartifacts", "mlflow.db", "*.egg-info")
_RUN = "raydp.json"  # whoever has one is a run directory
_SHOWN = 5
_SILENT = logging.Logger("ignore files", logging.CRITICAL)  # their use is shown with the package
_EPOCH = (1980, 1, 1, 0, 0, 0)  # a zip's earliest time: equal files make equal packages


@dataclass(frozen=True, kw_only=True)
class Package:
    """What would be sent.

    Attributes:
        root: the working directory.
        files: (path in the package, file here, bytes), sorted.
        excluded: paths relative to the root that were left out, a directory once.
    """

    root: Path
    files: tuple[tuple[str, Path, int], ...]
    excluded: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of all files, before compression."""
        return sum(size for _, _, size in self.files)

    def largest(self) -> str:
        """The largest files with their sizes, in words."""
        ranked = sorted(self.files, key=lambda file: -file[2])[:_SHOWN]
        return ", ".join(f"{name} ({_mib(size)})" for name, _, size in ranked)

    def describe(self) -> str:
        """One line: how many files of what size, and what was left out."""
        left_out = ", ".join(self.excluded[:20]) + (" …" if len(self.excluded) > 20 else "")
        return f"{self.root}: {len(self.files)} files, {_mib(self.size)}; left out: {left_out or 'nothing'}"

    def write(self, directory: Path) -> Path:
        """A zip file in the directory, the same bytes for the same files."""
        target = directory / "working_dir.zip"
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, file, _ in self.files:
                entry = zipfile.ZipInfo(name, _EPOCH)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = (0o755 if file.stat().st_mode & 0o100 else 0o644) << 16
                archive.writestr(entry, file.read_bytes())
        return target

    def digest(self) -> str:
        """SHA-256 of names and contents."""
        found = hashlib.sha256()
        for name, file, size in self.files:
            found.update(f"{name}\0{size}\0".encode())
            found.update(file.read_bytes())
        return found.hexdigest()


def choose(root: Path, *, excludes: Sequence[str] = (), limit: int = GCS_STORAGE_MAX_SIZE) -> Package:
    """What of a working directory is sent: all but dot files, ignored files, :data:`EXCLUDES` and run directories.

    ``.gitignore`` and ``.rayignore`` are obeyed as Ray does. raydp's own sources join it, so that the raydp that
    submits is the one that runs.

    Args:
        root: the working directory.
        excludes: further names or patterns of relative paths.
        limit: of all files together, in bytes; by default what Ray's store takes.

    Raises:
        InvalidValue: it is no directory, or holds more than the limit; the largest files are named.
    """
    if not root.is_dir():
        raise InvalidValue("--working-dir", str(root), "must be a directory", "Give the directory of your search file.")
    root = root.resolve()
    patterns = (*EXCLUDES, *excludes)
    left_out: list[str] = []
    files = [(name, file, file.stat().st_size) for name, file in _walk(root, root, patterns, [], left_out)]
    if not (root / "raydp" / "__init__.py").exists():
        own = Path(raydp.__file__).parent
        inside = [file for file in own.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
        files += [(f"raydp/{file.relative_to(own).as_posix()}", file, file.stat().st_size) for file in inside]
    package = Package(root=root, files=tuple(sorted(files)), excluded=tuple(sorted(left_out)))
    if package.size > limit:
        raise InvalidValue(
            "--working-dir",
            str(root),
            f"holds {_mib(package.size)}, and Ray takes at most {_mib(limit)}; the largest: {package.largest()}",
            "Leave them out with --exclude NAME or a .rayignore file, and name data by a path that the nodes see.",
        )
    return package


def _walk(
    root: Path, directory: Path, patterns: Sequence[str], ignored: Sequence[object], left_out: list[str]
) -> Iterator[tuple[str, Path]]:
    """(relative path, file) of what stays below a directory."""
    ignored = [*ignored, *get_excludes_from_ignore_files(directory, include_gitignore=True, logger=_SILENT)]
    for path in sorted(directory.iterdir()):
        name = path.relative_to(root).as_posix()
        if (
            path.name.startswith(".")
            or any(fnmatch(path.name, pattern) or fnmatch(name, pattern) for pattern in patterns)
            or any(rule(path) for rule in ignored)  # type: ignore[operator]
            or (path / _RUN).exists()
            or (path.is_symlink() and path.is_dir())  # could lead anywhere, or round in circles
        ):
            left_out.append(name + ("/" if path.is_dir() else ""))
        elif path.is_dir():
            yield from _walk(root, path, patterns, ignored, left_out)
        elif path.is_file():
            yield name, path


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
