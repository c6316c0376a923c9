"""A U-Net as a denoiser: predicts the noise in a noisy image, samples images, and is kept in a file.

Times are fractions t/T of the diffusion, so that a schedule of any length T means the same to the network, which is
told 1000·t/T (what Nichol & Dhariwal's ``rescale_timesteps`` does).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raydp import _validate
from raydp.errors import CorruptFile, InvalidValue
from raydp.models.lora import add_lora
from raydp.models.unet import UNetShape, build_unet, diffusers

_FORMAT = "raydp denoiser 1"


class Denoiser(nn.Module):
    """Predicts the noise of noisy images.

    Args:
        unet: of :func:`raydp.models.unet.build_unet`.
        shape: its shape.
    """

    def __init__(self, unet: nn.Module, shape: UNetShape) -> None:
        super().__init__()
        self.unet = unet
        self.shape = shape

    def forward(self, inputs: Tensor) -> Tensor:
        """The noise in each image, (n, C, H, W).

        Args:
            inputs: (n, C + 1, H, W): noisy images, pixels of the clean ones in [-1, 1], and a plane that holds the time
                t/T in [0, 1). One tensor, as everything that handles examples by row expects.
        """
        noisy, times = inputs[:, :-1], inputs[:, -1, 0, 0]
        # A learned variance, the second half of the channels, is not used.
        return self.unet(noisy, 1000 * times).sample[:, : self.shape.image_channels]

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the images."""
        return self.shape.image_channels, self.shape.image_size, self.shape.image_size


def with_time(noisy: Tensor, times: Tensor) -> Tensor:
    """The input of a :class:`Denoiser`: noisy images (n, C, H, W) and their times t/T, (n,)."""
    return torch.cat([noisy, times.view(-1, 1, 1, 1).expand(-1, 1, *noisy.shape[2:]).to(noisy)], dim=1)


@functools.lru_cache(maxsize=4)
def signal_levels(steps: int) -> Tensor:
    """ᾱ_t of the cosine schedule (Nichol & Dhariwal 2021, eq. 17), t = 0 … T−1, (T,), float32.

    A noisy image is √ᾱ_t · image + √(1 − ᾱ_t) · noise.
    """
    scheduler = diffusers("make a noise schedule").DDPMScheduler(steps, beta_schedule="squaredcos_cap_v2")
    return scheduler.alphas_cumprod.float()


@torch.no_grad()
def sample(
    model: nn.Module, count: int, *, input_shape: tuple[int, int, int], steps: int, total: int = 1000, seed: int = 0
) -> Tensor:
    """Images by deterministic DDIM (Song et al. 2021, arXiv 2010.02502, eta = 0).

    Args:
        model: from (n, C + 1, H, W) to the noise (n, C, H, W), see :class:`Denoiser`.
        count: of images.
        input_shape: (C, H, W).
        steps: evaluations of the model for an image.
        total: T, the steps of the schedule that the model was trained with.
        seed: of the starting noise: the same noise for each model, so that models can be compared image by image.

    Returns:
        (count, C, H, W), pixels in [-1, 1].
    """
    scheduler = diffusers("sample images").DDIMScheduler(
        total, beta_schedule="squaredcos_cap_v2", clip_sample=True, timestep_spacing="trailing"
    )
    scheduler.set_timesteps(_validate.integer("steps", steps, low=1, high=total))
    device = next(model.parameters()).device
    images = torch.randn(count, *input_shape, generator=torch.Generator().manual_seed(seed)).to(device)
    for step in scheduler.timesteps:
        times = torch.full((count,), float(step) / total, device=device)
        images = scheduler.step(model(with_time(images, times)), step, images).prev_sample
    return images.clamp(-1, 1)


def save_denoiser(
    path: str | os.PathLike[str], model: Denoiser, *, lora_rank: int | None, lora_scale: float = 1.0
) -> None:
    """Keep a denoiser without low-rank updates in a file that :func:`raydp.models.build_model` takes as a model.

    Args:
        lora_rank: None, or the rank of the updates that are put on its attention when it is loaded; its own weights are
            frozen then.
    """
    record = {
        "format": _FORMAT,
        "shape": dataclasses.asdict(model.shape),
        "lora_rank": lora_rank,
        "lora_scale": lora_scale,
        "state": model.state_dict(),
    }
    torch.save(record, path)


def load_denoiser(path: str | os.PathLike[str], *, input_shape: tuple[int, ...] | None = None) -> Denoiser:
    """The model of :func:`save_denoiser`. New low-rank factors are drawn from torch's generator.

    Raises:
        CorruptFile: the file is damaged, or of another layout.
        InvalidValue: ``input_shape`` is not that of the model's images.
    """
    path = Path(path)
    try:
        record: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CorruptFile(f"{path} is not a readable model: {type(error).__name__}. Write it again.") from error
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise CorruptFile(f"{path} holds no denoiser of raydp. Write one with raydp.models.denoiser.save_denoiser.")
    shape = UNetShape(**record["shape"])
    with torch.device("meta"):
        model = Denoiser(build_unet(shape), shape)
    model.load_state_dict(record["state"], strict=True, assign=True)
    if input_shape is not None and tuple(input_shape) != model.input_shape:
        raise InvalidValue(
            "model", str(path), f"takes images of (C, H, W) = {model.input_shape}, not {tuple(input_shape)}", "Resize."
        )
    if record["lora_rank"] is not None:
        add_lora(model, rank=record["lora_rank"], scale=record["lora_scale"])
    return model
