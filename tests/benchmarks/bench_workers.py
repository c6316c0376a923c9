"""The step time of a run on two workers against one, and what its checkpoints cost.

    python -m tests.benchmarks.bench_workers [--workers 2] [--methods dp_sgd dp_ngd] [--blocks 5] [--write]

ResNet-20 on random 32x32 colour images at a logical batch of 256, one thread a process. The first of the processes also
holds a run of one worker; blocks of its steps and of steps of the run that all share are interleaved, and a ratio is
the median over the blocks of the ratios within a block. A block of dp_ngd is as many steps as lie between two
curvatures, one of which is estimated in it. ``wall`` is what a person waits for, and means little on a machine that is
busy otherwise; ``CPU`` is the processor time of the busiest worker against that of the one, which leaves out waiting:
what the wall would be if every worker had a processor of its own and the network took no time. The load of the machine
is printed beside them. The requirement is a ratio of at most 0.6 on two workers.

A checkpoint is all that makes a report durable (the ledger's line, the state, the fsyncs), without the metrics that are
measured for it. Its share is that of the training between two reports, at the default number of reports and epochs on
these 4,000 images. The requirement is at most 3 %.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raydp.methods import method
from raydp.methods.base import GradientHyperparameters
from raydp.privacy.ledger import LedgerRecorder, LedgerWriter
from raydp.training import checkpoint
from raydp.training.run import RunSpec, _followed, _Run
from raydp.training.workers import Alone, Workers, gather
from tests.benchmarks.bench_step import noise_images
from tests.training.helpers import hand_made_plan
from tests.training.processes import together

BATCH, IMAGES = 256, 4000
README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- bench_workers: begin -->", "<!-- bench_workers: end -->"
CONFIGS: dict[str, tuple[dict[str, Any], int]] = {  # method -> its config, steps in a block
    "dp_sgd": ({}, 3),
    "dp_ngd": ({"curvature_source": "noise"}, 8),  # its curvature_interval
}


@dataclass(frozen=True, kw_only=True)
class Block:
    """Seconds a step: of one worker (wall, processor), and of all (wall, processor of the busiest)."""

    alone: tuple[float, float]
    shared: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the first worker measured.

    Attributes:
        blocks: in turn.
        saves: seconds that a checkpoint took (wall, processor).
        checkpoint_bytes: size of one.
        loads: of the machine, before and after.
    """

    blocks: list[Block]
    saves: list[tuple[float, float]]
    checkpoint_bytes: int
    loads: tuple[float, float]


class Steps:
    """The steps of one run on its workers, and its checkpoints."""

    def __init__(self, directory: Path, name: str, data: str, workers: Workers) -> None:
        config = {"batch_size": BATCH, "epochs": 1000, "learning_rate": 0.05, **CONFIGS[name][0]}
        spec = RunSpec(
            directory=directory,
            key_file=directory / "key",
            method=name,
            config=config,
            plan=hand_made_plan(name, config, population=IMAGES),
            data=data,
            model="resnet20",
            seed=0,
            insecure_seed=7,
        )
        writer: LedgerWriter | None = None
        if workers.rank == 0:
            directory.mkdir(parents=True)
            writer = LedgerWriter(spec.ledger_file, spec.plan)
        self.ledger: LedgerRecorder = _followed(spec, writer, workers)
        self._run = _Run(spec, self.ledger, workers=workers)
        self._phase, self._steps = spec.plan.phases[-1], iter(range(spec.plan.steps))
        self._directory = directory

    def advance(self, count: int) -> None:
        for _ in range(count):
            self._run._advance(self._phase, next(self._steps))

    def save(self) -> Path:
        assert isinstance(self.ledger, LedgerWriter)
        self.ledger.commit()
        return checkpoint.save(self._directory, self._run.step, self._run._state())


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds, of the wall and of this process."""
    wall, processor = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - processor


def measure(workers: Workers, directory: Path, name: str, data: str, blocks: int) -> Measured:
    """Interleaved blocks, one to warm up first."""
    count = CONFIGS[name][1]
    before = os.getloadavg()[0]
    shared = Steps(directory / "shared", name, data, workers)
    alone = Steps(directory / "alone", name, data, Alone()) if workers.rank == 0 else None
    found: list[Block] = []
    saves: list[tuple[float, float]] = []
    path = directory
    for turn in range(blocks + 1):
        single = (0.0, 0.0)
        if alone is not None:
            single = timed(lambda: alone.advance(count))
        workers.wait()
        wall, processor = timed(lambda: shared.advance(count))
        busiest = max(gather(workers, processor))
        if turn:
            block = Block(alone=(single[0] / count, single[1] / count), shared=(wall / count, busiest / count))
            found.append(block)
        if alone is not None:
            for _ in range(3):
                saves.append(timed(alone.save))
            path = alone.save()
    size = path.stat().st_size if path.is_file() else 0
    return Measured(blocks=found, saves=saves, checkpoint_bytes=size, loads=(before, os.getloadavg()[0]))


def row(name: str, count: int, found: Measured) -> str:
    """A line of the table."""
    hyperparameters = method(name).parse({"batch_size": BATCH})
    assert isinstance(hyperparameters, GradientHyperparameters)
    steps = hyperparameters.total_steps(IMAGES) / RunSpec.reports
    columns = []
    for clock in (0, 1):
        alone = statistics.median(block.alone[clock] for block in found.blocks)
        shared = statistics.median(block.shared[clock] for block in found.blocks)
        ratio = statistics.median(block.shared[clock] / block.alone[clock] for block in found.blocks)
        share = statistics.median(save[clock] for save in found.saves) / (steps * alone)
        columns.append(f"{alone:.2f} | {shared:.2f} | {ratio:.2f} | {100 * share:.2f} %")
    walls, processors = columns
    loads = f"{found.loads[0]:.1f} to {found.loads[1]:.1f}"
    size = f"{found.checkpoint_bytes / 2**20:.1f} MiB"
    return f"| {name} | {count} | {walls} | {processors} | {size} | {loads} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--methods", nargs="*", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--blocks", type=int, default=5, help="timed blocks of each run; medians over them")
    parser.add_argument("--write", action="store_true", help="write the table into README.md beside this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    command = f"python -m tests.benchmarks.bench_workers --workers {arguments.workers} --blocks {arguments.blocks}"
    lines = [
        f"`{command} --methods {' '.join(arguments.methods)}`: torch {torch.__version__}, {platform.machine()}, "
        f"{os.cpu_count()} processors, one thread a worker; seconds a step.",
        "",
        "| method | workers | one, wall | all, wall | ratio, wall | checkpoints, wall | one, CPU | busiest, CPU | "
        "ratio, CPU | checkpoints, CPU | a checkpoint | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        data = noise_images(Path(scratch) / "noise32", count=IMAGES)
        for name in arguments.methods:
            directory = Path(scratch) / name
            found = together(arguments.workers, measure, directory, name, data, arguments.blocks, timeout=3600)
            lines.append(row(name, arguments.workers, found[0]))
            print(lines[-1], flush=True)
    text = "\n".join(lines)
    print(text)
    if arguments.write:
        before, after = README.read_text(encoding="utf-8").split(BEGIN)
        README.write_text(f"{before}{BEGIN}\n{text}\n{END}{after.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
