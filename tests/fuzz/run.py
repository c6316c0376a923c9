"""Fuzz for a while and write the figures into tests/README.md.

    python tests/fuzz/run.py --seconds 300

Every target of :mod:`tests.fuzz.targets` gets an equal share of the time. An input that is a fault is printed, made as
small as hypothesis can make it, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.targets import TARGETS, Target

README = Path(__file__).parents[1] / "README.md"
_BEGIN, _END = "<!-- fuzz figures -->", "<!-- end of fuzz figures -->"
_ROUND = 100


def fuzz(
    target: Target, *, seconds: float, most: int | None = None, first_seed: int = 0
) -> tuple[int, BaseException | None]:
    """(inputs tried, fault or None) after so many seconds or inputs, or at the first fault."""
    tried = 0
    until = time.monotonic() + seconds

    def one(value: Any) -> None:
        nonlocal tried
        tried += 1
        target.check(value)

    number = first_seed
    while time.monotonic() < until and (most is None or tried < most):
        wanted = _ROUND if most is None else min(_ROUND, most - tried)
        options = settings(
            max_examples=max(wanted, 1),
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        try:
            seed(number)(options(given(target.inputs)(one)))()
        except Exception as fault:  # noqa: BLE001 - whatever it is, it is what is looked for
            return tried, fault
        number += 1
    return tried, None


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz, and write the figures into tests/README.md.")
    parser.add_argument("--seconds", type=float, default=300, help="of all targets together")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"), help="of the inputs")
    parser.add_argument("--only", choices=sorted(TARGETS), help="one target")
    options = parser.parse_args()
    chosen = {options.only: TARGETS[options.only]} if options.only else TARGETS
    rows, faults = [], 0
    for name, target in chosen.items():
        begun = time.monotonic()
        tried, fault = fuzz(target, seconds=options.seconds / len(chosen), first_seed=options.seed)
        faults += fault is not None
        found = "none" if fault is None else f"{type(fault).__name__}"
        rows.append(f"| {name} | {tried:,} | {time.monotonic() - begun:.0f} | {found} |")
        print(rows[-1], flush=True)
        if fault is not None:
            notes = "\n".join(getattr(fault, "__notes__", []))
            print(f"{type(fault).__name__}: {str(fault)[:500]}\n{notes}", file=sys.stderr)
    if options.only is None:
        _write(rows, f"python tests/fuzz/run.py --seconds {options.seconds:g} --seed {options.seed}")
    sys.exit(1 if faults else 0)


def _write(rows: list[str], command: str) -> None:
    text = README.read_text(encoding="utf-8")
    table = "\n".join([f"`{command}`", "", "| target | inputs | seconds | faults |", "|---|---|---|---|", *rows])
    block = f"{_BEGIN}\n{table}\n{_END}"
    README.write_text(re.sub(f"{_BEGIN}.*?{_END}", lambda _: block, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
