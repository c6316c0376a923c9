"""Training of the base model, and private runs of the denoising task on its low-rank factors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raydp.errors import InvalidValue
from raydp.models.denoiser import Denoiser, load_denoiser, save_denoiser
from raydp.models.unet import UNetShape
from raydp.training.denoiser import train_denoiser

pytest.importorskip("diffusers")

SHAPE = UNetShape(
    image_size=8,
    image_channels=1,
    channels=8,
    residual_blocks=1,
    multipliers=(1, 2),
    attention_sizes=(4,),
    heads=2,
    groups=4,
)


def _images(n: int = 64) -> torch.Tensor:
    """Bright squares on a dark ground."""
    images = torch.zeros(n, 1, 8, 8, dtype=torch.uint8)
    for index in range(n):
        images[index, :, index % 4 : index % 4 + 4, 2:6] = 255
    return images


def test_training_lowers_the_loss_and_is_reproducible() -> None:
    losses: list[float] = []
    model = train_denoiser(_images(), SHAPE, steps=100, batch_size=16, progress=lambda step, loss: losses.append(loss))
    assert len(losses) == 1 and losses[0] < 0.8
    again = train_denoiser(_images(), SHAPE, steps=5, batch_size=16)
    third = train_denoiser(_images(), SHAPE, steps=5, batch_size=16)
    for name, value in again.state_dict().items():
        assert torch.equal(value, third.state_dict()[name])
    assert isinstance(model, Denoiser)
    with pytest.raises(InvalidValue, match="must suit"):
        train_denoiser(_images()[:, :, :4], SHAPE, steps=1)


def test_only_low_rank_factors_of_a_saved_base_are_trained(tmp_path: Path) -> None:
    base = train_denoiser(_images(), SHAPE, steps=2, batch_size=4)
    save_denoiser(tmp_path / "base.pt", base, lora_rank=1)
    trained = {n for n, p in load_denoiser(tmp_path / "base.pt").named_parameters() if p.requires_grad}
    assert trained and all(name.endswith(("down.weight", "up.weight")) for name in trained)
