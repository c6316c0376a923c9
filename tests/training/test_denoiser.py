"""Training of the base model, and private runs of the denoising task on its low-rank factors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raydp.data.neighbours import split_halves, write_family
from raydp.errors import InvalidValue
from raydp.methods.base import PublicExamples
from raydp.methods.dp_deepsets import Features
from raydp.methods.hypernetwork_training import SetLosses
from raydp.models.denoiser import Denoiser, load_denoiser, save_denoiser
from raydp.models.encoders import load_encoder
from raydp.models.hypernetwork import Layout
from raydp.models.lora import add_lora
from raydp.models.unet import UNetShape, build_unet
from raydp.privacy.ledger import Ledger
from raydp.tasks import task
from raydp.training.denoiser import train_denoiser
from raydp.training.run import execute
from tests.training.helpers import digits_spec, hand_made_plan

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


class Rows:
    """An encoder for tests: the means of an image's rows."""

    name, digest, width = "rows", "0" * 64, 8

    def __call__(self, images: torch.Tensor, /) -> torch.Tensor:
        return images.float().mean(dim=(1, 3))


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two private sets of 16 noisy squares, public sets of such, and a base model."""
    directory = tmp_path_factory.mktemp("family")
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 40, (120, 1, 8, 8), dtype=torch.uint8, generator=generator)
    images = torch.maximum(_images(120), noise)
    write_family(directory, images, torch.zeros(120, dtype=torch.int64), Rows(), set_size=16, members=2)
    base = train_denoiser(images[split_halves(images)[0]], SHAPE, steps=40, batch_size=16)
    save_denoiser(directory / "base.pt", base, lora_rank=1)
    return directory


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("dp_sgd", {}),
        ("dp_sgd_pt", {"pretrain_epochs": 1, "pretrain_learning_rate": 0.01}),
        ("pda_dpmd", {"public_batch_size": 8}),
    ],
)
def test_private_runs_on_a_member_train_the_factors_alone(
    tmp_path: Path, family: Path, name: str, config: dict[str, Any]
) -> None:
    shared = {"steps": 6, "batch_size": 4, "clip_norm": 1e-2, "learning_rate": 100.0, "schedule": "warmup_cosine"}
    config = {**shared, **config}
    member = family / "members" / "0001.parquet"
    spec = digits_spec(
        tmp_path,
        name,
        config,
        plan=hand_made_plan(name, config, population=16),
        data=str(member),
        task="denoising",
        model=str(family / "base.pt"),
        public=None if name == "dp_sgd" else str(family),
        reports=1,
    )
    (report,) = execute(spec)
    Ledger.read(spec.ledger_file).check(spec.plan)
    assert set(report.metrics) <= {"frechet", "kid", "loss"}
    assert all(torch.isfinite(torch.tensor(value)) for value in report.metrics.values())
    assert (spec.directory / "samples.png").is_file()
    released = torch.load(spec.directory / "weights.pt", weights_only=True)
    before = load_denoiser(family / "base.pt").state_dict()
    moved = {key for key, value in released.items() if not torch.equal(value, before[key])}
    assert any(key.endswith("up.weight") for key in moved)
    assert all(key.endswith(("up.weight", "down.weight")) for key in moved)


def test_a_hypernetwork_generates_the_factors_of_a_member(
    tmp_path: Path, family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    monkeypatch.setenv("RAYDP_CACHE", str(tmp_path / "cache"))
    config = {
        "image_encoder": "efficientnet_lite0",
        "embedding": 8,
        "encoder_width": 16,
        "decoder_width": 16,
        "decoder_depth": 1,
        "decoder_hidden": 16,
        "epochs": 1,
        "loss_points": 4,
        "sets_per_step": 8,
    }
    states = []
    for member in (0, 1):
        spec = digits_spec(
            tmp_path / str(member),
            "dp_deepsets",
            config,
            plan=hand_made_plan("dp_deepsets", config, population=16),
            data=str(family),
            member=member,
            task="denoising",
            model=str(family / "base.pt"),
            public=str(family),
            reports=1,
        )
        (report,) = execute(spec)
        Ledger.read(spec.ledger_file).check(spec.plan)
        assert report.diagnostics["public_validation_loss"] > 0
        states.append(torch.load(spec.directory / "weights.pt", weights_only=True))
    differ = {key for key, value in states[0].items() if not torch.equal(value, states[1][key])}
    assert differ and all(key.endswith(("up.weight", "down.weight")) for key in differ)


def test_an_image_encoder_refuses_pixels_of_another_scale(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    features = Features(num_classes=None, images=load_encoder("efficientnet_lite0"))
    public = PublicExamples(inputs=3 * torch.ones(2, 1, 8, 8), targets=torch.zeros(2))
    with pytest.raises(InvalidValue, match="image_encoder"):
        features.of_public(public)


def test_stacked_factors_give_the_losses_of_a_loop_over_sets() -> None:
    torch.manual_seed(0)
    model = Denoiser(build_unet(SHAPE), SHAPE)
    add_lora(model, rank=1)
    layout = Layout.of(model)
    factors = {name: torch.randn(3, *shape) for name, shape in zip(layout.names, layout.shapes, strict=True)}
    inputs, targets = torch.rand(3, 4, 1, 8, 8) * 2 - 1, torch.zeros(3, 4)
    losses = SetLosses(model, task("denoising"), layout.names)
    together = losses(factors, inputs, targets, losses.draw(3, 4, (1, 8, 8), np.random.default_rng(0)))
    draw = task("denoising").draw(12, (1, 8, 8), np.random.default_rng(0))
    for index in range(3):
        part = slice(4 * index, 4 * index + 4)
        noisy, noise = task("denoising").examples(inputs[index], targets[index], draw[part])
        own = {name: value[index] for name, value in factors.items()}
        alone = task("denoising").loss(torch.func.functional_call(model, own, (noisy,)), noise) / 4
        torch.testing.assert_close(together[index], alone, rtol=1e-4, atol=1e-5)
