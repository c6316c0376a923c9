"""Time of a DP-NGD step against a DP-SGD step on the same engine, and of a curvature refresh.

    python -m tests.benchmarks.bench_whitening [--models resnet20 …] [--batch 256] [--threads 2] [--blocks 7]

Per-example gradients, projection, clipped sum, noise and lift of one logical batch of random 32x32 images, in the
micro-batches that a run would use, with the identity and with the whitening, interleaved; medians over the blocks.
The cost of whitening falls with the share of the eigenvalues that lie below the floor, so it is given for several.
``amortised`` adds an estimate of the curvature on 500 public images every 8 steps, at a logical batch of 1024.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

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


def timed(call: Callable[[], object], clock: Callable[[], float]) -> float:
    begun = clock()
    call()
    return clock() - begun


def measure(
    name: str, *, batch: int, blocks: int, clamped: float, clock: Callable[[], float]
) -> dict[str, float | str]:
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
    floor = float(eigenvalues[min(int(clamped * len(eigenvalues)), len(eigenvalues) - 1)])

    def whitened() -> None:  # a new floor at every step, as in a run
        step(Whitening(curvature=curvature, floor=floor))

    times: dict[str, list[float]] = {"dp_sgd": [], "dp_ngd": [], "refresh": []}
    step(identity)
    for _ in range(blocks):
        times["dp_sgd"].append(timed(lambda: step(identity), clock))
        times["dp_ngd"].append(timed(whitened, clock))
        times["refresh"].append(timed(refresh, clock))
    middle = {name: statistics.median(values) for name, values in times.items()}
    logical = {name: middle[name] * LOGICAL / batch for name in ("dp_sgd", "dp_ngd")}
    return {
        "model": name,
        "clamped": clamped,
        **{f"{name}_seconds": round(value, 4) for name, value in middle.items()},
        "ratio": round(statistics.median(b / a for a, b in zip(times["dp_sgd"], times["dp_ngd"], strict=True)), 3),
        "amortised": round((logical["dp_ngd"] + middle["refresh"] / INTERVAL) / logical["dp_sgd"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tanh_cnn_small", "resnet20"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--clamped", type=float, nargs="+", default=[0.5, 0.9, 0.99, 1.0], help="share on the floor")
    parser.add_argument("--cpu-time", action="store_true", help="the process's CPU time instead of the wall's")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    print(json.dumps({"threads": arguments.threads, "batch": arguments.batch, "blocks": arguments.blocks}))
    for name in arguments.models:
        for clamped in arguments.clamped:
            found = measure(name, batch=arguments.batch, blocks=arguments.blocks, clamped=clamped, clock=clock)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
