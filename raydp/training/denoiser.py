"""Ordinary training of a denoiser on public images: the base model whose low-rank updates are generated or trained."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from raydp import _validate
from raydp.errors import Diverged, InvalidValue
from raydp.models.denoiser import Denoiser
from raydp.models.unet import UNetShape, build_unet
from raydp.tasks import task

_WARMUP = 0.1  # of the steps


def train_denoiser(
    images: Tensor,
    shape: UNetShape,
    *,
    steps: int,
    batch_size: int = 128,
    learning_rate: float = 1e-3,
    ema_decay: float = 0.995,
    seed: int = 0,
    progress: Callable[[int, float], None] | None = None,
) -> Denoiser:
    """A denoiser of public images: Adam, linear warm-up and cosine decay, averaged weights.

    Args:
        images: uint8 (N, C, H, W), public.
        shape: of the U-Net; its image size and channels must be those of the images.
        steps: of the optimiser. batch_size: images in a step, drawn with replacement.
        ema_decay: of the average of the weights that is returned.
        seed: of initial weights, batches and noises.
        progress: is told every hundredth step and its batch's loss.

    Raises:
        InvalidValue: images of another size. Diverged: the loss is not finite.
    """
    steps = _validate.integer("steps", steps, low=1)
    if tuple(images.shape[1:]) != (shape.image_channels, shape.image_size, shape.image_size):
        raise InvalidValue("images", tuple(images.shape), f"must suit {shape}", "Resize the images.")
    denoising, generator = task("denoising"), np.random.default_rng(seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = Denoiser(build_unet(shape), shape)
    parameters = list(model.parameters())
    average = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps, pct_start=_WARMUP, cycle_momentum=False
    )
    for step in range(steps):
        chosen = torch.from_numpy(generator.integers(0, len(images), batch_size))
        pixels = images[chosen].float() / 127.5 - 1
        inputs, noise = denoising.examples(pixels, chosen, denoising.draw(batch_size, pixels.shape[1:], generator))
        loss = denoising.loss(model(inputs), noise) / batch_size
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step < steps - 1:
            schedule.step()
        decay = min(ema_decay, (1 + step) / (10 + step))
        with torch.no_grad():
            for value, parameter in zip(average, parameters, strict=True):
                value.lerp_(parameter, 1 - decay)
        if not bool(torch.isfinite(loss)):
            raise Diverged(f"the loss on public images is not finite after step {step + 1} of {steps}")
        if progress is not None and (step + 1) % 100 == 0:
            progress(step + 1, float(loss.detach()))
    with torch.no_grad():
        for value, parameter in zip(average, parameters, strict=True):
            parameter.copy_(value)
    return model
