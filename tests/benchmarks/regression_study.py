"""The linear-regression case study of DP-DeepSets (arXiv 2606.26772, section 4), against tuned DP gradient descent.

    python -m tests.benchmarks.regression_study [--parts table dimension ...] [--store FILE] [--write] [--figure FILE]

Everything is synthetic (:mod:`raydp.data.regression`), α_i = i^-γ, δ = 1e-5, adjacency replace_one, and both sides are
accounted for exactly: T full-batch steps are one Gaussian mechanism, s = 2C√T/(N·μ(ε, δ)). The error is E‖ω - w‖².

* encoder: the explicit network of the paper's proof, φ1 = y·x_{1:k}, clip C = c√k, zero padding. The mean over the
  noise is taken exactly, so only the tasks vary. Best of k and c.
* DP-GD: best of T, C = c√d and η, on the squared loss r²/2. As ‖x‖ = √d for every example, clipping clamps r to ±c.
* DP-GD with the prior: coordinates scaled by α, or the first k alone: the public knowledge that the encoder has too.
* learned: :mod:`raydp.models.hypernetwork`, trained on public tasks as the method ``dp_deepsets`` trains it.

Best-of-grid on the tasks themselves flatters every arm alike. A part that is in the store is not computed again.
``--runs`` adds what the searches of those run directories found. ``--write`` puts the tables between the markers of
searches/README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raydp.data.regression import LinearTasks
from raydp.methods.hypernetwork_training import PublicSets, SetLosses, TrainingOptions, train
from raydp.models import build_model
from raydp.models.hypernetwork import Architecture, Hypernetwork, Layout
from raydp.privacy import gaussian
from raydp.search.results import Result
from raydp.tasks import task

README = Path(__file__).parents[2] / "searches" / "README.md"
BEGIN, END = "<!-- regression study: begin -->", "<!-- regression study: end -->"
DELTA = 1e-5
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, math.inf)
POWERS = (1, 2, 4, 8, 16, 32, 64, 128)
CLIPS = (1.0, 1.5, 2.5)
GD_STEPS, GD_CLIPS, GD_RATES = (1, 5, 20), (0.5, 1.0, 2.0), (0.05, 0.2, 0.5, 1.0)


def noise_std(epsilon: float, *, clip_norm: float, points: int, steps: int = 1) -> float:
    """Standard deviation of the noise on the average of ``points`` vectors, in each of ``steps`` releases."""
    if math.isinf(epsilon):
        return 0.0
    return 2 * clip_norm * math.sqrt(steps) / gaussian.mu(epsilon, DELTA) / points


def draw(tasks: LinearTasks, count: int, points: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x (count, points, d), y (count, points) and w (count, d)."""
    generator = np.random.default_rng([seed, count, points])
    weights = tasks.weights(count, generator)
    x, y = tasks.examples(weights, points, generator)
    return torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(weights).float()


def encoder_errors(
    x: Tensor, y: Tensor, w: Tensor, *, epsilons: Sequence[float], ks: Iterable[int], clips: Sequence[float] = CLIPS
) -> list[dict[int, float]]:
    """For each ε: k -> mean error of the explicit network at the best c."""
    points = x.shape[1]
    found: list[dict[int, float]] = [{} for _ in epsilons]
    for k in ks:
        vectors = y[..., None] * x[..., :k]
        norms, tail = vectors.norm(dim=2), w[:, k:].square().sum(dim=1)
        for c in clips:
            clip_norm = c * math.sqrt(k)
            factors = clip_norm / norms.clamp(min=clip_norm)
            average = torch.einsum("tn,tnk->tk", factors, vectors) / points
            error = float(((average - w[:, :k]).square().sum(dim=1) + tail).mean())
            for epsilon, by_k in zip(epsilons, found, strict=True):
                noise = k * noise_std(epsilon, clip_norm=clip_norm, points=points) ** 2
                by_k[k] = min(by_k.get(k, math.inf), error + noise)
    return found


def gradient_descent_errors(
    x: Tensor,
    y: Tensor,
    w: Tensor,
    *,
    epsilons: Sequence[float],
    scale: Tensor,
    rates: Sequence[float] = GD_RATES,
    seed: int = 0,
) -> list[float]:
    """For each ε: mean error of tuned DP-GD on v, where the weights are scale·v; the best over T, c and η."""
    z = x * scale
    norms = z.norm(dim=2, keepdim=True)
    best = [math.inf] * len(epsilons)
    step = torch.tensor(rates).repeat(len(epsilons))[None, :, None]
    generator = torch.Generator().manual_seed(seed)
    for steps in GD_STEPS:
        for c in GD_CLIPS:
            clip_norm = c * float(scale.norm())
            limit = clip_norm / norms  # |r|·‖z‖ <= C, as clipping the vector r·z does
            stds = [noise_std(each, clip_norm=clip_norm, points=x.shape[1], steps=steps) for each in epsilons]
            std = torch.tensor(stds).repeat_interleave(len(rates))[None, :, None]
            v = torch.zeros(len(x), len(epsilons) * len(rates), x.shape[2])
            for _ in range(steps):
                residual = z @ v.transpose(1, 2) - y[..., None]
                residual = torch.maximum(torch.minimum(residual, limit), -limit)
                gradient = (residual.transpose(1, 2) @ z) / x.shape[1]
                v = v - step * (gradient + std * torch.randn(v.shape, generator=generator))
            errors = (v * scale - w[:, None]).square().sum(dim=2).mean(dim=0).view(len(epsilons), len(rates))
            best = [min(old, float(new)) for old, new in zip(best, errors.amin(dim=1), strict=True)]
    return best


def priors(tasks: LinearTasks) -> list[Tensor]:
    """Scalings that know α: by α itself, and by leaving the smallest coordinates out."""
    d, index = tasks.dimension, torch.arange(tasks.dimension)
    return [torch.from_numpy(tasks.scales).float(), *((index < k).float() for k in (2, 4, 8, 16, 32) if k < d)]


def arms(tasks: LinearTasks, epsilons: Sequence[float], points: int) -> list[dict[str, float]]:
    """For each ε: errors of the three arms that learn nothing in public; 40 tasks for the encoder, 12 for DP-GD."""
    x, y, w = draw(tasks, 40, points, 1)
    by_epsilon = encoder_errors(x, y, w, epsilons=epsilons, ks=[k for k in POWERS if k <= tasks.dimension])
    x, y, w = x[:12], y[:12], w[:12]
    plain = gradient_descent_errors(x, y, w, epsilons=epsilons, scale=torch.ones(tasks.dimension))
    scaled = [
        gradient_descent_errors(x, y, w, epsilons=epsilons, scale=scale, rates=(*GD_RATES, 2.0))
        for scale in priors(tasks)
    ]
    rows = []
    for index, by_k in enumerate(by_epsilon):
        k = min(by_k, key=by_k.__getitem__)
        prior = min(errors[index] for errors in scaled)
        rows.append({"encoder": by_k[k], "k": k, "gd": plain[index], "gd_prior": prior})
    return rows


def part_table() -> list[dict[str, Any]]:
    """Every ε at N = 512 and 2048."""
    return [
        {"points": points, "epsilon": epsilon, **row}
        for points in (512, 2048)
        for epsilon, row in zip(EPSILONS, arms(LinearTasks(), EPSILONS, points), strict=True)
    ]


def part_width() -> list[dict[str, Any]]:
    """Error against k, and the best k against εN."""
    rows = []
    for points in (512, 2048):
        x, y, w = draw(LinearTasks(), 40, points, 1)
        ks = (1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 45, 64)
        for epsilon, by_k in zip(EPSILONS[:-1], encoder_errors(x, y, w, epsilons=EPSILONS[:-1], ks=ks), strict=True):
            rows.append({"points": points, "epsilon": epsilon, "errors": by_k, "k": min(by_k, key=by_k.__getitem__)})
    return rows


def part_dimension() -> list[dict[str, Any]]:
    """Error against d, with N = d^1.5 and ε = 1."""
    rows = []
    for d in (16, 32, 64, 128):
        tasks, points = LinearTasks(dimension=d), round(d**1.5)
        rows.append({"d": d, "points": points, "energy": tasks.energy, **arms(tasks, (1.0,), points)[0]})
    return rows


def part_gamma() -> list[dict[str, Any]]:
    """Error against γ, at d = 64, N = 512, ε = 2."""
    rows = []
    for gamma in (0.5, 0.75, 1.0, 1.5, 2.0):
        tasks = LinearTasks(gamma=gamma)
        rows.append({"gamma": gamma, "energy": tasks.energy, **arms(tasks, (2.0,), 512)[0]})
    return rows


def learned_error(
    *, epsilon: float, points: int, sets: int, embedding: int, clip_norm: float, steps: int, tasks: LinearTasks
) -> float:
    """Mean error on 40 fresh tasks of a hypernetwork that was trained on ``sets`` public ones."""
    public = tasks.public(sets, points)
    model = build_model("linear_map", input_shape=(tasks.dimension,), outputs=1, seed=0)
    layout = Layout.of(model)
    network = Hypernetwork(
        features=tasks.dimension + 1,
        layout=layout,
        architecture=Architecture(
            embedding=embedding, encoder_width=256, decoder="mlp", decoder_depth=1, decoder_hidden=128
        ),
        clip_norm=clip_norm,
        seed=0,
    )
    std = noise_std(epsilon, clip_norm=clip_norm, points=points)
    assert public.sets is not None
    train(
        network,
        losses=SetLosses(model, task("regression"), layout.names),
        public=PublicSets(
            features=torch.cat([public.inputs, public.targets[:, None]], dim=1),
            inputs=public.inputs,
            targets=public.targets,
            sets=public.sets,
        ),
        noise_std=std,
        options=TrainingOptions(steps=steps, learning_rate=2e-3, sets=8, loss_points=256, seed=0),
    )
    x, y, w = draw(tasks, 40, points, 1)
    with torch.no_grad():
        pooled = network.pool(torch.cat([x, y[..., None]], dim=2))
        noise = std * torch.randn(8, *pooled.shape, generator=torch.Generator().manual_seed(0))
        (generated,) = network.generate((pooled + noise).flatten(0, 1)).values()
        return float((generated.flatten(1).unflatten(0, (8, -1)) - w).square().sum(dim=2).mean())


def part_learned() -> list[dict[str, Any]]:
    """Learned hypernetworks at N = 512, for some ε: one for each, not tuned."""
    return [
        {
            "epsilon": epsilon,
            "error": learned_error(
                epsilon=epsilon, points=512, sets=1500, embedding=8, clip_norm=1.0, steps=1500, tasks=LinearTasks()
            ),
        }
        for epsilon in (0.5, 2.0, 8.0)
    ]


def part_public() -> list[dict[str, Any]]:
    """Learned hypernetworks against the number M of public tasks, at N = 512 and ε = 8: as many steps for each."""
    return [
        {
            "sets": sets,
            "error": learned_error(
                epsilon=8.0, points=512, sets=sets, embedding=8, clip_norm=1.0, steps=1500, tasks=LinearTasks()
            ),
        }
        for sets in (50, 200)
    ]


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "table": part_table,
    "width": part_width,
    "dimension": part_dimension,
    "gamma": part_gamma,
    "learned": part_learned,
    "public": part_public,
}


def report(found: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown of every part that was computed."""
    lines: list[str] = [
        "`python -m tests.benchmarks.regression_study --write`: synthetic tasks, δ = 1e-5, replace_one.",
        "",
    ]

    def add(title: str, head: str, rows: Iterable[str]) -> None:
        lines.extend([f"**{title}**", "", head, "|" + "---|" * (head.count("|") - 1), *rows, ""])

    if rows := found.get("table"):
        learned = {row["epsilon"]: row["error"] for row in found.get("learned", [])}
        add(
            "d = 64, γ = 1, error E‖ω - w‖² (the answer 0 has 0.543)",
            "| N | ε | encoder (best k) | learned DP-DeepSets | DP-GD | DP-GD with the prior |",
            (
                f"| {row['points']} | {_epsilon(row['epsilon'])} | {row['encoder']:.3f} ({row['k']}) | "
                f"{_maybe(learned.get(row['epsilon']) if row['points'] == 512 else None)} | {row['gd']:.3f} | "
                f"{row['gd_prior']:.3f} |"
                for row in rows
            ),
        )
    if rows := found.get("width"):
        ks = list(rows[0]["errors"])
        add(
            "Error against k: too few coordinates miss the signal, too many collect noise",
            f"| N | ε | εN | {' | '.join(f'k={k}' for k in ks)} | best k |",
            (
                f"| {row['points']} | {row['epsilon']:g} | {row['points'] * row['epsilon']:g} | "
                f"{' | '.join(format(row['errors'][k], '.3f') for k in ks)} | {row['k']} |"
                for row in rows
            ),
        )
    if rows := found.get("dimension"):
        add(
            "Error against d, N = d^1.5, ε = 1",
            "| d | N | encoder (best k) | DP-GD | DP-GD with the prior |",
            (
                f"| {row['d']} | {row['points']} | {row['encoder']:.3f} ({row['k']}) | {row['gd']:.3f} | "
                f"{row['gd_prior']:.3f} |"
                for row in rows
            ),
        )
    if rows := found.get("gamma"):
        add(
            "Share of E‖w‖² that remains, against γ (d = 64, N = 512, ε = 2)",
            "| γ | encoder (best k) | DP-GD | DP-GD with the prior |",
            (
                f"| {row['gamma']:g} | {row['encoder'] / row['energy']:.3f} ({row['k']}) | "
                f"{row['gd'] / row['energy']:.3f} | {row['gd_prior'] / row['energy']:.3f} |"
                for row in rows
            ),
        )
    if rows := found.get("public"):
        add(
            "Learned DP-DeepSets against the number M of public tasks (N = 512, ε = 8; M = 1500 in the first table)",
            "| M | error |",
            (f"| {row['sets']} | {row['error']:.3f} |" for row in rows),
        )
    return "\n".join(lines)


def report_searches(directory: Path) -> str:
    """Markdown of the run directories below ``directory``: what each search found, and what it cost."""
    rows = []
    for path in sorted(file.parent for file in directory.glob("*/raydp.json")):
        result = Result.load(path)
        best, complete = result.best, sum(trial.state == "complete" for trial in result.trials)
        if best is None or complete < result.search["trials"]:
            continue
        (metric, _), *_ = result.objectives
        values = best.metrics[metric]
        config = ", ".join(
            f"{name} = {value:.3g}" if isinstance(value, float) else f"{name} = {value}"
            for name, value in sorted(best.config.items())
        )
        whose = "largest member" if result.family else "if all members were one"
        whose = "public tasks" if result.selection.rule == "public" else whose
        rows.append(
            f"| {result.search['name']} | {result.budget.epsilon:g} | {len(result.trials)} × {len(values)} | "
            f"{np.mean(values):.3f} ± {np.std(values, ddof=1) / math.sqrt(len(values)):.3f} | {config} | "
            f"{result.epsilon_released.upper:.4g} ({whose}) |"
        )
    head = "| search | ε of a trial | trials × members | best error ± standard error | at | ε of the search |"
    title = (
        "**The searches, `--scale small`: `raydp run searches/deepsets_regression.py` and `deepsets_hypernetwork.py`**"
    )
    return "\n".join([title, "", head, "|" + "---|" * 6, *rows, ""]) if rows else ""


def _epsilon(value: float) -> str:
    return "no noise" if math.isinf(value) else f"{value:g}"


def _maybe(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def draw_figure(found: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """Error against ε, against k and against d."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for points, style in ((512, "-"), (2048, "--")):
        rows = [row for row in found["table"] if row["points"] == points and not math.isinf(row["epsilon"])]
        for arm, colour in (("encoder", "C0"), ("gd", "C1"), ("gd_prior", "C2")):
            label = {"encoder": "encoder", "gd": "DP-GD", "gd_prior": "DP-GD, prior"}[arm]
            left.plot(
                [r["epsilon"] for r in rows], [r[arm] for r in rows], style, color=colour, label=f"{label}, N={points}"
            )
    left.set(xscale="log", yscale="log", xlabel="ε", ylabel="E‖ω - w‖²")
    left.legend(fontsize=7)
    for row in found["width"]:
        if row["points"] == 512:
            middle.plot([int(k) for k in row["errors"]], list(row["errors"].values()), label=f"ε = {row['epsilon']:g}")
    middle.set(xscale="log", yscale="log", xlabel="k (N = 512)")
    middle.legend(fontsize=7)
    for arm, label in (("encoder", "encoder"), ("gd", "DP-GD"), ("gd_prior", "DP-GD, prior")):
        right.plot([r["d"] for r in found["dimension"]], [r[arm] for r in found["dimension"]], "o-", label=label)
    right.set(xscale="log", yscale="log", xlabel="d (N = d^1.5, ε = 1)")
    right.legend(fontsize=7)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--store", type=Path, default=Path("runs/regression_study.json"))
    parser.add_argument("--runs", type=Path, help="a directory of run directories of the searches")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, Any]]] = {}
    if arguments.store.exists():
        found = json.loads(arguments.store.read_text())
    for name in arguments.parts:
        if name in found:
            continue
        begun = time.process_time()
        found[name] = json.loads(json.dumps(PARTS[name]()))
        print(f"{name}: {time.process_time() - begun:.0f} CPU seconds", flush=True)
        arguments.store.parent.mkdir(parents=True, exist_ok=True)
        arguments.store.write_text(json.dumps(found, indent=1))
    text = report(found)
    if arguments.runs is not None:
        text += "\n" + report_searches(arguments.runs)
    print(text)
    if arguments.write:
        before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
        README.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    if arguments.figure is not None:
        draw_figure(found, arguments.figure)


if __name__ == "__main__":
    main()
