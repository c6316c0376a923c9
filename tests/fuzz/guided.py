"""Fuzz the parsers guided by coverage, with atheris (libFuzzer), and write the figures into tests/README.md.

    pip install atheris && python -m tests.fuzz.guided --seconds 240

Inputs and checks are those of :mod:`tests.fuzz.targets`. libFuzzer chooses the bytes that hypothesis makes an input of,
and keeps those that reach code of raydp that no earlier input reached. Each target runs in a process of its own, and
the table is written anew after each, so that a run that is cut short leaves what it saw.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
_BEGIN, _END = "<!-- guided fuzz figures -->", "<!-- end of guided fuzz figures -->"
#: What reads files and records of others. The rest of the targets are values of one's own making.
PARSERS = (
    "plan.json",
    "ledger",
    "journal",
    "journal events",
    "raydp.json",
    "checkpoint",
    "checkpoint payload",
    "Parquet bytes",
    "noise key",
    "space JSON",
    "definition",
    "--set",
)


def fuzz(name: str, seconds: int, seed: int, corpus: str) -> None:
    """Fuzz one target in this process, which ends with it: libFuzzer does not return."""
    import atheris

    with atheris.instrument_imports(include=["raydp"]):
        targets = importlib.import_module("tests.fuzz.targets")
    from hypothesis import HealthCheck, given, settings

    target = targets.TARGETS[name]

    @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(target.inputs)
    def check(value: Any) -> None:
        target.check(value)

    options = [f"-max_total_time={seconds}", f"-seed={seed}", "-print_final_stats=1", "-max_len=8192", "-len_control=0"]
    atheris.Setup([sys.argv[0], *options, corpus], check.hypothesis.fuzz_one_input)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz guided by coverage, and write the figures into tests/README.md.")
    parser.add_argument("--seconds", type=int, default=240, help="of all targets together")
    parser.add_argument("--seed", type=int, default=1, help="of libFuzzer")
    parser.add_argument("--only", choices=PARSERS, help="one target, without writing")
    options = parser.parse_args()
    if options.only is not None:
        with tempfile.TemporaryDirectory(prefix="raydp-fuzz-") as corpus:
            fuzz(options.only, options.seconds, options.seed, corpus)
    rows, faults = [], 0
    share = max(1, options.seconds // len(PARSERS))
    for name in PARSERS:
        command = [sys.executable, "-m", "tests.fuzz.guided", f"--only={name}", f"--seconds={share}"]
        done = subprocess.run([*command, "--seed", str(options.seed)], capture_output=True, text=True, check=False)
        told = done.stdout + done.stderr
        tried = re.search(r"number_of_executed_units: (\d+)", told)
        edges = re.findall(r"cov: (\d+)", told)
        if tried is None or not edges:
            sys.exit(f"{name}: libFuzzer did not run.\n{told[-2000:]}")
        faults += done.returncode != 0
        found = "none" if done.returncode == 0 else "a fault"
        rows.append(f"| {name} | {int(tried[1]):,} | {share} | {edges[0]} → {edges[-1]} | {found} |")
        print(rows[-1], flush=True)
        if done.returncode:
            print(told[-3000:], file=sys.stderr)
        left = [f"| {other} | not run | | | |" for other in PARSERS[len(rows) :]]
        _write([*rows, *left], f"python -m tests.fuzz.guided --seconds {options.seconds} --seed {options.seed}")
    sys.exit(1 if faults else 0)


def _write(rows: list[str], command: str) -> None:
    head = ["| target | inputs | seconds | edges of raydp, first → last | faults |", "|---|---|---|---|---|"]
    block = "\n".join([_BEGIN, f"`{command}`", "", *head, *rows, _END])
    text = README.read_text(encoding="utf-8")
    README.write_text(re.sub(f"{_BEGIN}.*?{_END}", lambda _: block, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
