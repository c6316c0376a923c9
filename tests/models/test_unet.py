"""The U-Net, its low-rank updates, and the reader of published checkpoints."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from raydp.errors import CorruptFile, InvalidValue, MissingPackage, UnknownName
from raydp.models.improved_diffusion import convert, load_improved_diffusion
from raydp.models.lora import LoraLinear, add_lora, fold_lora
from raydp.models.unet import IMAGENET64, FusedAttention, UNetShape, build_unet
from raydp.training.gradients import PerExampleGradients
from tests.models import improved_diffusion_reference as reference

pytest.importorskip("diffusers")

SMALL = UNetShape(
    image_size=8,
    image_channels=2,
    channels=8,
    residual_blocks=2,
    multipliers=(1, 2, 3),
    attention_sizes=(4, 2),
    heads=4,
    groups=4,
    learned_variance=True,
)


@pytest.fixture(scope="module")
def checkpoint() -> dict[str, torch.Tensor]:
    return reference.random_checkpoint(SMALL)


def test_rank_one_lora_of_the_published_network_has_the_papers_count() -> None:
    """40,704 numbers, in 318 pieces of 128 that each lie within one factor (arXiv 2606.26772, appendix E)."""
    with torch.device("meta"):
        unet = build_unet(IMAGENET64)
        add_lora(unet, rank=1)
    assert sum(isinstance(module, FusedAttention) for module in unet.modules()) == 15
    trained = {name: p for name, p in unet.named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in trained.values()) == 40_704
    assert all(p.numel() % 128 == 0 for p in trained.values())
    assert sum(p.numel() // 128 for p in trained.values()) == 318


def test_the_published_layout_covers_every_tensor_of_the_model() -> None:
    state = reference.random_checkpoint(IMAGENET64, device="meta")
    unet = convert(state, IMAGENET64)
    count = sum(p.numel() for p in unet.parameters())
    assert count == sum(t.numel() for t in state.values()) == 121_063_942


def test_a_converted_checkpoint_computes_what_the_original_does(checkpoint: dict[str, torch.Tensor]) -> None:
    unet = convert(checkpoint, SMALL)
    images, timesteps = torch.randn(3, 2, 8, 8), torch.tensor([0.0, 17.25, 999.0])
    found = unet(images, timesteps).sample
    torch.testing.assert_close(found, reference.unet(checkpoint, SMALL, images, timesteps), rtol=1e-4, atol=1e-4)


def test_blocks_compute_what_the_originals_do(checkpoint: dict[str, torch.Tensor]) -> None:
    unet = convert(checkpoint, SMALL)
    hidden, embedding = torch.randn(2, 16, 4, 4), torch.randn(2, 32)
    attention = reference.attention_block(checkpoint, "input_blocks.4.1", hidden, SMALL.heads, SMALL.groups)
    torch.testing.assert_close(unet.down_blocks[1].attentions[0](hidden), attention, rtol=1e-5, atol=1e-5)
    residual = reference.residual_block(checkpoint, "input_blocks.5.0", hidden, embedding, SMALL.groups)
    torch.testing.assert_close(unet.down_blocks[1].resnets[1](hidden, embedding), residual, rtol=1e-5, atol=1e-5)


def test_every_tensor_arrives(checkpoint: dict[str, torch.Tensor]) -> None:
    """Each one's sum is found again, exactly as often as it occurs: permutations keep it."""
    found = sorted(round(float(t.double().sum()), 5) for t in convert(checkpoint, SMALL).state_dict().values())
    assert found == sorted(round(float(t.double().sum()), 5) for t in checkpoint.values())


def test_a_saved_checkpoint_loads_in_any_order(checkpoint: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save(dict(reversed(checkpoint.items())), tmp_path / "random.pt")
    unet = load_improved_diffusion(tmp_path / "random.pt", SMALL)
    assert torch.equal(unet.conv_in.weight, checkpoint["input_blocks.0.0.weight"])


def test_another_layout_is_refused_with_its_first_differing_tensor(checkpoint: dict[str, torch.Tensor]) -> None:
    missing = {name: t for name, t in checkpoint.items() if not name.startswith("middle_block.1.qkv")}
    with pytest.raises(CorruptFile, match=r"middle_block\.1\.qkv\.weight is not there"):
        convert(missing, SMALL)
    with pytest.raises(CorruptFile, match=r"input_blocks\.0\.0\.weight has shape \(8, 3, 3, 3\)"):
        convert({**checkpoint, "input_blocks.0.0.weight": torch.zeros(8, 3, 3, 3)}, SMALL)
    with pytest.raises(CorruptFile, match=r"label_emb\.weight is not part"):
        convert({**checkpoint, "label_emb.weight": torch.zeros(3, 32)}, SMALL)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(CorruptFile, match=r"x\.pt is not a readable checkpoint"):
        load_improved_diffusion(tmp_path / "x.pt", SMALL)
    with open(tmp_path / "y.pt", "wb") as file:
        pickle.dump(print, file)  # what a hostile file would run
    with pytest.raises(CorruptFile):
        load_improved_diffusion(tmp_path / "y.pt", SMALL)


def _adapted() -> nn.Module:
    torch.manual_seed(0)
    unet = build_unet(SMALL)
    add_lora(unet, rank=2, scale=0.5)
    for name, parameter in unet.named_parameters():
        if name.endswith("up.weight"):
            nn.init.normal_(parameter)
    return unet


def test_lora_begins_as_the_model_and_folds_into_it() -> None:
    torch.manual_seed(0)
    unet, images = build_unet(SMALL), torch.randn(2, 2, 8, 8)
    before = unet(images, 3).sample
    add_lora(unet, rank=1)
    torch.testing.assert_close(unet(images, 3).sample, before)
    adapted = _adapted()
    moved = adapted(images, 3).sample
    fold_lora(adapted)
    assert not any(isinstance(module, LoraLinear) for module in adapted.modules())
    torch.testing.assert_close(adapted(images, 3).sample, moved, rtol=1e-4, atol=1e-5)


def test_many_data_sets_in_one_pass_equal_a_loop_over_them() -> None:
    unet = _adapted()
    names = [name for name, p in unet.named_parameters() if p.requires_grad]
    shapes = {name: p.shape for name, p in unet.named_parameters()}
    factors = {name: torch.randn(3, *shapes[name]) for name in names}
    images, timesteps = torch.randn(6, 2, 8, 8), torch.arange(6.0)
    together = torch.func.functional_call(unet, factors, (images, timesteps)).sample
    for index in range(3):
        own = {name: value[index] for name, value in factors.items()}
        part = slice(2 * index, 2 * index + 2)
        alone = torch.func.functional_call(unet, own, (images[part], timesteps[part])).sample
        torch.testing.assert_close(together[part], alone, rtol=1e-4, atol=1e-4)


def test_per_example_gradients_of_the_factors_equal_autograd() -> None:
    unet = _adapted()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unet = unet

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.unet(images, 5).sample

    model = Model()
    engine = PerExampleGradients(model, lambda outputs, targets: (outputs - targets).square().sum())
    assert engine.engine == "captured"
    images, targets = torch.randn(3, 2, 8, 8), torch.randn(3, 4, 8, 8)
    together = engine(images, targets)
    for index in range(3):
        loss = (model(images[index : index + 1]) - targets[index : index + 1]).square().sum()
        for gradient, own in zip(together, torch.autograd.grad(loss, engine.parameters), strict=True):
            torch.testing.assert_close(gradient[index], own, rtol=1e-4, atol=1e-4)


def test_bad_shapes_and_targets_are_refused() -> None:
    with pytest.raises(InvalidValue, match="image_size"):
        UNetShape(
            image_size=9,
            image_channels=1,
            channels=8,
            residual_blocks=1,
            multipliers=(1, 2),
            attention_sizes=(),
            heads=1,
        )
    with pytest.raises(InvalidValue, match="attention_sizes"):
        UNetShape(
            image_size=8,
            image_channels=1,
            channels=8,
            residual_blocks=1,
            multipliers=(1, 2),
            attention_sizes=(16,),
            heads=1,
            groups=8,
        )
    unet = build_unet(SMALL)
    with pytest.raises(UnknownName, match="proj"):
        add_lora(unet, rank=1, targets=("qkv", "prj"))
    add_lora(unet, rank=1)
    with pytest.raises(InvalidValue, match="already"):
        add_lora(unet, rank=1)


def test_a_missing_package_says_what_to_install() -> None:
    error = MissingPackage("diffusers", purpose="build a U-Net", extra="diffusion")
    assert "pip install '.[diffusion]'" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
