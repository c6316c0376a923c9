"""The denoiser: its inputs, its schedule, sampling, and its file."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from raydp.errors import CorruptFile, InvalidValue
from raydp.models.denoiser import Denoiser, load_denoiser, sample, save_denoiser, signal_levels, with_time
from raydp.models.unet import UNetShape, build_unet

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
    learned_variance=True,
)


def _denoiser() -> Denoiser:
    torch.manual_seed(0)
    return Denoiser(build_unet(SHAPE), SHAPE)


def test_the_time_reaches_the_network_in_thousandths() -> None:
    model, images, times = _denoiser(), torch.randn(3, 1, 8, 8), torch.tensor([0.0, 0.25, 0.999])
    expected = model.unet(images, 1000 * times).sample[:, :1]  # the half with the variance is cut off
    torch.testing.assert_close(model(with_time(images, times)), expected)


def test_the_schedule_is_the_cosine() -> None:
    levels = signal_levels(1000)
    cosine = [math.cos((t / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2 for t in range(1001)]
    expected = torch.tensor([value / cosine[0] for value in cosine[1:]])
    torch.testing.assert_close(levels[:-5], expected[:-5], rtol=1e-3, atol=1e-6)  # the last ones have their beta capped


class Exact(nn.Module):
    """The best prediction where every clean image is the same."""

    def __init__(self, image: Tensor) -> None:
        super().__init__()
        self.image = nn.Parameter(image)

    def forward(self, inputs: Tensor) -> Tensor:
        levels = signal_levels(1000)[(1000 * inputs[:, -1, 0, 0]).round().long()].view(-1, 1, 1, 1)
        return (inputs[:, :-1] - levels.sqrt() * self.image) / (1 - levels).sqrt()


def test_sampling_finds_the_only_image_there_is() -> None:
    image = torch.rand(1, 4, 4) * 2 - 1
    found = sample(Exact(image), 3, input_shape=(1, 4, 4), steps=20)
    torch.testing.assert_close(found, image.expand(3, -1, -1, -1), rtol=0, atol=0.02)


def test_sampling_depends_on_its_seed_alone() -> None:
    model = _denoiser()
    torch.manual_seed(1)
    first = sample(model, 2, input_shape=(1, 8, 8), steps=3, seed=5)
    torch.manual_seed(2)
    assert torch.equal(sample(model, 2, input_shape=(1, 8, 8), steps=3, seed=5), first)
    assert not torch.equal(sample(model, 2, input_shape=(1, 8, 8), steps=3, seed=6), first)
    assert float(first.abs().max()) <= 1


def test_a_saved_denoiser_comes_back_with_its_low_rank_factors(tmp_path: Path) -> None:
    model = _denoiser()
    inputs = with_time(torch.randn(2, 1, 8, 8), torch.tensor([0.1, 0.5]))
    save_denoiser(tmp_path / "m.pt", model, lora_rank=1)
    loaded = load_denoiser(tmp_path / "m.pt", input_shape=(1, 8, 8))
    torch.testing.assert_close(loaded(inputs), model(inputs))  # the updates begin at zero
    # 4 attention blocks of 16 channels: one down, two up, one in the middle; 6·16 numbers each.
    assert sum(p.numel() for p in loaded.parameters() if p.requires_grad) == 4 * 6 * 16
    save_denoiser(tmp_path / "whole.pt", model, lora_rank=None)
    whole = load_denoiser(tmp_path / "whole.pt")
    assert all(p.requires_grad for p in whole.parameters())


def test_files_that_are_no_denoiser_are_refused(tmp_path: Path) -> None:
    save_denoiser(tmp_path / "m.pt", _denoiser(), lora_rank=None)
    with pytest.raises(InvalidValue, match=r"\(1, 8, 8\), not \(3, 8, 8\)"):
        load_denoiser(tmp_path / "m.pt", input_shape=(3, 8, 8))
    torch.save({"state": {}}, tmp_path / "other.pt")
    with pytest.raises(CorruptFile, match="save_denoiser"):
        load_denoiser(tmp_path / "other.pt")
    (tmp_path / "broken.pt").write_bytes(b"x")
    with pytest.raises(CorruptFile, match="not a readable model"):
        load_denoiser(tmp_path / "broken.pt")
