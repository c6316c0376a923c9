"""Speed of the selection's cost: solving a trial's budget from a total, and adding a trial to a long composition.

    python -m tests.benchmarks.bench_selection [--repetitions 3] [--distinct 100] [--write]

Medians of processor time, each repetition cold: no cached plan, no cached distribution. (The work is on one thread;
wall-clock time on an idle core is the same.) While a search runs, its total is a
running one by Renyi moments, to which a trial is added in milliseconds. The tighter composition by privacy-loss
distributions is made once, at the end: it holds one distribution for each *different* plan, whose grid depends on all
of them, so it is not added to. ``--distinct`` says of how many different plans it is measured. ``--write`` puts the
table into the README beside this file.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from raydp.privacy import Budget, Mechanism, PhaseSpec, accountants, calibrate
from raydp.privacy.accountants import profiles
from raydp.privacy.accountants.rdp import RunningRdp
from raydp.privacy.calibration import delta_at
from raydp.privacy.selection import RandomStopping, parse
from raydp.privacy.selection_bounds import Profile
from raydp.privacy.selection_budget import refined

TARGET = Budget(epsilon=3.0, delta=1e-5)
README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- bench_selection: begin -->", "<!-- bench_selection: end -->"


def median(work: Callable[[int], object], repetitions: int) -> float:
    seconds = []
    for repetition in range(repetitions):
        profiles._profile.cache_clear()
        begun = time.process_time()
        work(repetition)
        seconds.append(time.process_time() - begun)
    return statistics.median(seconds)


def solve(text: str, *phases: PhaseSpec) -> None:
    rule = parse(text)
    assert isinstance(rule, RandomStopping)

    def profile_at(budget: Budget) -> Profile:
        return delta_at(calibrate(budget=budget, phases=phases, cross_check=()).mechanisms, budget)

    refined(rule, TARGET, profile_at)


def phase(steps: int, *, name: str = "train", share: float | None = None) -> PhaseSpec:
    return PhaseSpec(name=name, steps=steps, batch_size=256, population=50_000, clip_norm=1.0, share=share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--distinct", type=int, default=100, help="different plans in the composition by distributions")
    parser.add_argument("--write", action="store_true", help="into the README beside this file")
    options = parser.parse_args()
    rows = []

    def row(what: str, work: Callable[[int], object], repetitions: int = options.repetitions) -> None:
        rows.append(f"| {what} | {median(work, repetitions):.3g} |")
        print(rows[-1], flush=True)

    warm_up = phase(300, name="warmup", share=0.3)
    for text in ("geometric:10", "logarithmic:10", "poisson:5"):
        one = f"a trial's budget for `{text}`, one phase"
        row(one, lambda repetition, text=text: solve(text, phase(1000 + repetition)))
        two = f"a trial's budget for `{text}`, two phases"
        row(two, lambda repetition, text=text: solve(text, warm_up, phase(700 + repetition)))
    spending = RunningRdp()
    trials = [Mechanism(noise_multiplier=1 + 0.001 * index, sample_rate=0.005, steps=500) for index in range(1010)]
    spending.add(trials[:1000])

    def add(repetition: int) -> None:
        spending.add([trials[1000 + repetition]])
        spending.epsilon(delta=TARGET.delta, adjacency="add_remove")

    row("one trial more after 1,000 different ones, by Renyi moments", add)

    def compose(mechanisms: list[Mechanism]) -> Callable[[int], object]:
        return lambda repetition: accountants.epsilon(mechanisms, delta=TARGET.delta, accountant="pld")

    row("1,000 trials of one plan, by privacy-loss distributions", compose(trials[:1] * 1000))
    some = trials[: options.distinct]
    row(f"{len(some)} trials of different plans, by privacy-loss distributions", compose(some), 1)
    if options.write:
        given = f"--repetitions {options.repetitions} --distinct {options.distinct}"
        command = f"python -m tests.benchmarks.bench_selection {given} --write"
        head = [f"`{command}`", "", "| what | processor time, s |", "|---|---|"]
        before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
        text = "\n".join([*head, *rows])
        README.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
