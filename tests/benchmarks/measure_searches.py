"""Runs the searches of ``searches/tp_topk_split.py`` on real data and writes what they measured into
searches/README.md.

    python tests/benchmarks/measure_searches.py run OUT --shared ../shared/data [--only NAME …]
    python tests/benchmarks/measure_searches.py write OUT

``run`` is resumable: an experiment whose run directory is complete is skipped, an interrupted one goes on. ``write``
reads the run directories alone, and replaces the tables that stand between the two markers in searches/README.md:
those of the experiments in OUT. Other tables stay, so experiments may be measured on several machines. Tables of
``support_quality.py`` that stand in OUT as ``support_quality*.md`` are taken over as they are.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
SPLIT, NGD = "tp_topk_split.py", "dp_ngd_ablations.py"
QUICK = {"reports": 1, "fixed.epochs": 8}
MEDIUM = {"fixed.epochs": 10, "fixed.batch_size": 500, "data_limit": 10_000, "reports": 1}
LARGE = {"fixed.epochs": 5, "fixed.batch_size": 400, "seeds": 2, "reports": 1}
ALL = ("dp_sgd", "tp_topk", "tp_rand", "on_topk", "on_rand", "dp_ngd", "dp_sgd_pt", "ada_dps", "gep")
ARMS = ("whitened", "pre", "post", "private_20", "private_50", "noise")

CIFAR = {"data_limit": 6_000, "fixed.epochs": 6, "fixed.batch_size": 600, "reports": 1}
SIZES = tuple(f"dp_ngd_public_{size}" for size in (50, 200, 500, 1400))


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Searches of one file on one pair of data sets.

    Attributes:
        file, chosen: the file, and the names of its searches that are run.
        data: of the private examples.
        public: of the public ones, for the searches that use any; None keeps the file's own.
        scale, overrides: as ``--scale`` and ``--set``.
        rates: 0, or how many learning rates each search tries: spread evenly (in the logarithm) over its range, so that
            every search gets as many candidates and none is lucky.
    """

    file: str
    chosen: tuple[str, ...]
    data: str = "mnist5k"
    public: str | None = None
    scale: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    rates: int = 0


def _five(data: str, overrides: Mapping[str, Any]) -> Experiment:
    return Experiment(file=SPLIT, chosen=("five_variants",), data=data, overrides=overrides)


def _cifar(file: str, chosen: tuple[str, ...], *, rates: int = 0, **more: Any) -> Experiment:
    return Experiment(
        file=file,
        chosen=chosen,
        data="cifar10",
        public="cifar100",
        scale="small",
        overrides={**CIFAR, **more},
        rates=rates,
    )


EXPERIMENTS: dict[str, Experiment] = {
    "five_mnist5k_e3": _five("mnist5k", QUICK),
    "five_mnist5k_e1": _five("mnist5k", {**QUICK, "budget.epsilon": 1.0}),
    "five_mnist5k_e8": _five("mnist5k", {**QUICK, "budget.epsilon": 8.0}),
    "five_mnist5k_rho01": _five("mnist5k", {**QUICK, "active_ratio": 0.1}),
    "five_fashion_e3": _five("fashion_mnist", MEDIUM),
    "five_mnist_e3": _five("mnist", MEDIUM),
    "five_cifar10_e3": _five("cifar10", LARGE),
    "split_grid": Experiment(file=SPLIT, chosen=("split_grid",), overrides=QUICK),
    "split_continuous": Experiment(file=SPLIT, chosen=("split_continuous",), overrides=QUICK),
    "dp_ngd_ablations": Experiment(file=NGD, chosen=tuple(f"dp_ngd_{arm}" for arm in ARMS), scale="small"),
    "all_methods": Experiment(file="all_methods.py", chosen=tuple(f"all_{name}" for name in ALL), scale="small"),
    "dp_ngd_learning_rate": Experiment(
        file="dp_ngd_learning_rate.py", chosen=("dp_ngd_learning_rate",), scale="small", overrides={"reports": 1}
    ),
    "dp_ngd_clamping": Experiment(
        file="dp_ngd_clamping.py", chosen=("dp_ngd_clamping",), scale="small", overrides={"reports": 1}
    ),
    "dp_ngd_public_size": Experiment(file="dp_ngd_public_size.py", chosen=SIZES, scale="small"),
    "cifar10_ablations": _cifar(
        NGD, tuple(f"dp_ngd_{arm}" for arm in ARMS), rates=4, **{"fixed.lambda_safe": 0.25, "trials": 4}
    ),
    "cifar10_all_methods": _cifar(
        "all_methods.py", tuple(f"all_{name}" for name in ALL if not name.startswith("on_")), rates=5, trials=5
    ),
    "cifar10_clamping": _cifar("dp_ngd_clamping.py", ("dp_ngd_clamping",)),
    "cifar10_learning_rate": _cifar("dp_ngd_learning_rate.py", ("dp_ngd_learning_rate",)),
    "cifar10_public_size": _cifar("dp_ngd_public_size.py", SIZES),
}


def experiment(name: str, shared: Path) -> tuple[list[Search], Path]:
    """The searches of an experiment, and the file that they are defined in."""
    wanted = EXPERIMENTS[name]
    file = ROOT / "searches" / wanted.file
    found = []
    for each in wanted.chosen:
        search = load_searches(file, only=each)[each]
        source = wanted.data if wanted.data == "mnist5k" else str((shared / wanted.data).resolve())
        changes = {**wanted.overrides, "data": source}
        if wanted.public is not None and search.public is not None:
            changes["public"] = str((shared / wanted.public).resolve())
        search = (search.scaled(wanted.scale) if wanted.scale else search).with_overrides(changes)
        found.append(_with_rates(search, wanted.rates) if wanted.rates else search)
    return found, file


def _with_rates(search: Search, count: int) -> Search:
    """The search with ``count`` learning rates at the centres of equal parts of its (logarithmic) range."""
    range_ = search.point_space.distributions["learning_rate"]
    low, high = math.log(range_.low), math.log(range_.high)  # type: ignore[attr-defined]
    rates = [math.exp(low + (high - low) * (index + 0.5) / count) for index in range(count)]
    return replace(search, warm_start=tuple({"learning_rate": rate} for rate in rates), trials=count)


def run(out: Path, shared: Path, only: list[str]) -> None:
    """Run what is not complete."""
    for name in only or EXPERIMENTS:
        searches, file = experiment(name, shared)
        for search in searches:
            directory = out / name / search.name
            print(f"== {name}: {search.name}", flush=True)
            if not (directory / "raydp.json").exists():
                runner.run(search, storage=directory, file=file)
            elif not complete(Result.load(directory)):
                runner.resume(directory)


def complete(result: Result) -> bool:
    """Whether every trial that the search defines has ended."""
    return all(trial.finished for trial in result.trials) and len(result.trials) >= result.search["trials"]


def write(out: Path) -> None:
    """Write the tables of all complete searches into searches/README.md, beside those of others."""
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    tables = {part.split("\n", 1)[0].strip(): f"### {part.strip()}\n" for part in old.split("\n### ")[1:]}
    for name, wanted in EXPERIMENTS.items():
        directories = [out / name / each for each in wanted.chosen if (out / name / each / "raydp.json").exists()]
        results = [result for result in map(Result.load, directories) if complete(result)]
        if len(results) == 1 and len(wanted.chosen) == 1:
            tables[name] = section(name, results[0])
        elif len(results) > 1:
            done = {result.search["name"] for result in results}
            missing = [each for each in wanted.chosen if each not in done]
            tables[name] = comparison(name, results) + (f"\nNot complete: {', '.join(missing)}.\n" if missing else "")
    for file in sorted(out.glob("support_quality*.md")):
        tables[file.stem] = f"### {file.stem}\n\n{file.read_text(encoding='utf-8').strip()}\n"
    ordered = [tables.pop(name) for name in (*EXPERIMENTS, *sorted(tables)) if name in tables]
    README.write_text(f"{before}{BEGIN}\n\n" + "\n".join(ordered) + f"\n{END}{after}", encoding="utf-8")


def comparison(name: str, results: list[Result]) -> str:
    """Several searches side by side: the best trial of each."""
    first = results[0]
    budget = first.search["budget"]
    lines = [
        f"### {name}",
        "",
        f"{_data(first)}, ε = {budget['epsilon']:g}, δ = {budget['delta']:g}; each row a search of its own, the best "
        "of its trials by the mean over the seeds. Accuracy in %, mean ± std over the seeds.",
        "",
        "| search | trials × seeds | best accuracy | its hyperparameters | median trial | ε of the whole search |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        done = [trial for trial in result.trials if trial.state == "complete"]
        if not done:
            lines.append(f"| {result.search['name']} | {len(result.trials)} | none completed | | | |")
            continue
        best = max(done, key=_mean)
        chosen = ", ".join(f"{key} = {_short(value)}" for key, value in sorted(best.config.items()))
        median = statistics.median(100 * _mean(trial) for trial in done)
        runs = f"{len(done)} × {result.search['seeds']}"
        lines.append(
            f"| {result.search['name']} | {runs} | {_spread(best.metrics['accuracy'])} | {chosen} | {median:.2f} | "
            f"{result.epsilon_search.upper:.4g} |"
        )
    return "\n".join(lines) + "\n"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _data(result: Result) -> str:
    complete_trials = [trial for trial in result.trials if trial.plan]
    plan = complete_trials[0].plan if complete_trials else None
    population = plan.phases[0].spec.population if plan else 0
    public = result.search.get("public")
    beside = f" with public {Path(public).name}" if public else ""
    return f"{Path(result.search['data']).name}{beside}, N = {population}"


def section(name: str, result: Result) -> str:
    """One search as Markdown."""
    search = result.search
    fixed = ", ".join(f"{key} = {value}" for key, value in sorted(search["fixed"].items()))
    done = [trial for trial in result.trials if trial.state == "complete"]
    lines = [
        f"### {name}",
        "",
        f"{_data(result)}, ε = {search['budget']['epsilon']:g}, δ = {search['budget']['delta']:g}, "
        f"{search['seeds']} seeds a trial, {len(result.trials)} trials ({len(done)} complete); {fixed}. "
        f"ε of the whole search: {result.epsilon_search.upper:.4g}. Accuracy in %, mean ± std over the seeds.",
        "",
    ]
    names = sorted(search["space"]["distributions"])
    if "method" in names:
        lines += _variants(done)
    elif names == ["warmup_fraction", "warmup_share"]:
        lines += _grid(done)
    else:
        lines += _ranking(result, names)
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


def _ranking(result: Result, names: list[str]) -> list[str]:
    done = sorted((trial for trial in result.trials if trial.state == "complete"), key=_mean, reverse=True)
    lines = ["| accuracy | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for trial in done[:5] + done[-2:]:
        cells = [_short(trial.config[name]) if name in trial.config else "–" for name in names]
        lines.append(f"| {_spread(trial.metrics['accuracy'])} | " + " | ".join(cells) + " |")
    other = [trial for trial in result.trials if trial.state != "complete"]
    said = "; ".join(f"{trial.state} with {_config(trial)}: {trial.reason}" for trial in other[:3])
    return [
        *lines,
        "",
        "The five best and the two worst trials." + (f" {len(other)} ended otherwise: {said}." if other else ""),
    ]


def _config(trial: TrialRecord) -> str:
    return ", ".join(f"{key} = {_short(value)}" for key, value in sorted(trial.config.items()))


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
