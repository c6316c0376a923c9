"""Time of calibrating a two-phase plan against Opacus' one-phase search with its PRV accountant, in one run.

    python tests/benchmarks/bench_calibration.py [--json]

The machine may be shared: read the ratios. Ours is the median of three cold calibrations of (30 % of the steps at 30 %
of epsilon, the rest by composition) including the certificate; Opacus' is one run of get_noise_multiplier with
epsilon_tolerance = 1e-3 epsilon.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from opacus.accountants.utils import get_noise_multiplier

from raydp.privacy import Budget, PhaseSpec, PlanCache, calibrate
from raydp.privacy.accountants import _pmf, library
from raydp.privacy.accountants import rdp as rdp_module

POPULATION, DELTA = 50_000, 1e-5
SETTINGS = [(epsilon, steps, batch) for epsilon in (0.5, 1.0, 3.0, 8.0) for steps, batch in ((360, 4096), (5000, 1000))]


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _cold() -> None:
    """Forget what earlier calls left in memory."""
    for function in (_pmf.pessimistic, _pmf.optimistic, rdp_module._step, library._composed):
        function.cache_clear()


def measure(epsilon: float, steps: int, batch: int) -> dict[str, float]:
    """Seconds and ratios for one setting."""
    budget = Budget(epsilon=epsilon, delta=DELTA)
    first = round(0.3 * steps)
    common = {"batch_size": batch, "population": POPULATION, "clip_norm": 1.0}
    phases = [
        PhaseSpec(name="warmup", steps=first, share=0.3, **common),  # type: ignore[arg-type]
        PhaseSpec(name="sparse", steps=steps - first, **common),  # type: ignore[arg-type]
    ]

    def ours(cross_check: tuple[str, ...]) -> float:
        times = []
        for _ in range(3):
            _cold()
            times.append(_seconds(lambda: calibrate(budget=budget, phases=phases, cross_check=cross_check)))
        return statistics.median(times)

    plain, checked = ours(()), ours(("prv", "rdp"))
    with tempfile.TemporaryDirectory() as directory:
        cache = PlanCache(Path(directory))
        calibrate(budget=budget, phases=phases, cache=cache)
        cached = statistics.median(
            _seconds(lambda: calibrate(budget=budget, phases=phases, cache=cache)) for _ in range(9)
        )
    opacus = _seconds(
        lambda: get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=DELTA,
            sample_rate=batch / POPULATION,
            steps=steps,
            accountant="prv",
            epsilon_tolerance=1e-3 * epsilon,
        )
    )
    return {
        "epsilon": epsilon,
        "steps": steps,
        "batch_size": batch,
        "plan_s": plain,
        "plan_with_cross_checks_s": checked,
        "cached_s": cached,
        "opacus_one_phase_s": opacus,
        "ratio": plain / opacus,
        "ratio_with_cross_checks": checked / opacus,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    arguments = parser.parse_args()
    warm = PhaseSpec(name="train", steps=10, batch_size=10, population=1000, clip_norm=1.0)
    calibrate(budget=Budget(epsilon=1.0, delta=DELTA), phases=[warm])  # imports and first-call costs
    rows = [measure(*setting) for setting in SETTINGS]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    print("epsilon steps batch | plan ms  +checks ms  cached ms | opacus ms |  ratio  ratio+checks")
    for row in rows:
        print(
            f"{row['epsilon']:7g} {row['steps']:5g} {row['batch_size']:5g} | {1e3 * row['plan_s']:7.0f} "
            f"{1e3 * row['plan_with_cross_checks_s']:11.0f} {1e3 * row['cached_s']:10.2f} | "
            f"{1e3 * row['opacus_one_phase_s']:9.0f} | {row['ratio']:6.3f} {row['ratio_with_cross_checks']:13.3f}"
        )


if __name__ == "__main__":
    main()
