"""Solved plans on disk, shared by concurrent trials: atomic files, and a damaged one is a miss."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from raydp.errors import RaydpError
from raydp.privacy.budget import Budget
from raydp.privacy.mechanism import PhaseSpec
from raydp.privacy.plan import Plan

# Raised whenever calibration would answer differently, or the layout of a stored plan changes.
LAYOUT = 3
_PACKAGES = ("dp-accounting", "prv-accountant", "opacus", "numpy", "scipy")


@lru_cache(maxsize=1)
def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


def plan_key(
    *, budget: Budget, phases: Sequence[PhaseSpec], accountant: str, split: str, cross_check: Sequence[str]
) -> str:
    """SHA-256 (hex) of everything that a plan follows from, the accountants' versions included."""
    record = {
        "layout": LAYOUT,
        "budget": budget.to_json(),
        "phases": [asdict(spec) for spec in phases],
        "accountant": accountant,
        "split": split,
        "cross_check": list(cross_check),
        "versions": _versions(),
    }
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


class PlanCache:
    """Plans by key, one JSON file each.

    Args:
        directory: default ``$RAYDP_CACHE``, else ``~/.cache/raydp/plans``. Created on the first ``put``.
    """

    def __init__(self, directory: Path | None = None) -> None:
        if directory is None:
            named = os.environ.get("RAYDP_CACHE")
            directory = Path(named) if named else Path.home() / ".cache" / "raydp" / "plans"
        self.directory = Path(directory)

    def get(self, key: str) -> Plan | None:
        """The plan, or None where there is none that can be read whole."""
        try:
            record = json.loads((self.directory / f"{key}.json").read_text())
            if record["key"] != key:
                return None
            body = json.dumps(record["plan"], sort_keys=True).encode()
            return Plan.from_json(record["plan"]) if hashlib.sha256(body).hexdigest() == record["sha256"] else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RaydpError):
            return None

    def put(self, key: str, plan: Plan) -> None:
        """Store atomically. A directory that cannot be written costs time on the next call, not the trial."""
        body = plan.to_json()
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        temporary = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.directory, suffix=".tmp", delete=False) as file:
                temporary = Path(file.name)
                json.dump({"key": key, "sha256": digest, "plan": body}, file)
            temporary.replace(self.directory / f"{key}.json")
        except OSError:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
