"""What noise fit for release costs: a draw, and a training step, against floating point from a statistical generator.

    python -m tests.benchmarks.bench_noise [--blocks 7]

The rows of the first table are processor nanoseconds a draw on one thread. Those of the second are milliseconds a step:
a run's own step (exact integer sum, rounded normals from AES-256-CTR), and the same step with what it replaces (a
float32 matrix-vector product, numpy's float64 ziggurat on Philox), interleaved; medians over the blocks.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from raydp.geometry.clipping import clip_factors
from raydp.privacy.ledger import LedgerWriter
from raydp.privacy.mechanism import Phase
from raydp.privacy.noise import NoiseKey
from raydp.privacy.stream import Stream
from raydp.training import step as private_step
from raydp.training.run import RunSpec, _Run
from tests.benchmarks.bench_step import noise_images
from tests.training.helpers import hand_made_plan

#: name -> model, data, private examples, steps in a block
ROWS = {
    "mlp 8x8x1 B=256": ("mlp", "digits", 1437, 20),
    "tanh_cnn 28x28x1 B=256": ("tanh_cnn", "mnist5k", 4000, 4),
    "resnet20 32x32x3 B=256": ("resnet20", "noise32", 4000, 1),
}


def seconds(action: Callable[[], object]) -> float:
    begun = time.process_time()
    action()
    return time.process_time() - begun


def float_sum(coordinates: Sequence[Tensor], clip_norm: float, spacing: float) -> list[Tensor]:
    factors, _ = clip_factors(coordinates, clip_norm)
    return [(factors @ part).to(torch.int64) for part in coordinates]  # the conversion only keeps the accumulator


def float_release(clipped: private_step.ClippedSum, *, phase: Phase, step: int, key: NoiseKey) -> list[Tensor]:
    released = []
    for index, total in enumerate(clipped.total):
        seed = np.frombuffer(key.generator("noise", phase.name, step, index).read(16), dtype="<u8")
        noise = np.random.Generator(np.random.Philox(key=seed)).standard_normal(total.numel())
        noisy = (total.double() + phase.noise_std * torch.from_numpy(noise)) / phase.batch_size
        released.append(noisy.to(torch.float32))
    return released


def draws(blocks: int) -> None:
    print("| draws at once | rounded normal, AES-256-CTR | float64 ziggurat, Philox |\n|---|---|---|")
    for count in (1_000, 26_010, 269_722):
        repeat = max(1, 1_000_000 // count)
        stream, generator = Stream(bytes(32)), np.random.Generator(np.random.Philox(key=1))

        def ours(stream: Stream = stream, count: int = count, repeat: int = repeat) -> None:
            for _ in range(repeat):
                stream.rounded_normals(count, 2.0**22)

        def theirs(generator: np.random.Generator = generator, count: int = count, repeat: int = repeat) -> None:
            for _ in range(repeat):
                generator.standard_normal(count)

        found = [(seconds(ours), seconds(theirs)) for _ in range(blocks)]
        mine, other = (statistics.median(times) / count / repeat * 1e9 for times in zip(*found, strict=True))
        print(f"| {count:,} | {mine:.1f} ns | {other:.1f} ns |", flush=True)


def steps(blocks: int) -> None:
    print("\n| step | fit for release | floating point | slower by |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        images = noise_images(Path(scratch) / "noise32")
        for name, (model, data, population, block) in ROWS.items():
            config = {"batch_size": 256, "epochs": 1000, "learning_rate": 0.05}
            directory = Path(scratch) / model
            directory.mkdir()
            spec = RunSpec(
                directory=directory,
                key_file=directory / "key",
                method="dp_sgd",
                config=config,
                plan=hand_made_plan("dp_sgd", config, population=population),
                data=images if data == "noise32" else data,
                model=model,
                seed=0,
                insecure_seed=7,
            )
            with LedgerWriter(spec.ledger_file, spec.plan) as ledger:
                run = _Run(spec, ledger)
                phase = spec.plan.phases[0]
                order = iter(range(phase.steps))

                def advance(run: _Run = run, phase: Phase = phase, order: object = order, block: int = block) -> None:
                    for _ in range(block):
                        run._advance(phase, next(order))  # type: ignore[call-overload]

                def floating(advance: Callable[[], None] = advance) -> None:
                    with (
                        patch.object(private_step, "clipped_sum", float_sum),
                        patch.object(private_step, "release", float_release),
                    ):
                        advance()

                advance(), floating()
                found = [(seconds(advance), seconds(floating)) for _ in range(blocks)]
            ours, theirs = (statistics.median(times) / block * 1e3 for times in zip(*found, strict=True))
            print(f"| {name} | {ours:.2f} ms | {theirs:.2f} ms | {100 * (ours / theirs - 1):.1f} % |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=7)
    blocks = parser.parse_args().blocks
    torch.set_num_threads(1)
    draws(blocks)
    steps(blocks)


if __name__ == "__main__":
    main()
