"""The arrows between the rooms point one way, and each big dependency is known to one room."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "raydp"

#: room -> rooms that it may import
ALLOWED = {
    "privacy": set(),
    "geometry": {"privacy"},
    "models": set(),
    "tasks": {"models"},
    "data": {"privacy"},
    "methods": {"geometry", "models", "privacy", "tasks"},
    "training": {"methods", "geometry", "privacy", "data", "models", "tasks"},
    "cluster": set(),  # Ray Jobs: how a search file gets to a cluster and back, whatever is in it
    "search": {"cluster", "training", "methods", "geometry", "privacy", "data", "models", "tasks"},
}
FOREIGN = {
    "ray": {"cluster", "search", "training"},
    "ray.tune": {"search"},
    "ray.train": {"training"},
    "optuna": {"search"},
    "mlflow": {"search"},
    "pyarrow": {"data", "search"},
}


def imported(file: Path) -> set[str]:
    """Dotted names of everything that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@pytest.mark.parametrize("room", ALLOWED)
def test_rooms_import_only_what_lies_below_them(room: str) -> None:
    for file in (PACKAGE / room).rglob("*.py"):
        for name in imported(file):
            parts = name.split(".")
            if parts[0] == "raydp" and len(parts) > 1 and parts[1] in ALLOWED and parts[1] != room:
                assert parts[1] in ALLOWED[room], f"{file} imports {name}"


@pytest.mark.parametrize("library", FOREIGN)
def test_big_dependencies_are_known_to_their_rooms_only(library: str) -> None:
    for room in ALLOWED:
        for file in (PACKAGE / room).rglob("*.py"):
            if any(f"{name}.".startswith(f"{library}.") for name in imported(file)):
                assert room in FOREIGN[library], f"{file} imports {library}"


def test_privacy_can_be_read_tested_and_trusted_alone() -> None:
    """Importing it loads neither Ray nor MLflow nor Optuna nor any room of raydp beside itself."""
    code = (
        "import sys, raydp.privacy, raydp.privacy.audit\n"
        "roots = {name.split('.')[0] for name in sys.modules}\n"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('raydp.')}\n"
        "print(sorted(roots & {'ray', 'mlflow', 'optuna'}), sorted(rooms))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] ['_validate', 'errors', 'privacy']"
