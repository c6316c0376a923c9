"""DP-DeepSets on low-rank factors of a diffusion model: training steps with many public sets, and one release.

    python tests/benchmarks/bench_hypernetwork.py [--channels 16] [--set-size 128]

For 4, 16 and 64 public sets a step: seconds of a training step with the factors of all sets stacked in one pass, with
``torch.func.vmap``, and in a loop over the sets; and, for one private set, the release (one pass of the encoder and
of the hypernetwork) beside DP-SGD on the same factors (100 steps of a quarter of the set). Best of some repeats; peak
memory of the process after each part (it can only grow). Random weights and images: time does not depend on them.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.func import functional_call

from raydp.geometry import Identity
from raydp.methods.hypernetwork_training import SetLosses
from raydp.models.denoiser import Denoiser
from raydp.models.encoders import load_encoder
from raydp.models.hypernetwork import Architecture, Hypernetwork, Layout
from raydp.models.lora import add_lora
from raydp.models.unet import UNetShape, build_unet
from raydp.tasks import task
from raydp.training.gradients import PerExampleGradients
from raydp.training.step import clipped_sum

POINTS = 4  # examples of each set that enter the loss
FEATURES = 1280


def best_of(repeats: int, action: Callable[[], object]) -> float:
    """The least seconds of processor time that the action took, after one run that does not count."""
    action()
    taken = []
    for _ in range(repeats):
        begun = time.process_time()
        action()
        taken.append(time.process_time() - begun)
    return min(taken)


def memory() -> str:
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--set-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape = UNetShape(
        image_size=16,
        image_channels=1,
        channels=arguments.channels,
        residual_blocks=1,
        multipliers=(1, 2, 2),
        attention_sizes=(8, 4),
        heads=2,
        groups=8,
    )
    model, denoising = Denoiser(build_unet(shape), shape), task("denoising")
    add_lora(model, rank=1)
    layout = Layout.of(model)
    hypernetwork = Hypernetwork(features=FEATURES, layout=layout, architecture=Architecture(), clip_norm=1.0, seed=0)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"target: {count:,} parameters, {layout.parameters:,} generated in {layout.tokens} tokens; {memory()}")
    losses, mapped = (SetLosses(model, denoising, layout.names) for _ in range(2))
    mapped._stacks = False
    print("| sets a step | stacked, steps/s | vmap, steps/s | loop, steps/s | stacked against loop | peak memory |")
    print("|---|---|---|---|---|---|")
    for sets in (4, 16, 64):
        features = torch.randn(sets, arguments.set_size, FEATURES)
        inputs, targets = torch.rand(sets, POINTS, 1, 16, 16) * 2 - 1, torch.zeros(sets, POINTS)

        def step(run: Callable[[], torch.Tensor]) -> None:
            hypernetwork.zero_grad(set_to_none=True)
            run().backward()

        def together(loss: SetLosses, features: torch.Tensor = features) -> torch.Tensor:
            generated = hypernetwork.generate(hypernetwork.pool(features))
            draw = loss.draw(len(inputs), POINTS, (1, 16, 16), np.random.default_rng(0))  # noqa: B023 - used at once
            return loss(generated, inputs, targets, draw).mean()  # noqa: B023

        def looped(features: torch.Tensor = features) -> torch.Tensor:
            total = torch.zeros(())
            for index in range(len(features)):
                generated = hypernetwork.generate(hypernetwork.pool(features[index : index + 1]))
                own = {name: value[0] for name, value in generated.items()}
                draw = denoising.draw(POINTS, (1, 16, 16), np.random.default_rng(index))
                noisy, noise = denoising.examples(inputs[index], targets[index], draw)  # noqa: B023
                total = total + denoising.loss(functional_call(model, own, (noisy,)), noise) / POINTS
            return total / len(features)

        stacked, by_vmap, loop = (
            best_of(arguments.repeats, lambda run=run: step(run))
            for run in (lambda: together(losses), lambda: together(mapped), looped)
        )
        print(
            f"| {sets} | {1 / stacked:.2f} | {1 / by_vmap:.2f} | {1 / loop:.2f} | {loop / stacked:.1f} | {memory()} |",
            flush=True,
        )
    encoder, images = load_encoder("efficientnet_lite0"), torch.rand(arguments.set_size, 1, 16, 16) * 2 - 1

    @torch.no_grad()
    def release() -> None:
        hypernetwork.generate(hypernetwork.pool(encoder(images)[None]) + 0.1 * torch.randn(1, 128))

    @torch.no_grad()
    def decode() -> None:
        hypernetwork.generate(torch.randn(1, 128))

    print(f"release of a set of {arguments.set_size}: {best_of(arguments.repeats, release):.3f} s", end="")
    print(f", of which the hypernetwork's decoder {best_of(arguments.repeats, decode):.3f} s; {memory()}")
    gradients = PerExampleGradients(model, denoising.loss)
    geometry = Identity(sizes=tuple(parameter.numel() for parameter in gradients.parameters))
    batch = arguments.set_size // 4
    pairs = denoising.examples(
        images[:batch], torch.zeros(batch), denoising.draw(batch, (1, 16, 16), np.random.default_rng(0))
    )
    one = best_of(arguments.repeats, lambda: clipped_sum(geometry.project(gradients(*pairs)), 0.01, 2.0**-30))
    print(f"DP-SGD on the same factors, batch {batch}: {one:.3f} s a step, {100 * one:.1f} s for 100; {memory()}")


if __name__ == "__main__":
    main()
