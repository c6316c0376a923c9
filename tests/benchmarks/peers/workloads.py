"""What is trained in the comparison with other libraries: models, losses and one batch of random examples each.

What is in the examples and in the weights does not change the time that a step takes, so both are random.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raydp.models import build_model
from raydp.models.denoiser import Denoiser, with_time
from raydp.models.lora import add_lora
from raydp.models.unet import UNetShape, build_unet

CLASSES = 10
IMAGES = (3, 32, 32)
TOKENS, VOCABULARY, WIDTH, HEADS, BLOCKS = 128, 1000, 128, 4, 6
UNET = UNetShape(  # that of the small scale of searches/deepsets_lora.py
    image_size=16,
    image_channels=1,
    channels=16,
    residual_blocks=1,
    multipliers=(1, 2, 2),
    attention_sizes=(8, 4),
    heads=2,
    groups=8,
)

ExampleLosses = Callable[[Tensor, Tensor], Tensor]


class Block(nn.Module):
    """A transformer block, normalised before attention and before the MLP; all its weights are ordinary layers'."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """(n, tokens, width) to the same."""
        normalised = self.before_attention(hidden)
        query, key, value = (
            layer(normalised).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        hidden = hidden + self.out(mixed)
        return hidden + self.down(F.gelu(self.up(self.before_mlp(hidden))))


class Encoder(nn.Module):
    """A transformer encoder that classifies sequences of tokens.

    Positions are given to their embedding once for each example: a layer that saw them once for all would have no
    examples to tell apart.

    Args:
        tokens: of a sequence; vocabulary: of different tokens; width: of an embedding; heads, blocks: as usual.
        classes: outputs.
    """

    def __init__(
        self,
        *,
        tokens: int = TOKENS,
        vocabulary: int = VOCABULARY,
        width: int = WIDTH,
        heads: int = HEADS,
        blocks: int = BLOCKS,
        classes: int = CLASSES,
    ) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, tokens), int64, to logits (n, classes)."""
        # Copied for each example: Opacus' ghost clipping of an Embedding cannot read expanded ones.
        places = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        hidden = self.blocks(self.words(tokens) + self.positions(places))
        return self.head(self.norm(hidden).mean(dim=1))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its loss and how a batch of it is drawn.

    Attributes:
        summary: what it is, for the table.
        build: a new model, from torch's generator.
        draw: inputs and targets of n examples.
        losses: of outputs (n, …) and targets (n, …), one an example, (n,).
        jax: whether the peer in jax has it too.
    """

    summary: str
    build: Callable[[], nn.Module]
    draw: Callable[[int], tuple[Tensor, Tensor]]
    losses: ExampleLosses
    jax: bool = False

    def model(self) -> nn.Module:
        """The model with the same weights each time."""
        with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(io.StringIO()):
            torch.manual_seed(0)
            return self.build()

    def batch(self, n: int) -> tuple[Tensor, Tensor]:
        """The same n examples each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.draw(n)

    def parameters(self) -> int:
        """How many are trained."""
        return sum(parameter.numel() for parameter in self.model().parameters() if parameter.requires_grad)


def cross_entropies(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over an example's pixels, as in raydp's denoising task."""
    return (outputs - targets).square().flatten(1).mean(dim=1)


def dense(*sizes: int) -> nn.Module:
    """Linear layers of these sizes with tanh between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def adapted_unet() -> nn.Module:
    """A denoiser whose weights are frozen, with updates of rank 1 on its attention."""
    model = Denoiser(build_unet(UNET), UNET)
    add_lora(model, rank=1)
    for name, parameter in model.named_parameters():
        if name.endswith("up.weight"):
            nn.init.normal_(parameter, std=0.1)  # zero, as at the start of training, would make other gradients zero
    return model


def images(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, *IMAGES), torch.randint(CLASSES, (n,))


def sequences(n: int) -> tuple[Tensor, Tensor]:
    return torch.randint(VOCABULARY, (n, TOKENS)), torch.randint(CLASSES, (n,))


def noisy_images(n: int) -> tuple[Tensor, Tensor]:
    """Noisy images with their times, and the noises in them."""
    shape = (UNET.image_channels, UNET.image_size, UNET.image_size)
    return with_time(torch.randn(n, *shape), torch.rand(n)), torch.randn(n, *shape)


def _registered(name: str) -> Callable[[], nn.Module]:
    return lambda: build_model(name, input_shape=IMAGES, outputs=CLASSES, seed=0)


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "mlp": Workload(
            summary="MLP 3072-512-512-10, tanh, 32x32x3",
            build=lambda: dense(3072, 512, 512, CLASSES),
            draw=images,
            losses=cross_entropies,
            jax=True,
        ),
        "cnn": Workload(
            summary="tanh_cnn, 32x32x3",
            build=_registered("tanh_cnn"),
            draw=images,
            losses=cross_entropies,
            jax=True,
        ),
        "resnet20": Workload(
            summary="ResNet-20 with GroupNorm, 32x32x3",
            build=_registered("resnet20"),
            draw=images,
            losses=cross_entropies,
        ),
        "transformer": Workload(
            summary=f"encoder of {BLOCKS} blocks, {TOKENS} tokens, width {WIDTH}, vocabulary {VOCABULARY}",
            build=Encoder,
            draw=sequences,
            losses=cross_entropies,
            jax=True,
        ),
        "lora": Workload(
            summary="updates of rank 1 on the attention of a U-Net, 16x16x1, denoising",
            build=adapted_unet,
            draw=noisy_images,
            losses=squared_errors,
        ),
        "tiny": Workload(  # for trying out the harness
            summary="MLP 3072-8-10, tanh, 32x32x3",
            build=lambda: dense(3072, 8, CLASSES),
            draw=images,
            losses=cross_entropies,
            jax=True,
        ),
    }
)
