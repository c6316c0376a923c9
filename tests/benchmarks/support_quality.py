"""NON-PRIVATE analysis: does the support that TP-TopK's warm-up learns carry information about the gradient?

    python -m tests.benchmarks.support_quality [--data mnist5k] [--epsilon 1 3 8] [--ratio 0.1 0.4] [--seeds 3]

For every epsilon and seed the warm-up of ``tp_topk`` is run under its certified plan; at the weights where it stops,
the un-noised gradient G on all private examples is computed, and for every ratio rho the learned support is held
against a random one (TP-Rand's) and the best one. Printed as a Markdown table, written as JSON with ``--json``:

* kappa, null: the proxy concentration that a run logs, and what it would be with no signal at all;
* learned, random, best: oracle capture ‖P_A G‖²/‖G‖² of the three supports (random: about rho);
* information: (learned - rho)/(best - rho), 0 for a random support and 1 for the best one;
* SNR: ‖G‖²/(d·nu1²), the gradient's energy over that of one warm-up step's noise;
* pays: whether one masked step has a smaller error than a dense one at the sparse phase's noise (Proposition 5.1), for
  the learned and for the random support.

The noise comes from insecure keys and the data are read without noise, so run it on public benchmarks only.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from raydp import Search, analysis
from raydp.geometry import support_size, top_k
from raydp.methods import scores
from raydp.methods.two_phase import TwoPhasePolicy
from raydp.privacy.budget import Budget
from raydp.privacy.ledger import LedgerWriter
from raydp.privacy.plan import Plan
from raydp.training.run import RunSpec, _Run


@dataclass(frozen=True, kw_only=True)
class Row:
    """One support of one run."""

    epsilon: float
    ratio: float
    seed: int
    warmup_steps: int
    snr: float
    kappa: float
    null: float
    learned: float
    random: float
    best: float
    information: float
    pays_learned: bool
    pays_random: bool


def warmed_up(spec: RunSpec, ledger: LedgerWriter) -> tuple[_Run, TwoPhasePolicy]:
    """A run that has done its warm-up and nothing of its sparse phase."""
    run = _Run(spec, ledger)
    phase = spec.plan.phase("warmup")
    for step in range(phase.steps):
        run._advance(phase, step)
    assert isinstance(run.policy, TwoPhasePolicy)
    return run, run.policy


def measure(search: Search, plan: Plan, *, ratios: Sequence[float], seed: int) -> Iterable[Row]:
    """The rows of one warm-up."""
    with tempfile.TemporaryDirectory() as scratch:
        spec = RunSpec(
            directory=Path(scratch),
            key_file=Path(scratch) / "key",
            method=search.method,
            config=dict(search.fixed),
            plan=plan,
            data=search.data,
            data_limit=search.data_limit,
            model=search.model_name(),
            seed=seed,
            insecure_seed=0,
        )
        with LedgerWriter(spec.ledger_file, plan) as ledger:
            run, policy = warmed_up(spec, ledger)
    gradient = analysis.non_private_gradient(run.model, run.dataset, reason="oracle capture of a learned support")
    sizes = [parameter.numel() for parameter in run.parameters]
    warmup, sparse = plan.phase("warmup"), plan.phase("sparse")
    energy = sum(float(part.square().sum()) for part in gradient)
    for ratio in ratios:
        k = support_size(ratio, sum(sizes))
        learned = top_k(policy.scores, k, sizes)
        random = top_k(scores.random_ranking(sum(sizes), seed=seed), k, sizes)
        capture, chance = analysis.oracle_capture(gradient, learned), analysis.oracle_capture(gradient, random)
        noise = sparse.noise_std / sparse.batch_size
        yield Row(
            epsilon=plan.budget.epsilon,
            ratio=ratio,
            seed=seed,
            warmup_steps=warmup.steps,
            snr=energy / (sum(sizes) * (warmup.noise_std / warmup.batch_size) ** 2),
            kappa=scores.concentration(policy.scores, learned, sizes),
            null=scores.null_concentration(steps=warmup.steps, coordinates=sum(sizes), k=k),
            learned=capture.capture,
            random=chance.capture,
            best=capture.best,
            information=capture.information,
            pays_learned=analysis.one_step_errors(gradient, learned, noise).restriction_helps,
            pays_random=analysis.one_step_errors(gradient, random, noise).restriction_helps,
        )


def table(rows: Sequence[Row]) -> str:
    """Markdown: mean over the seeds, ± standard deviation of the captures."""
    lines = [
        "| ε | ρ | SNR | κ | null | learned | random | best | information | pays: learned, random |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for epsilon, ratio in dict.fromkeys((row.epsilon, row.ratio) for row in rows):
        group = [row for row in rows if (row.epsilon, row.ratio) == (epsilon, ratio)]

        def mean(name: str, group: Sequence[Row] = group, *, spread: bool = False) -> str:
            values = [float(getattr(row, name)) for row in group]
            text = f"{statistics.fmean(values):.3f}"
            return f"{text} ± {statistics.stdev(values):.3f}" if spread and len(values) > 1 else text

        count = len(group)
        pays = ", ".join(
            f"{sum(getattr(row, f'pays_{name}') for row in group)}/{count}" for name in ("learned", "random")
        )
        lines.append(
            f"| {epsilon:g} | {ratio:g} | {statistics.fmean(row.snr for row in group):.3g} | {mean('kappa')} | "
            f"{mean('null')} | {mean('learned', spread=True)} | {mean('random', spread=True)} | {mean('best')} | "
            f"{mean('information', spread=True)} | {pays} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist5k", help="a data set's name or path")
    parser.add_argument("--limit", type=int, help="the first so many private examples")
    parser.add_argument("--model", help="a model's name; the data's default model otherwise")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 3.0, 8.0])
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--ratio", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.4, 0.8])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, default=1.0)
    parser.add_argument("--warmup-fraction", type=float, default=0.3, help="E1/E")
    parser.add_argument("--warmup-share", type=float, default=0.3, help="epsilon1/epsilon")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("raydp.data").setLevel(logging.ERROR)  # one warning a run says no more than the title
    start = time.perf_counter()
    names = ("epochs", "batch_size", "clip_norm", "learning_rate", "warmup_fraction", "warmup_share")
    rows: list[Row] = []
    for epsilon in arguments.epsilon:
        search = Search(
            name="support_quality",
            method="tp_topk",
            data=arguments.data,
            data_limit=arguments.limit,
            model=arguments.model,
            budget=Budget(epsilon=epsilon, delta=arguments.delta),
            space={},
            fixed={name: getattr(arguments, name) for name in names},
        )
        plan = search.plan_for({})
        for seed in range(arguments.seeds):
            rows += measure(search, plan, ratios=arguments.ratio, seed=seed)
    model = search.model_name()
    print(
        f"NON-PRIVATE. {arguments.data}, {model}, {plan.phases[0].spec.population} private examples, "
        f"warm-up of {rows[0].warmup_steps} steps, {arguments.seeds} seeds; {time.perf_counter() - start:.0f} s\n"
    )
    print(table(rows))
    if arguments.json is not None:
        settings = {name: str(value) for name, value in vars(arguments).items() if name != "json"}
        record = {"non_private": True, "settings": settings, "model": model, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
