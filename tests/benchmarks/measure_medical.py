"""What a run of ``searches/medical.py`` measured, beside training without privacy, written into searches/README.md.

    raydp run searches/medical.py --storage RUN_DIR
    python tests/benchmarks/measure_medical.py RUN_DIR

The row without privacy is the same network trained by plain mini-batch gradient descent of as many epochs on the same
images, with the best of the same learning rates by the same metric: NON-PRIVATE analysis of a public benchmark.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from raydp import data, models
from raydp.data import Dataset
from raydp.search.results import Result
from raydp.tasks import task
from raydp.training.run import held_out_of

README = Path(__file__).parents[2] / "searches" / "README.md"
BEGIN, END = "<!-- medical: begin -->", "<!-- medical: end -->"
METRICS = ("auroc", "balanced_accuracy", "minority_recall", "sensitivity", "specificity")
Values = Mapping[str, Sequence[float | None]]


def without_privacy(
    dataset: Dataset, *, model_name: str, rate: float, epochs: int, batch: int, seed: int
) -> dict[str, float]:
    """The metrics of a network that was trained without noise or clipping."""
    examples = dataset.private.non_private("the ceiling in the table of searches/medical.py, a public benchmark")
    wanted = task(dataset.task)
    model = models.build_model(model_name, input_shape=examples.input_shape, outputs=examples.outputs, seed=seed)
    inputs = dataset.normalization.apply(examples.inputs)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(epochs):
        for chosen in torch.randperm(len(inputs), generator=generator).split(batch):
            loss = wanted.loss(model(inputs[chosen]), examples.targets[chosen]) / len(chosen)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return wanted.evaluate(model, held_out_of(dataset))


def ceiling(result: Result) -> tuple[str, Values]:
    """The best of the search's learning rates without privacy, and its metrics by seed."""
    search = result.search
    dataset = data.load(search["data"], limit=search["data_limit"])
    model_name = search["model"] or models.default_model(dataset.private.input_shape, outputs=dataset.private.outputs)
    rates = sorted({float(trial.config["learning_rate"]) for trial in result.trials})
    fixed, found = search["fixed"], {}
    for rate in rates:
        runs = [
            without_privacy(
                dataset, model_name=model_name, rate=rate, epochs=fixed["epochs"], batch=fixed["batch_size"], seed=seed
            )
            for seed in range(search["seeds"])
        ]
        found[rate] = {metric: [run[metric] for run in runs] for metric in METRICS}
    best = max(found, key=lambda rate: statistics.fmean(found[rate]["auroc"]))
    return f"{best:g}", found[best]


def row(method: str, rate: str, values: Values) -> str:
    cells = []
    for metric in METRICS:
        known = [100 * value for value in values[metric] if value is not None]
        cells.append(f"{statistics.fmean(known):.1f} ± {statistics.stdev(known):.1f}")
    return f"| {method} | {rate} | {' | '.join(cells)} |"


def table(result: Result) -> str:
    """The section: a row a method, and paired differences."""
    torch.set_num_threads(1)
    best = {}
    for trial in result.trials:
        name, score = str(trial.config["method"]), trial.mean("auroc")
        if score is not None and (name not in best or score > (best[name].mean("auroc") or 0)):
            best[name] = trial
    search = result.search
    lines = [
        f"ε = {search['budget']['epsilon']:g}, δ = {search['budget']['delta']:g}, {search['seeds']} paired seeds, %.",
        "",
        "| method | learning rate | AUROC | balanced accuracy | minority recall | sensitivity | specificity |",
        "|---|---|---|---|---|---|---|",
        *(row(name, f"{trial.config['learning_rate']:g}", trial.metrics) for name, trial in sorted(best.items())),
        row("without privacy", *ceiling(result)),
        "",
    ]
    for left, right in (("tp_topk", "tp_rand"), ("tp_topk", "dp_sgd")):
        pairs = zip(best[left].metrics["auroc"], best[right].metrics["auroc"], strict=True)
        differences = [100 * (a - b) for a, b in pairs if a is not None and b is not None]
        listed = ", ".join(f"{difference:+.1f}" for difference in differences)
        lines.append(f"* AUROC, {left} − {right} by seed: {listed}; mean {statistics.fmean(differences):+.2f}")
    return "\n".join(lines)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    section = table(Result.load(Path(sys.argv[1])))
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    README.write_text(f"{before}{BEGIN}\n\n{section}\n\n{END}{after}", encoding="utf-8")
    print(section)


if __name__ == "__main__":
    main()
