"""Run directories of searches that never ran: plans are solved, everything else is written down."""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raydp.privacy.budget import Budget
from raydp.privacy.calibration import calibrate
from raydp.privacy.ledger import LAYOUT
from raydp.privacy.mechanism import PhaseSpec
from raydp.privacy.plan import Plan
from raydp.search.run_directory import RunDirectory
from tests.chains import forge_journal, forge_ledger

Metrics = Mapping[str, Sequence[float | None]]


@functools.cache
def plan_of(share: float | None = None, epsilon: float = 3.0) -> Plan:
    """A plan of one phase, or of two where a share is given."""
    sizes = {"batch_size": 100, "population": 2000, "clip_norm": 1.0}
    phases = [PhaseSpec(name="warmup", steps=10, share=share, **sizes)] if share else []
    phases.append(PhaseSpec(name="sparse" if share else "train", steps=30, **sizes))
    return calibrate(budget=Budget(epsilon=epsilon, delta=1e-5), phases=phases, cross_check=())


class Run:
    """A run directory to which trials are added.

    Args:
        path: of the directory, which must not exist.
        definition: what differs from a TP-TopK search on the bundled digits.
    """

    def __init__(self, path: Path, **definition: Any) -> None:
        values = {
            "name": "made",
            "method": "tp_topk",
            "data": "digits",
            "metric": ["accuracy"],
            "mode": ["max"],
            "seeds": 1,
            "seed": 0,
            "sampler": "random",
            "reports": 1,
            "fixed": {"epochs": 2},
            "budget": Budget(epsilon=3.0, delta=1e-5).to_json(),
        }
        self.directory = RunDirectory.create(path, {**values, **definition})
        self.path = self.directory.path
        self.epsilon = float(self.directory.definition["budget"]["epsilon"])
        self._number = 0
        self._lines: list[bytes] = []

    def trial(
        self,
        config: Mapping[str, Any],
        metrics: Metrics | None = None,
        *,
        state: str = "complete",
        reason: str | None = None,
        share: float | None = None,
        steps: Mapping[int, Sequence[Mapping[str, float]]] | None = None,
        seconds: float = 10.0,
        measured_on: str = "digits (public benchmark, 360 examples)",
    ) -> str:
        """Add one trial; its key. ``steps``: seed -> what it reported, at steps 10, 20, …"""
        number, key = self._number, f"t{self._number:04d}"
        self._number += 1
        if state == "infeasible":
            self._add({"event": "infeasible", "key": key, "number": number, "config": config, "reason": reason})
            return key
        plan = plan_of(share, self.epsilon)
        folder = self.path / "trials" / key
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps(plan.to_json()))
        self._add({"event": "proposed", "key": key, "number": number, "config": config, "plan": plan.digest})
        if state == "proposed":
            return key
        self._add({"event": "started", "key": key, "attempt": 1})
        count = max((len(values) for values in (metrics or {}).values()), default=1)
        for seed in range(count):
            self._execute(folder / f"seed-{seed}", plan, (steps or {}).get(seed, ()))
        if state == "running":
            return key
        self._add(
            {
                "event": "finished",
                "key": key,
                "state": state,
                "reason": reason,
                "metrics": {name: list(values) for name, values in (metrics or {}).items()},
                "seconds": seconds,
                "epsilon": {name: interval.to_json() for name, interval in plan.certificate.items()},
                "measured_on": measured_on,
            }
        )
        return key

    def done(self) -> Path:
        """Write the journal; the path of the run directory."""
        forge_journal(self.directory, self._lines)
        return self.path

    def _add(self, event: Mapping[str, Any]) -> None:
        self._lines.append(json.dumps({"time": "2026-01-01T00:00:00.000+00:00", **event}).encode())

    def _execute(self, path: Path, plan: Plan, steps: Sequence[Mapping[str, float]]) -> None:
        path.mkdir()
        header = {"layout": LAYOUT, "plan": plan.digest, "delta": plan.budget.delta, "adjacency": plan.budget.adjacency}
        entries = [
            {
                "phase": phase.name,
                "first_step": 0,
                "steps": phase.steps,
                "noise_multiplier": phase.noise_multiplier,
                "sample_rate": phase.sample_rate,
                "clip_norm": phase.clip_norm,
            }
            for phase in plan.phases
        ]
        forge_ledger(path / "ledger.jsonl", [json.dumps(line).encode() for line in (header, *entries)])
        lines = [{"step": 10 * (index + 1), "metrics": dict(values)} for index, values in enumerate(steps)]
        if lines:
            (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def methods_run(path: Path, **definition: Any) -> Path:
    """Two methods at three learning rates, three seeds each; tp_topk leads by two points in every seed."""
    run = Run(path, **{"method": "dp_sgd", "seeds": 3, **definition})
    for lead, method in ((0.0, "dp_sgd"), (0.02, "tp_topk")):
        for rate, loss in ((0.5, 0.1), (1.0, 0.0), (4.0, 0.05)):
            values = [0.9 + lead - loss + 0.001 * seed for seed in range(3)]
            run.trial(
                {"method": method, "learning_rate": rate},
                {"accuracy": values},
                share=0.3 if method == "tp_topk" else None,
                seconds=36.0 if method == "dp_sgd" else 72.0,
            )
    return run.done()


def splits_run(path: Path, accuracy: Callable[[float, float, int], float | None]) -> Path:
    """The 3 × 3 grid of splits, two seeds each, with TP-TopK's diagnostics."""
    run = Run(path, seeds=2, reports=2)
    for fraction in (0.2, 0.3, 0.4):
        for share in (0.2, 0.3, 0.4):
            values = [accuracy(fraction, share, seed) for seed in (0, 1)]
            reported = {
                seed: [
                    {"accuracy": 0.5, "proxy_concentration": 0.6, "proxy_concentration_null": 0.55},
                    {"accuracy": value or 0.0, "proxy_concentration": 0.7, "proxy_concentration_null": 0.55},
                ]
                for seed, value in enumerate(values)
            }
            run.trial(
                {"warmup_fraction": fraction, "warmup_share": share},
                {"accuracy": values},
                share=share,
                steps=reported,
            )
    return run.done()


def clamping_run(path: Path) -> Path:
    """DP-NGD whose floor decays tenfold over ten reports."""
    run = Run(path, method="dp_ngd", seeds=2, reports=10)
    for rate in (0.01, 0.1):
        series = [
            {
                "accuracy": 0.3 + 0.02 * step,
                "lambda_t": 0.25 * 10 ** (-step / 9),
                "clamped_fraction": 1 - step / 20,
                "d_eff": 20.0 + step,
                "step_ratio": 2.0 - step / 10,
            }
            for step in range(10)
        ]
        run.trial({"learning_rate": rate}, {"accuracy": [0.48, 0.47]}, steps={0: series, 1: series})
    return run.done()


def distances_run(path: Path, epsilon: float) -> Path:
    """A denoising search of two methods over three private sets; distances fall with epsilon."""
    budget = Budget(epsilon=epsilon, delta=1e-5).to_json()
    run = Run(path, method="dp_sgd", data="sets", metric=["frechet"], mode=["min"], seeds=3, budget=budget)
    for lead, method in ((0.0, "dp_sgd"), (2.0, "dp_deepsets")):
        for rate in (0.1, 1.0):
            frechet = [20 + rate - lead - epsilon + 0.1 * seed for seed in range(3)]
            run.trial(
                {"method": method, "learning_rate": rate},
                {"frechet": frechet, "kid": [value / 100 for value in frechet], "loss": [0.1, 0.1, 0.1]},
            )
    return run.done()


def large_run(path: Path, trials: int = 1000) -> Path:
    """A search of so many trials over four hyperparameters, with failures, five reports and long categories."""
    generator = random.Random(0)
    run = Run(path, trials=trials, reports=5, sampler="tpe")
    for number in range(trials):
        share = generator.choice((0.2, 0.3, 0.4))
        config = {
            "learning_rate": math.exp(generator.uniform(math.log(0.1), math.log(8))),
            "warmup_share": share,
            "active_ratio": generator.uniform(0.1, 0.9),
            "schedule": generator.choice(("constant", "cosine_with_restarts")),
        }
        if number % 50 == 7:
            run.trial(config, state="infeasible", reason="no noise multiplier makes the warm-up spend its share")
            continue
        accuracy = 0.9 - 0.05 * abs(math.log(config["learning_rate"])) + generator.gauss(0, 0.01)
        reported = [{"accuracy": accuracy * step / 5, "loss": 2.0 / step} for step in range(1, 6)]
        state = "failed" if number % 40 == 3 else "complete"
        run.trial(
            config,
            {"accuracy": [accuracy], "loss": [0.4]} if state == "complete" else None,
            state=state,
            reason="the process died" if state == "failed" else None,
            share=share,
            steps={0: reported},
        )
    return run.done()
