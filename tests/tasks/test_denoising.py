"""The denoising task: its randomness, its loss, its metrics, and DP-SGD on low-rank factors with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raydp.errors import InvalidValue
from raydp.models.denoiser import signal_levels
from raydp.tasks import HeldOut, task
from raydp.tasks.denoising import STEPS, Denoising

pytest.importorskip("diffusers")

SMALL = Denoising(name="small", images=8, sampling_steps=4)


def _held_out(n: int = 8, side: int = 8) -> HeldOut:
    generator = torch.Generator().manual_seed(0)
    return HeldOut(
        inputs=torch.randint(0, 256, (n, 1, side, side), dtype=torch.uint8, generator=generator),
        targets=torch.zeros(n, dtype=torch.int64),
        normalize=lambda pixels: pixels.float() / 127.5 - 1,
        num_classes=1,
    )


class Knows(nn.Module):
    """The best prediction where every clean image is the same grey."""

    def __init__(self, grey: float) -> None:
        super().__init__()
        self.grey = nn.Parameter(torch.tensor(grey))

    def forward(self, inputs: Tensor) -> Tensor:
        levels = signal_levels(STEPS)[(STEPS * inputs[:, -1, 0, 0]).round().long()].view(-1, 1, 1, 1)
        return (inputs[:, :-1] - levels.sqrt() * self.grey) / (1 - levels).sqrt()


def test_the_draw_does_not_depend_on_the_images_and_can_be_cut() -> None:
    first = SMALL.draw(6, (1, 4, 4), np.random.default_rng(3))
    again = SMALL.draw(6, (1, 4, 4), np.random.default_rng(3))
    assert torch.equal(first.noise, again.noise) and torch.equal(first.times, again.times)
    assert len(first[2:5]) == 3 and torch.equal(first[2:5].noise, first.noise[2:5])
    assert int(first.times.min()) >= 0 and int(first.times.max()) < STEPS


def test_noisy_images_have_the_variance_of_the_schedule() -> None:
    images = torch.zeros(4000, 1, 2, 2) + 0.5
    draw = SMALL.draw(4000, (1, 2, 2), np.random.default_rng(0))
    inputs, noise = SMALL.examples(images, torch.zeros(4000), draw)
    levels = signal_levels(STEPS)[draw.times].view(-1, 1, 1, 1)
    assert torch.equal(noise, draw.noise)
    torch.testing.assert_close(inputs[:, :1], levels.sqrt() * 0.5 + (1 - levels).sqrt() * noise)
    torch.testing.assert_close(inputs[:, 1, 0, 0], draw.times / STEPS)


def test_the_loss_is_a_sum_over_examples_of_means_over_pixels() -> None:
    outputs, targets = torch.randn(3, 1, 4, 4), torch.randn(3, 1, 4, 4)
    one_by_one = sum(float(((o - t) ** 2).mean()) for o, t in zip(outputs, targets, strict=True))
    assert float(SMALL.loss(outputs, targets)) == pytest.approx(one_by_one, rel=1e-5)


def test_metrics_tell_a_model_that_knows_the_images_from_one_that_does_not() -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    grey = HeldOut(
        inputs=torch.full((8, 1, 8, 8), 200, dtype=torch.uint8),
        targets=torch.zeros(8, dtype=torch.int64),
        normalize=_held_out().normalize,
        num_classes=1,
    )
    right, wrong = (SMALL.evaluate(Knows(value), grey) for value in (200 / 127.5 - 1, -0.8))
    assert set(right) == set(SMALL.metrics)
    assert right["loss"] == pytest.approx(0, abs=1e-6) and wrong["loss"] > 0.1
    assert right["frechet"] < wrong["frechet"] and right["kid"] < wrong["kid"]
    assert SMALL.evaluate(Knows(0.1), grey) == SMALL.evaluate(Knows(0.1), grey)


def test_models_and_pixels_that_do_not_suit_are_refused() -> None:
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(2 * 64, 10))
    with pytest.raises(InvalidValue, match="must predict the noise"):
        SMALL.available(classifier, _held_out())
    held = _held_out()
    other = HeldOut(inputs=held.inputs, targets=held.targets, normalize=lambda pixels: pixels.float() / 255)
    with pytest.raises(InvalidValue, match=r"normalised to \[-1, 1\]"):
        SMALL.available(Knows(0.0), other)
    with pytest.raises(InvalidValue, match="images"):
        SMALL.check("rows", input_shape=(4,), num_classes=None)


def test_both_sizes_are_tasks() -> None:
    assert task("denoising").metrics == SMALL.metrics
    assert isinstance(task("denoising_1024"), Denoising)
