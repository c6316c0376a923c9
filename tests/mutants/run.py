"""Apply each mutant to a copy of the package and run the tests that must notice it.

    python -m tests.mutants.run [--only WORD] [--fast] [--write]

``--write`` puts the table mutant → what caught it into ``tests/README.md``, anew after each mutant, so that a run that
is cut short leaves what it saw; mutants that it did not come to are marked as not run. Exit status 1 if one survives.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.catalogue import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
README = ROOT / "tests" / "README.md"
_BEGIN, _END = "<!-- mutants: begin -->", "<!-- mutants: end -->"
SURVIVED, BROKEN, NOT_RUN = "SURVIVED", "BROKEN", "not run"


def mutated(mutant: Mutant, source: str) -> str:
    """The source of ``mutant.file`` with the mutant in it.

    Raises:
        ValueError: the text to replace is not there exactly once.
    """
    count = source.count(mutant.old)
    if count != 1:
        raise ValueError(f"mutant {mutant.name!r}: its text occurs {count} times in {mutant.file}, not once")
    return source.replace(mutant.old, mutant.new)


def caught_by(mutant: Mutant) -> str:
    """The first test that fails under the mutant; :data:`SURVIVED` if none does, :data:`BROKEN` if none could run."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        for folder in ("raydp", "tests", "searches"):
            shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
        for file in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / file, copy / file)
        target = copy / "raydp" / mutant.file
        target.write_text(mutated(mutant, target.read_text(encoding="utf-8")), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-rfE"]
        command += [f"tests/{test}" for test in mutant.tests]
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return SURVIVED
    found = re.search(r"^FAILED (\S+)", done.stdout, flags=re.MULTILINE)
    if done.returncode == 1 and found:
        return found.group(1).split("[")[0]
    print(f"{mutant.name}: pytest ended with status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return BROKEN


def table(results: Sequence[tuple[Mutant, str]]) -> str:
    """The results in Markdown, and a line for each mutant of the catalogue that is not among them."""
    killed = sum(caught not in (SURVIVED, BROKEN) for _, caught in results)
    left = [mutant for mutant in MUTANTS if mutant not in {seen for seen, _ in results}]
    unrun = f"; {len(left)} not run" if left else ""
    lines = [
        f"{killed} of {len(results)} mutants killed{unrun} (`python -m tests.mutants.run --write`).",
        "",
        "| mutant | in | caught by |",
        "|---|---|---|",
    ]
    lines += [f"| {mutant.name} | `{mutant.file}` | `{caught.removeprefix('tests/')}` |" for mutant, caught in results]
    lines += [f"| {mutant.name} | `{mutant.file}` | {NOT_RUN} |" for mutant in left]
    return "\n".join(lines)


def write(text: str) -> None:
    """Put the table between its marks in the tests' README, which is made where there is none."""
    content = README.read_text(encoding="utf-8") if README.exists() else "# Tests\n"
    if _BEGIN not in content:
        content = f"{content.rstrip()}\n\n## Mutants\n\n{_BEGIN}\n{_END}\n"
    before, _, rest = content.partition(_BEGIN)
    README.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--fast", action="store_true", help="the subset of the ordinary test run")
    parser.add_argument("--write", action="store_true", help="write the table into tests/README.md")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if options.only in m.name and (m.fast or not options.fast)]
    results = []
    for mutant in chosen:
        results.append((mutant, caught_by(mutant)))
        print(f"{mutant.name}: {results[-1][1]}", flush=True)
        if options.write:
            write(table(results))
    survivors = [mutant.name for mutant, caught in results if caught in (SURVIVED, BROKEN)]
    print(f"{len(results) - len(survivors)} of {len(results)} killed" + (f"; not: {survivors}" if survivors else ""))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
