"""Denoising: a diffusion model learns to predict the noise in noisy images; it is judged by the images it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from raydp._randomness import Randomness
from raydp.errors import InvalidValue, MissingPackage
from raydp.models.denoiser import sample, signal_levels, with_time
from raydp.models.encoders import load_encoder
from raydp.tasks.base import HeldOut, InputShape, Task, evaluating, refuse
from raydp.tasks.distances import frechet_distance, kernel_distance
from raydp.tasks.pictures import save_row

STEPS = 1000  # of the diffusion
_ENCODER = "efficientnet_lite0"
_LOSS_DRAWS = 512  # pairs of an image and a noise on which the loss is measured
_BATCH = 128
_SHOWN = 12  # images in a picture
SAMPLES = "samples.png"


@dataclass(frozen=True)
class NoiseDraw:
    """Times and noises of n examples.

    Attributes:
        times: int64 (n,), in [0, STEPS).
        noise: float32 (n, C, H, W), standard normal.
    """

    times: Tensor
    noise: Tensor

    def __len__(self) -> int:
        return len(self.times)

    def __getitem__(self, examples: slice, /) -> NoiseDraw:
        return NoiseDraw(self.times[examples], self.noise[examples])


class Denoising(Task):
    """Epsilon prediction on the cosine schedule (Ho et al. 2020; Nichol & Dhariwal 2021), T = 1,000.

    The loss of an example is the mean over its pixels of (predicted − true noise)², at one random time. Pixels must be
    normalised to [-1, 1].

    Metrics: ``frechet`` and ``kid`` compare generated images with the held-out ones, as the FID and the KID do, but
    in the vectors of EfficientNet-Lite0 and not of the Inception network, so their values are no FID and no KID of
    other papers. Fréchet distances are biased by the number of images: compare them at equal numbers only. ``loss``
    is the mean loss of the held-out images over fixed times and noises.

    Args:
        name: of the task.
        images: generated for the metrics.
        sampling_steps: evaluations of the model for a generated image (DDIM).

    >>> import numpy as np
    >>> import torch
    >>> from raydp.tasks import TASKS
    >>> task = TASKS["denoising"]
    >>> draw = task.draw(4, (1, 8, 8), np.random.default_rng(0))
    >>> inputs, noise = task.examples(torch.zeros(4, 1, 8, 8), torch.zeros(4), draw)
    >>> inputs.shape, noise.shape  # the time is a further channel
    (torch.Size([4, 2, 8, 8]), torch.Size([4, 1, 8, 8]))
    """

    metrics: ClassVar[Mapping[str, str]] = {"frechet": "min", "kid": "min", "loss": "min"}

    def __init__(self, *, name: str, images: int, sampling_steps: int) -> None:
        self.name = name  # type: ignore[misc]
        self.images, self.sampling_steps = images, sampling_steps
        self.summary = (  # type: ignore[misc]
            f"the noise in noisy images: squared error; distances of {images:,} generated images, {sampling_steps} "
            "sampling steps"
        )

    def check(
        self, name: str, *, input_shape: InputShape, num_classes: int | None, num_labels: int | None = None
    ) -> None:
        if len(input_shape) != 3 or input_shape[0] not in (1, 3):
            refuse(name, "inputs", tuple(input_shape), self.name, "images of 1 or 3 channels")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum over the examples of the mean squared error of their pixels, (n, C, H, W) both."""
        return (outputs - targets).square().flatten(1).mean(dim=1).sum()

    def draw(self, n: int, input_shape: InputShape, generator: Randomness) -> NoiseDraw:
        times = torch.from_numpy(generator.integers(0, STEPS, n))
        return NoiseDraw(times, torch.from_numpy(generator.standard_normal((n, *input_shape), dtype=np.float32)))

    def examples(self, inputs: Tensor, targets: Tensor, draw: object) -> tuple[Tensor, Tensor]:
        """Noisy images with their times (see :class:`raydp.models.denoiser.Denoiser`), and the noises in them."""
        assert isinstance(draw, NoiseDraw)
        noise, times = draw.noise.to(inputs), draw.times.to(inputs.device)
        levels = signal_levels(STEPS).to(inputs)[times].view(-1, 1, 1, 1)
        noisy = levels.sqrt() * inputs + (1 - levels).sqrt() * noise
        return with_time(noisy, times / STEPS), noise

    def available(self, model: nn.Module, held_out: HeldOut) -> tuple[str, ...]:
        """Distances need two held-out images, and the packages of the encoder.

        Raises:
            InvalidValue: the pixels are not normalised to [-1, 1], or the model is no denoiser of these images.
        """
        shape = held_out.inputs.shape[1:]
        ends = [float(held_out.normalize(torch.full((1, *shape), v, dtype=torch.uint8)).mean()) for v in (0, 255)]
        if max(abs(ends[0] + 1), abs(ends[1] - 1)) > 1e-3:
            raise InvalidValue(
                "task",
                self.name,
                f"needs pixels normalised to [-1, 1], and those of the data go from {ends[0]:.3g} to {ends[1]:.3g}",
                "Use a family of neighbour sets, whose pixels are.",
            )
        _probe(model, shape)
        try:
            load_encoder(_ENCODER)
        except MissingPackage:
            return ("loss",)
        return tuple(self.metrics) if len(held_out) > 1 else ("loss",)

    def evaluate(self, model: nn.Module, held_out: HeldOut) -> dict[str, float]:
        available = self.available(model, held_out)
        found = {"loss": self._held_out_loss(model, held_out)}
        if "frechet" in available:
            made = self.generate(model, held_out)
            if bool(torch.isfinite(made).all()):
                encoder = load_encoder(_ENCODER)
                vectors, reference = encoder(made), encoder(held_out.inputs)
                found["frechet"] = frechet_distance(vectors, reference)
                found["kid"] = kernel_distance(vectors, reference)
        return {name: found.get(name, float("nan")) for name in available}

    def keep(self, model: nn.Module, held_out: HeldOut, directory: Path) -> None:
        """``samples.png``: generated images in a row, made of released weights and public noise alone."""
        made = self.generate(model, held_out, count=_SHOWN)
        if bool(torch.isfinite(made).all()):
            save_row(directory / SAMPLES, made)

    def generate(self, model: nn.Module, held_out: HeldOut, *, count: int | None = None) -> Tensor:
        """The images that the distances are measured on, or the first of them: (n, C, H, W), pixels in [-1, 1].

        They begin with the same noise for each model of one seed.
        """
        channels, height, width = held_out.inputs.shape[1:]
        total = self.images if count is None else count
        with evaluating(model):
            parts = [
                sample(
                    model,
                    min(_BATCH, total - start),
                    input_shape=(channels, height, width),
                    steps=self.sampling_steps,
                    total=STEPS,
                    seed=held_out.seed + start,
                )
                for start in range(0, total, _BATCH)
            ]
        return torch.cat(parts).cpu()

    def _held_out_loss(self, model: nn.Module, held_out: HeldOut) -> float:
        """Mean loss; each image as often as fits, its times spread evenly over the diffusion."""
        n = min(len(held_out), _LOSS_DRAWS)
        repeats = max(1, _LOSS_DRAWS // n)
        draw = self.draw(n * repeats, held_out.inputs.shape[1:], np.random.default_rng(held_out.seed))
        times = torch.from_numpy(np.random.default_rng(held_out.seed).permutation(n * repeats))
        draw = NoiseDraw((times * STEPS + STEPS // 2) // (n * repeats), draw.noise)
        total = 0.0
        with evaluating(model) as device:
            images = held_out.normalize(held_out.inputs[:n].to(device)).repeat(repeats, 1, 1, 1)
            for start in range(0, n * repeats, _BATCH):
                part = slice(start, start + _BATCH)
                noisy, noise = self.examples(images[part], held_out.targets[:0], draw[part])
                total += float(self.loss(model(noisy), noise))
        return total / (n * repeats)


def _probe(model: nn.Module, shape: torch.Size) -> None:
    """Raises InvalidValue: the model does not map noisy images with a time plane to noises."""
    with evaluating(model) as device:
        try:
            found = tuple(model(torch.zeros(1, shape[0] + 1, *shape[1:], device=device)).shape[1:])
        except RuntimeError as error:
            found = (str(error).splitlines()[0],)
    if found != tuple(shape):
        raise InvalidValue(
            "model",
            type(model).__name__,
            f"must predict the noise in images of (C, H, W) = {tuple(shape)}, but gives {found}",
            "Name a file of raydp.models.denoiser.save_denoiser.",
        )
