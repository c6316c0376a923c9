"""How time and memory grow with what a person makes larger, as exponents of fitted powers.

    python -m tests.benchmarks.bench_growth [--blocks 5] [--write]

Each quantity is doubled a few times with everything else fixed, the median of the CPU time over the blocks is taken
(one thread), and log time is fitted to log size by least squares over the larger half, where constants no longer count.
Memory is the growth of the resident peak (VmHWM) in a process of its own. ``--write`` puts the table into the README
beside this file.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from raydp.geometry import Identity
from raydp.privacy import Budget, PhaseSpec, calibrate
from raydp.privacy.accountants.rdp import RunningRdp
from raydp.privacy.mechanism import Mechanism, Phase
from raydp.privacy.noise import NoiseKey
from raydp.training.gradients import PerExampleGradients, equal_parts
from raydp.training.step import private_gradient
from tests.benchmarks.bench_calibration import _cold

README = Path(__file__).with_name("README.md")
_BEGIN, _END = "<!-- bench_growth: begin -->", "<!-- bench_growth: end -->"

Action = Callable[[], object]


def step(model: nn.Module, inputs: torch.Tensor) -> Action:
    """One private step of DP-SGD."""
    batch = len(inputs)
    labels = torch.zeros(batch, dtype=torch.long)
    gradients = PerExampleGradients(model, example=inputs[:1])
    geometry = Identity(sizes=tuple(parameter.numel() for parameter in gradients.parameters))
    spec = PhaseSpec(name="train", steps=1, batch_size=batch, population=10 * batch, clip_norm=1.0)
    phase, key = Phase(spec=spec, noise_multiplier=1.0), NoiseKey.insecure(0)

    def act() -> None:
        parts = equal_parts(batch, gradients.compact_batch)
        vectors = (gradients.compact(inputs[part], labels[part]) for part in parts)
        private_gradient(vectors, geometry=geometry, phase=phase, step=0, key=key, shapes=gradients.shapes)

    return act


def dense(width: int) -> Action:
    return step(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10)), torch.randn(64, width))


def convolutional(width: int) -> Action:
    layers = [nn.Conv2d(width, width, 3, padding=1), nn.Tanh(), nn.Conv2d(width, 4, 3), nn.Flatten()]
    return step(nn.Sequential(*layers, nn.Linear(4 * 36, 10)), torch.randn(16, width, 8, 8))


def batch_of(count: int) -> Action:
    return step(nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)), torch.randn(count, 256))


def phases(count: int) -> Action:
    """Calibration of a plan of so many phases of the same length, with nothing that an earlier one left."""
    specs = [
        PhaseSpec(
            name=f"phase{index}",
            steps=100,
            batch_size=500 + index,
            population=50_000,
            clip_norm=1.0,
            share=None if index == count - 1 else 1 / (count + 1),
        )
        for index in range(count)
    ]

    def act() -> None:
        _cold()
        calibrate(phases=specs, budget=Budget(epsilon=2.0, delta=1e-5))

    return act


def trials(count: int) -> Action:
    """Adding one more distinct trial to the running bound of a search that has so many."""
    running = RunningRdp()
    for index in range(count):
        running.add([Mechanism(noise_multiplier=1.0 + index / 1000, sample_rate=0.01, steps=100)])
    fresh = iter(np.linspace(5.0, 6.0, 10_000))

    def act() -> None:
        running.add([Mechanism(noise_multiplier=float(next(fresh)), sample_rate=0.01, steps=100)])
        running.epsilon(delta=1e-5, adjacency="add_remove")

    return act


#: what grows -> the sizes, what is done at a size, the exponent that theory gives, and of what.
ROWS: dict[str, tuple[Sequence[int], Callable[[int], Action], float, str]] = {
    "width of a dense layer": ((256, 512, 1024, 2048), dense, 2.0, "noise and one product over width² weights"),
    "channels of a convolution": ((32, 64, 128, 256), convolutional, 2.0, "passes and entries over channels² weights"),
    "batch": ((256, 512, 1024, 2048, 4096), batch_of, 1.0, "examples"),
    "phases of a plan": ((1, 2, 4, 8), phases, 1.0, "noise multipliers solved one by one"),
    "trials of a search": ((100, 200, 400, 800), trials, 0.0, "moments are added to a running sum"),
}


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Slope of log value over log size, of the larger half (at least two)."""
    half = max(2, (len(sizes) + 1) // 2)
    return float(np.polyfit(np.log(sizes[-half:]), np.log(np.maximum(values[-half:], 1e-9)), 1)[0])


def seconds(action: Action, blocks: int) -> float:
    """Median CPU time of one call."""
    action()
    found = []
    for _ in range(blocks):
        begun, calls = time.process_time(), 0
        while time.process_time() - begun < 0.05:
            action()
            calls += 1
        found.append((time.process_time() - begun) / calls)
    return statistics.median(found)


def peak(row: str, size: int) -> float:
    """MB by which the resident peak grows when it is done at this size, in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (row, size))


def _peak(row: str, size: int) -> float:
    torch.set_num_threads(1)
    sizes, make, *_ = ROWS[row]
    make(sizes[0])()  # what is loaded once
    action = make(size)
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    action()
    return max(0.0, _resident("VmHWM") - before)


def _resident(field: str = "VmRSS") -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def table(blocks: int) -> str:
    lines = [
        "| what grows | sizes | CPU ms | exponent | in theory | of | MB at the largest |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, (sizes, make, theory, of) in ROWS.items():
        times = [seconds(make(size), blocks) for size in sizes]
        lines.append(
            f"| {row} | {', '.join(map(str, sizes))} | {', '.join(f'{1000 * value:.3g}' for value in times)} | "
            f"{exponent(sizes, times):.2f} | {theory:g} | {of} | {peak(row, sizes[-1]):.0f} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="into the README beside this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = f"`python -m tests.benchmarks.bench_growth`, torch {torch.__version__}, one thread.\n\n"
    found += table(arguments.blocks)
    if arguments.write:
        text = README.read_text(encoding="utf-8")
        before, rest = text.split(_BEGIN)
        README.write_text(f"{before}{_BEGIN}\n{found}\n{rest[rest.index(_END) :]}", encoding="utf-8")


if __name__ == "__main__":
    main()
