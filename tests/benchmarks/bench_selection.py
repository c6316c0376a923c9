"""Speed of the selection's cost: solving a trial's budget from a total, and adding a trial to a long composition.

    python tests/benchmarks/bench_selection.py

Prints the median processor time of several repetitions, each cold: no cached plan, no cached distribution. (The work is
on one thread; wall-clock time on an idle core is the same.)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from raydp.privacy import Budget, Mechanism, PhaseSpec, calibrate
from raydp.privacy.accountants import profiles
from raydp.privacy.accountants.rdp import RunningRdp
from raydp.privacy.calibration import delta_at
from raydp.privacy.selection import RandomStopping, parse
from raydp.privacy.selection_bounds import Profile
from raydp.privacy.selection_budget import refined

TARGET = Budget(epsilon=3.0, delta=1e-5)
REPETITIONS = 3


def median(work: Callable[[int], object]) -> float:
    seconds = []
    for repetition in range(REPETITIONS):
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
    warm_up = phase(300, name="warmup", share=0.3)
    for text in ("geometric:10", "logarithmic:10", "poisson:5"):
        one = median(lambda repetition, text=text: solve(text, phase(1000 + repetition)))
        two = median(lambda repetition, text=text: solve(text, warm_up, phase(700 + repetition)))
        print(f"trial budget for {text}: one phase {one:.2f} s, two phases {two:.2f} s")
    spending = RunningRdp()
    trials = [Mechanism(noise_multiplier=1 + 0.001 * index, sample_rate=0.005, steps=500) for index in range(1010)]
    spending.add(trials[:1000])

    def add(repetition: int) -> None:
        spending.add([trials[1000 + repetition]])
        spending.epsilon(delta=TARGET.delta, adjacency="add_remove")

    print(f"one trial more after 1,000 different ones: {1000 * median(add):.1f} ms")


if __name__ == "__main__":
    main()
