"""Runs the searches of ``searches/tp_topk_split.py`` on real data and writes what they measured into
searches/README.md.

    python tests/benchmarks/measure_searches.py run OUT --shared ../shared/data [--only NAME …]
    python tests/benchmarks/measure_searches.py write OUT

``run`` is resumable: an experiment whose run directory is complete is skipped, an interrupted one goes on. ``write``
reads
the run directories alone, and replaces what stands between the two markers in searches/README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raydp.search import runner
from raydp.search.definition import Search
from raydp.search.files import load_searches
from raydp.search.records import TrialRecord
from raydp.search.results import Result

ROOT = Path(__file__).parents[2]
README = ROOT / "searches" / "README.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
METHODS = ("dp_sgd", "tp_topk", "tp_rand", "on_topk", "on_rand")
MEDIUM = {"fixed.epochs": 10, "fixed.batch_size": 500, "data_limit": 10_000, "reports": 2}

#: name -> (search of the file, data set, overrides)
EXPERIMENTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mnist5k_grid": ("split_grid", "mnist5k", {"reports": 2, "fixed.epochs": 8}),
    "mnist5k_continuous": ("split_continuous", "mnist5k", {"reports": 2, "fixed.epochs": 8}),
    "mnist5k_five_e1": ("five_variants", "mnist5k", {"budget.epsilon": 1.0, "reports": 2, "fixed.epochs": 8}),
    "mnist5k_five_e3": ("five_variants", "mnist5k", {"reports": 2, "fixed.epochs": 8}),
    "mnist5k_five_e8": ("five_variants", "mnist5k", {"budget.epsilon": 8.0, "reports": 2, "fixed.epochs": 8}),
    "mnist5k_five_rho01": ("five_variants", "mnist5k", {"reports": 2, "fixed.epochs": 8, "active_ratio": 0.1}),
    "mnist5k_five_rho07": ("five_variants", "mnist5k", {"reports": 2, "fixed.epochs": 8, "active_ratio": 0.7}),
    "mnist_five_e3": ("five_variants", "mnist", MEDIUM),
    "fashion_five_e3": ("five_variants", "fashion_mnist", MEDIUM),
    "cifar10_five_e3": (
        "five_variants",
        "cifar10",
        {"fixed.epochs": 12, "fixed.batch_size": 600, "seeds": 2, "reports": 1},
    ),
}


def experiment(name: str, shared: Path) -> tuple[Search, Path]:
    """The search of an experiment, and the file that it is defined in."""
    chosen, data, overrides = EXPERIMENTS[name]
    file = ROOT / "searches" / "tp_topk_split.py"
    search = load_searches(file, only=chosen)[chosen]
    where = data if data == "mnist5k" else str((shared / data).resolve())
    return search.with_overrides({"name": name, "data": where, **overrides}), file


def run(out: Path, shared: Path, only: list[str]) -> None:
    """Run what is not complete."""
    for name in only or EXPERIMENTS:
        directory = out / name
        search, file = experiment(name, shared)
        print(f"== {name}", flush=True)
        if (directory / "raydp.json").exists():
            result = Result.load(directory)
            if sum(trial.finished for trial in result.trials) < search.trials:
                runner.resume(directory)
        else:
            runner.run(search, storage=directory, file=file)


def write(out: Path) -> None:
    """Write the tables of every complete experiment into searches/README.md."""
    parts = []
    for name in EXPERIMENTS:
        if (out / name / "raydp.json").exists():
            result = Result.load(out / name)
            if all(trial.finished for trial in result.trials) and len(result.trials) >= result.search["trials"]:
                parts.append(section(name, result))
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n\n" + "\n".join(parts) + f"\n{END}{after}", encoding="utf-8")


def section(name: str, result: Result) -> str:
    """One experiment as Markdown."""
    search = result.search
    fixed = ", ".join(f"{key} = {value}" for key, value in sorted(search["fixed"].items()))
    complete = [trial for trial in result.trials if trial.state == "complete"]
    population = complete[0].plan.phases[0].spec.population if complete and complete[0].plan else 0
    lines = [
        f"### {name}",
        "",
        f"ε = {search['budget']['epsilon']:g}, δ = {search['budget']['delta']:g}, N = {population}, "
        f"{search['seeds']} seeds a trial, {len(result.trials)} trials ({len(complete)} complete); {fixed}. "
        f"ε of the whole search: {result.epsilon_search.upper:.4g}. Accuracy in %, mean ± std over the seeds.",
        "",
    ]
    if "method" in json.dumps(search["space"]["distributions"]):
        lines += _variants(complete)
    elif "active_ratio" in search["space"]["distributions"]:
        lines += _ranking(complete, ("learning_rate", "warmup_fraction", "warmup_share", "active_ratio"))
    else:
        lines += _grid(complete)
    return "\n".join(lines) + "\n"


def _spread(values: tuple[float | None, ...]) -> str:
    known = [100 * value for value in values if value is not None]
    spread = f" ± {statistics.stdev(known):.2f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.2f}{spread}"


def _mean(trial: TrialRecord) -> float:
    value = trial.mean("accuracy")
    assert value is not None  # it is complete
    return value


def _variants(complete: list[TrialRecord]) -> list[str]:
    best: dict[str, TrialRecord] = {}
    for trial in complete:
        name = str(trial.config["method"])
        if name not in best or _mean(trial) > _mean(best[name]):
            best[name] = trial
    rates = sorted({float(trial.config["learning_rate"]) for trial in complete})
    lines = [
        "| method | " + " | ".join(f"lr {rate:g}" for rate in rates) + " | best |",
        "|---" * (len(rates) + 2) + "|",
    ]
    for name in METHODS:
        cells = []
        for rate in rates:
            found = [t for t in complete if t.config["method"] == name and t.config["learning_rate"] == rate]
            cells.append(_spread(found[0].metrics["accuracy"]) if found else "–")
        if name in best:
            lines.append(f"| {name} | " + " | ".join(cells) + f" | {_spread(best[name].metrics['accuracy'])} |")
    lines.append("")
    for left, right in (("tp_topk", "tp_rand"), ("on_topk", "on_rand"), ("tp_topk", "dp_sgd")):
        if left in best and right in best:
            lines.append(_paired(best, left, right))
    return lines


def _paired(best: Mapping[str, TrialRecord], left: str, right: str) -> str:
    pairs = zip(best[left].metrics["accuracy"], best[right].metrics["accuracy"], strict=True)
    differences = [100 * (a - b) for a, b in pairs if a is not None and b is not None]
    spread = f" ± {statistics.stdev(differences):.2f}" if len(differences) > 1 else ""
    listed = ", ".join(f"{difference:+.2f}" for difference in differences)
    mean = f"{statistics.fmean(differences):+.2f}{spread}"
    return f"* {left} − {right}, each at its best learning rate, by seed: {listed}; mean {mean}"


def _grid(complete: list[TrialRecord]) -> list[str]:
    shares = sorted({float(trial.config["warmup_share"]) for trial in complete})
    fractions = sorted({float(trial.config["warmup_fraction"]) for trial in complete})
    lines = [
        "| E1/E \\ ε1/ε | " + " | ".join(f"{share:g}" for share in shares) + " |",
        "|---" * (len(shares) + 1) + "|",
    ]
    for fraction in fractions:
        cells = []
        for share in shares:
            (trial,) = [
                t for t in complete if (t.config["warmup_fraction"], t.config["warmup_share"]) == (fraction, share)
            ]
            cells.append(_spread(trial.metrics["accuracy"]))
        lines.append(f"| {fraction:g} | " + " | ".join(cells) + " |")
    return lines


def _ranking(complete: list[TrialRecord], names: tuple[str, ...]) -> list[str]:
    lines = ["| accuracy | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    ranked = sorted(complete, key=_mean, reverse=True)
    for trial in ranked[:5] + ranked[-2:]:
        lines.append(
            f"| {_spread(trial.metrics['accuracy'])} | " + " | ".join(f"{trial.config[n]:.3g}" for n in names) + " |"
        )
    return [*lines, "", "The five best and the two worst trials."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "write"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--only", nargs="*", default=[], choices=EXPERIMENTS)
    arguments = parser.parse_args()
    if arguments.what == "run":
        run(arguments.out, arguments.shared, arguments.only)
    else:
        write(arguments.out)


if __name__ == "__main__":
    main()
