"""Peak memory of one private step on a large logical batch: it follows the micro-batch, not the batch.

    python tests/benchmarks/bench_memory.py [--model NAME] [--json]

Each row is a process of its own; what is printed is the growth of its peak resident memory during the step.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

ROWS = [(256, 32), (1024, 32), (4096, 32), (4096, 128), (4096, 512)]


def measure(model_name: str, batch: int, micro_batch: int) -> float:
    """Megabytes of growth of the peak resident memory in one step."""
    import torch

    from raydp.geometry import Identity
    from raydp.models import build_model
    from raydp.privacy import NoiseKey
    from raydp.privacy.mechanism import Phase, PhaseSpec
    from raydp.training.gradients import PerExampleGradients
    from raydp.training.step import private_gradient

    torch.set_num_threads(1)
    gradients = PerExampleGradients(build_model(model_name, input_shape=(3, 32, 32), outputs=10, seed=0))
    geometry = Identity(sizes=tuple(parameter.numel() for parameter in gradients.parameters))
    spec = PhaseSpec(name="train", steps=1, batch_size=batch, population=50_000, clip_norm=1.0)
    phase = Phase(spec=spec, noise_multiplier=1.0)
    images = torch.randint(0, 256, (batch, 3, 32, 32), dtype=torch.uint8)
    labels = torch.zeros(batch, dtype=torch.long)

    def step(count: int) -> None:
        pieces = (slice(start, min(start + micro_batch, count)) for start in range(0, count, micro_batch))
        parts = (gradients(images[piece].float() / 255, labels[piece]) for piece in pieces)
        private_gradient(parts, geometry=geometry, phase=phase, step=0, key=NoiseKey.insecure(0))

    step(1)  # what is loaded once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(batch)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tanh_cnn_small")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--row", nargs=2, type=int, metavar=("BATCH", "MICRO_BATCH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        print(measure(arguments.model, *arguments.row))
        return
    found = []
    for batch, micro_batch in ROWS:
        command = [sys.executable, __file__, "--model", arguments.model, "--row", str(batch), str(micro_batch)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append({"batch": batch, "micro_batch": micro_batch, "megabytes": round(float(done.stdout), 1)})
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{arguments.model}: batch, micro-batch, growth of the peak in MB")
    for row in found:
        print(f"{row['batch']:6d} {row['micro_batch']:6d} {row['megabytes']:8.1f}")


if __name__ == "__main__":
    main()
