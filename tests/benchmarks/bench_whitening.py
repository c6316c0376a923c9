"""Time of a DP-NGD step against a DP-SGD step on the same engine, against Opacus, and of a curvature refresh.

    python -m tests.benchmarks.bench_whitening [--models resnet20 …] [--batch 256] [--threads 2] [--blocks 7] [--write]

Per-example gradients, lengths, clipped sum, noise and lift of one logical batch of random 32x32 images, in the
micro-batches that a run would use, with the identity and with the whitening. The cost of whitening falls with the share
of the eigenvalues that lie below the floor, so it is given for several. ``amortised`` adds an estimate of the curvature
on 500 public images every 8 steps, at a logical batch of 1024. Beside them: the same batch through Opacus'
``GradSampleModule`` and ``DPOptimizer`` in micro-batches of 32, 64 and 128 (the fastest counts), and one step of SGD
without privacy.

All loops are interleaved, so that what else the machine does falls on all of them alike; a ratio is the median over the
blocks of the ratios within a block, on the wall's clock and on the process's CPU time (all threads together).
``--write`` puts the tables into the README beside this file.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import opacus
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch.nn import functional as F

from raydp.geometry import Geometry, Identity, Whitening
from raydp.geometry.curvature import Curvature
from raydp.geometry.kfac import estimate_curvature
from raydp.models import build_model
from raydp.privacy.mechanism import Phase, PhaseSpec
from raydp.privacy.noise import NoiseKey
from raydp.training.gradients import PerExampleGradients, equal_parts
from raydp.training.step import private_gradient

SHAPE, CLASSES = (3, 32, 32), 10
PUBLIC, INTERVAL, LOGICAL = 500, 8, 1024
MICRO_BATCH = 256  # a run's default limit
OPACUS_MICRO_BATCHES = (32, 64, 128)
README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- bench_whitening: begin -->", "<!-- bench_whitening: end -->"

Loop = Callable[[], object]
Times = dict[str, list[tuple[float, float]]]  # of each loop the (wall, CPU) seconds of each block


def loops_of(name: str, *, batch: int, shares: list[float]) -> dict[str, Loop]:
    """The loops of one model; each call is one logical step, or one refresh."""
    model = build_model(name, input_shape=SHAPE, outputs=CLASSES, seed=0)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, *SHAPE, generator=generator)
    labels = torch.randint(CLASSES, (batch,), generator=generator)
    public = torch.randn(PUBLIC, *SHAPE, generator=generator)
    engine, key = PerExampleGradients(model), NoiseKey.insecure(0)
    spec = PhaseSpec(name="train", steps=1000, batch_size=batch, population=50_000, clip_norm=1.0)
    phase = Phase(spec=spec, noise_multiplier=1.0)

    def refresh() -> Curvature:
        return estimate_curvature(model, public, generator=generator)

    def step(geometry: Geometry) -> None:
        parts = equal_parts(batch, min(MICRO_BATCH, engine.preferred_batch))
        gradients = (engine(images[part], labels[part]) for part in parts)
        geometry.lift(private_gradient(gradients, geometry=geometry, phase=phase, step=0, key=key))

    identity, curvature = Identity(sizes=tuple(p.numel() for p in engine.parameters)), refresh()
    eigenvalues = curvature.eigenvalues.sort().values

    def whitened(share: float) -> Loop:
        floor = float(eigenvalues[min(int(share * len(eigenvalues)), len(eigenvalues) - 1)])
        return lambda: step(Whitening(curvature=curvature, floor=floor))  # a new floor at every step, as in a run

    def with_opacus(micro_batch: int) -> Loop:
        own = build_model(name, input_shape=SHAPE, outputs=CLASSES, seed=0)
        wrapped = GradSampleModule(own, loss_reduction="sum")
        optimizer = DPOptimizer(
            torch.optim.SGD(wrapped.parameters(), lr=1e-9),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=batch,
            loss_reduction="sum",
        )

        def advance() -> None:
            parts = list(zip(images.split(micro_batch), labels.split(micro_batch), strict=True))
            for position, (image, label) in enumerate(parts):
                optimizer.signal_skip_step(do_skip=position < len(parts) - 1)
                F.cross_entropy(wrapped(image), label, reduction="sum").backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return advance

    plain = build_model(name, input_shape=SHAPE, outputs=CLASSES, seed=0)
    sgd = torch.optim.SGD(plain.parameters(), lr=1e-9)

    def without_privacy() -> None:
        sgd.zero_grad(set_to_none=True)
        F.cross_entropy(plain(images), labels).backward()
        sgd.step()

    loops: dict[str, Loop] = {"dp_sgd": lambda: step(identity)}
    loops |= {f"dp_ngd {share:g}": whitened(share) for share in shares}
    loops |= {"refresh": refresh, "sgd": without_privacy}
    return loops | {f"opacus {size}": with_opacus(size) for size in OPACUS_MICRO_BATCHES}


def measure(loops: dict[str, Loop], blocks: int) -> Times:
    """All loops in turn, ``blocks`` times, after one turn that is not counted."""
    times: Times = {name: [] for name in loops}
    for turn in range(blocks + 1):
        for name, loop in loops.items():
            wall, cpu = time.perf_counter(), time.process_time()
            loop()
            if turn:
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def table(name: str, times: Times, *, batch: int) -> str:
    """A Markdown table of one model."""

    def seconds(loop: str, clock: int) -> float:
        return statistics.median(found[clock] for found in times[loop])

    def ratio(loop: str, to: str, clock: int) -> float:
        return statistics.median(a[clock] / b[clock] for a, b in zip(times[loop], times[to], strict=True))

    def amortised(loop: str, clock: int) -> float:
        """Refresh and step in the same block, at the logical batch."""
        rows = zip(times[loop], times["refresh"], times["dp_sgd"], strict=True)
        scale = LOGICAL / batch
        return statistics.median((a[clock] * scale + r[clock] / INTERVAL) / (b[clock] * scale) for a, r, b in rows)

    lines = [
        f"`{name}`, batch {batch}",
        "",
        "| loop | seconds, wall | seconds, CPU | ratio | wall | CPU | amortised, wall | amortised, CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    best = min((loop for loop in times if loop.startswith("opacus")), key=lambda loop: seconds(loop, 0))
    against = {loop: "dp_sgd" for loop in times if loop.startswith("dp_ngd")} | {"refresh": "dp_sgd"}
    for loop in times:
        if loop.startswith("opacus") and loop != best:
            continue
        top, to = (loop, against[loop]) if loop in against else ("dp_sgd", loop)
        ratios = [f"{top} / {to}", *(f"{ratio(top, to, clock):.2f}" for clock in (0, 1))]
        both = [f"{amortised(loop, clock):.2f}" if loop.startswith("dp_ngd") else "" for clock in (0, 1)]
        if loop == "dp_sgd":
            ratios = ["", "", ""]
        numbers = [f"{seconds(loop, clock):.3f}" for clock in (0, 1)]
        lines.append("| " + " | ".join([loop, *numbers, *ratios, *both]) + " |")
    return "\n".join(lines)


def write(text: str) -> None:
    """Put the text between the markers of the README."""
    before, rest = README.read_text().split(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet20"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--clamped", type=float, nargs="+", default=[0.5, 0.9, 0.99], help="share on the floor")
    parser.add_argument("--write", action="store_true", help="into the README beside this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shares = " ".join(map(str, arguments.clamped))
    found = [
        f"`python -m tests.benchmarks.bench_whitening --models {' '.join(arguments.models)} --batch {arguments.batch} "
        f"--threads {arguments.threads} --blocks {arguments.blocks} --clamped {shares}`: torch {torch.__version__}, "
        f"opacus {opacus.__version__}, {platform.machine()}."
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus' hooks warn about inputs without gradient
        for name in arguments.models:
            times = measure(loops_of(name, batch=arguments.batch, shares=arguments.clamped), arguments.blocks)
            found.append(table(name, times, batch=arguments.batch))
            print(found[-1], flush=True)
    if arguments.write:
        write("\n\n".join(found))


if __name__ == "__main__":
    main()
