"""Steps per second of raydp's dp_sgd against a hand-written Opacus loop and against SGD without privacy.

    python -m tests.benchmarks.bench_step [--blocks 7] [--rows mlp …] [--json FILE]

All three loops train the same model on the same Poisson batches of the same images, on one thread, in one process,
interleaved in blocks of whole steps; figures are medians over the blocks. The clock is the process's CPU time, which on
one thread is the wall time less what other processes took (``--wall`` for the wall). raydp runs as a run does:
sampling, ledger, per-example gradients, clipping, keyed noise, optimiser, without evaluation. The Opacus loop is
``GradSampleModule`` and ``DPOptimizer`` on tensors in memory, at the micro-batch size that suits it best (all are
tried; the best in the medians counts), and once with ``functorch``. The requirement: raydp / best Opacus >= 1.0 in
every row.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import opacus
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor
from torch.nn import functional as F

from raydp import data, models
from raydp.privacy.ledger import LedgerWriter
from raydp.privacy.noise import NoiseKey, poisson_sample
from raydp.training.run import RunSpec, _Run
from tests.training.helpers import hand_made_plan

Advance = Callable[[], None]
# name -> model, data, batch size, steps in a block
ROWS: dict[str, tuple[str, str, int, int]] = {
    "mlp 8x8x1 B=256": ("mlp", "digits", 256, 20),
    "tanh_cnn 28x28x1 B=256": ("tanh_cnn", "mnist5k", 256, 4),
    "tanh_cnn 28x28x1 B=1000": ("tanh_cnn", "mnist5k", 1000, 1),
    "tanh_cnn_small 32x32x3 B=1000": ("tanh_cnn_small", "noise32", 1000, 1),
    "tanh_cnn 32x32x3 B=256": ("tanh_cnn", "noise32", 256, 1),
}
OPACUS_MICRO_BATCHES = (32, 64, 128, 256, 512, 1024)
LEARNING_RATE, CLIP_NORM, SIGMA = 0.05, 1.0, 1.0


def noise_images(directory: Path, *, count: int = 4000) -> str:
    """A data set of random 32x32 colour images: what is in them does not change the time a step takes."""
    generator = np.random.default_rng(0)
    directory.mkdir()
    for part, size in (("train", count), ("test", 100)):
        images = generator.integers(0, 256, (size, 32, 32, 3), dtype=np.uint8)
        labels = np.arange(size) % 10
        flat = pa.FixedSizeListArray.from_arrays(pa.array(images.reshape(-1)), 3)
        columns = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(flat, 32), 32)
        pq.write_table(pa.table({"image": columns, "label": labels}), directory / f"{part}.parquet")
    return str(directory)


class Bench:
    """The three loops of one row."""

    def __init__(self, row: str, *, noise32: str, directory: Path) -> None:
        self.model_name, source, self.batch_size, self.block = ROWS[row]
        self.source = noise32 if source == "noise32" else source
        self.dataset = data.load(self.source)
        self.population = len(self.dataset.private)
        self.config = {
            "batch_size": self.batch_size,
            "epochs": 10_000,
            "learning_rate": LEARNING_RATE,
            "clip_norm": CLIP_NORM,
        }
        self.plan = hand_made_plan("dp_sgd", self.config, sigma=SIGMA, population=self.population)
        self.directory = directory
        self.public = self.dataset.private.non_private("a benchmark of loops that have no ledger")
        self.key = NoiseKey.insecure(7).derive(0)  # the key that a run with insecure_seed = 7 and seed = 0 uses

    def raydp(self, ledgers: list[LedgerWriter], micro_batch: int = RunSpec.micro_batch) -> Advance:
        """A run's own step; the default is what a run uses. The engine may prefer smaller parts than asked for."""
        directory = self.directory / f"run-{len(ledgers)}"
        directory.mkdir(parents=True)
        spec = RunSpec(
            directory=directory,
            key_file=directory / "key",
            method="dp_sgd",
            config=self.config,
            plan=self.plan,
            data=self.source,
            model=self.model_name,
            seed=0,
            insecure_seed=7,
            micro_batch=micro_batch,
        )
        ledger = LedgerWriter(spec.ledger_file, self.plan)
        ledgers.append(ledger.__enter__())
        run = _Run(spec, ledger)
        phase = self.plan.phases[0]
        steps = iter(range(phase.steps))
        return lambda: run._advance(phase, next(steps))

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        phase = self.plan.phases[0]
        for step in range(phase.steps):
            indices = torch.from_numpy(poisson_sample(self.key, phase, step))
            yield self.public.inputs[indices], self.public.targets[indices]

    def _model(self) -> torch.nn.Module:
        return models.build_model(
            self.model_name,
            input_shape=self.dataset.private.input_shape,
            outputs=self.dataset.private.outputs,
            seed=0,
        )

    def opacus(self, micro_batch: int, *, functorch: bool = False) -> Advance:
        """``GradSampleModule`` and ``DPOptimizer``; micro-batches by ``signal_skip_step``, as BatchMemoryManager's."""
        model = GradSampleModule(self._model(), loss_reduction="sum", force_functorch=functorch)
        optimizer = DPOptimizer(
            torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
            noise_multiplier=SIGMA,
            max_grad_norm=CLIP_NORM,
            expected_batch_size=self.batch_size,
            loss_reduction="sum",
        )
        batches = self._batches()

        def advance() -> None:
            images, labels = next(batches)
            parts = list(zip(images.split(micro_batch), labels.split(micro_batch), strict=True))
            for position, (image, label) in enumerate(parts):
                optimizer.signal_skip_step(do_skip=position < len(parts) - 1)
                logits = model(self.dataset.normalization.apply(image))
                F.cross_entropy(logits, label, reduction="sum").backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return advance

    def sgd(self) -> Advance:
        """No clipping, no noise, one backward pass."""
        model = self._model()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        batches = self._batches()

        def advance() -> None:
            images, labels = next(batches)
            loss = F.cross_entropy(model(self.dataset.normalization.apply(images)), labels, reduction="sum")
            optimizer.zero_grad(set_to_none=True)
            (loss / self.batch_size).backward()
            optimizer.step()

        return advance


def measure(loops: dict[str, Advance], *, block: int, blocks: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median seconds a step of each loop, blocks interleaved, one warm-up block first."""
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(blocks + 1):
        for name, advance in loops.items():
            start = clock()
            for _ in range(block):
                advance()
            if turn:
                seconds[name].append((clock() - start) / block)
    return {name: statistics.median(values) for name, values in seconds.items()}


def bench(
    row: str, *, blocks: int, noise32: str, directory: Path, sweep: bool, clock: Callable[[], float]
) -> dict[str, object]:
    """One row of the table."""
    made = Bench(row, noise32=noise32, directory=directory)
    sizes = [size for size in OPACUS_MICRO_BATCHES if size < made.batch_size * 2]
    ledgers: list[LedgerWriter] = []
    try:
        loops = {"raydp": made.raydp(ledgers), "sgd": made.sgd()}
        loops |= {f"opacus {size}": made.opacus(size) for size in sizes}
        loops |= {f"opacus functorch {size}": made.opacus(size, functorch=True) for size in (64,)}
        if sweep:
            loops |= {f"raydp {size}": made.raydp(ledgers, size) for size in sizes}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Opacus' hooks warn about inputs without gradient
            seconds = measure(loops, block=made.block, blocks=blocks, clock=clock)
    finally:
        for ledger in ledgers:
            ledger.__exit__(None, None, None)
    rivals = {name: value for name, value in seconds.items() if name.startswith("opacus")}
    best = min(rivals, key=lambda name: rivals[name])
    whole = f"opacus {max(sizes)}"  # the whole batch at once: what a loop without micro-batches does
    return {
        "row": row,
        "steps_per_second": {name: 1 / value for name, value in seconds.items()},
        "best_opacus": best,
        "raydp_over_best_opacus": rivals[best] / seconds["raydp"],
        "raydp_over_plain_opacus": rivals[whole] / seconds["raydp"],
        "raydp_over_sgd": seconds["sgd"] / seconds["raydp"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=7, help="timed blocks of each loop; medians over them")
    parser.add_argument("--rows", nargs="*", default=[""], help="only the rows that contain one of these")
    parser.add_argument("--sweep", action="store_true", help="also raydp at every micro-batch size")
    parser.add_argument("--wall", action="store_true", help="measure wall time: only on a machine that is idle")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for row in ROWS if any(part in row for part in arguments.rows)]
    found = []
    print(f"torch {torch.__version__}, opacus {opacus.__version__}, one thread, {platform.machine()}")
    print(
        "| row | raydp steps/s | best Opacus steps/s | at | raydp / best Opacus | raydp / plain Opacus | raydp / SGD |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        noise32 = noise_images(Path(scratch) / "noise32")
        for number, row in enumerate(rows):
            result = bench(
                row,
                blocks=arguments.blocks,
                noise32=noise32,
                directory=Path(scratch) / str(number),
                sweep=arguments.sweep,
                clock=time.perf_counter if arguments.wall else time.process_time,
            )
            found.append(result)
            rates = result["steps_per_second"]
            assert isinstance(rates, dict)
            best = str(result["best_opacus"])
            print(
                f"| {row} | {rates['raydp']:.2f} | {rates[best]:.2f} | {best.removeprefix('opacus ')} | "
                f"{result['raydp_over_best_opacus']:.2f} | {result['raydp_over_plain_opacus']:.2f} | "
                f"{result['raydp_over_sgd']:.2f} |",
                flush=True,
            )
            if arguments.sweep:
                print("  " + "  ".join(f"{name}: {value:.2f}" for name, value in rates.items()), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "rows": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
