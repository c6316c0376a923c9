"""DP-DeepSets' hypernetwork (arXiv 2606.26772, section 3.1): from a set of examples to the parameters of a model.

Each example is embedded by φ1, embeddings are clipped and averaged, and φ2 turns the (noisy) average into parameters.
Pooling makes the result independent of the order of the examples, and changing one of N examples moves the average by
at most 2C/N. Which parameters of the target are generated is a :class:`Layout`.

What the paper leaves open is ours: φ1 is an MLP with one hidden layer of GELU units; blocks are pre-norm, with GELU and
no dropout; a final norm precedes the head; the average gets no norm of its own before the noise.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raydp import _validate
from raydp.errors import InvalidValue, UnknownName

ENCODERS = ("mlp", "linear", "oracle")
DECODERS = ("transformer", "mlp", "pad")
TOKEN = 128  # numbers in a token
_HEAD_STD = 0.01  # the paper's: the default would generate weights that are too large


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which parameters of a target module are generated, and how they are cut into tokens.

    Each parameter has tokens of its own, the last one padded: no token straddles two positions of the model.

    Attributes:
        names, shapes: of the parameters, in the order of ``named_parameters``.
        token: numbers in a token.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    token: int = TOKEN

    @classmethod
    def of(cls, target: nn.Module, patterns: Iterable[str] = ("*",), *, token: int = TOKEN) -> Layout:
        """The trainable parameters whose names match a pattern (as of file names: ``*``, ``?``, ``[…]``).

        Raises:
            UnknownName: a pattern matches no trainable parameter; near names are suggested.
        """
        known = {name: tuple(value.shape) for name, value in target.named_parameters() if value.requires_grad}
        patterns = tuple(patterns)
        for pattern in patterns:
            if not fnmatch.filter(known, pattern):
                raise UnknownName("parameter to generate", pattern, known)
        chosen = [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        token = _validate.integer("token", token, low=1)
        return cls(names=tuple(chosen), shapes=tuple(known[name] for name in chosen), token=token)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers in each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def parameters(self) -> int:
        """Numbers in all of them."""
        return sum(self.sizes)

    @property
    def token_counts(self) -> tuple[int, ...]:
        """Tokens of each parameter."""
        return tuple(-(-size // self.token) for size in self.sizes)

    @property
    def tokens(self) -> int:
        """Tokens of all of them."""
        return sum(self.token_counts)

    def of_tokens(self, tokens: Tensor) -> dict[str, Tensor]:
        """Parameters (M, *shape) by name from tokens (M, T, token)."""
        pieces = tokens.split(self.token_counts, dim=1)
        parts = zip(self.names, self.shapes, self.sizes, pieces, strict=True)
        return {name: piece.flatten(1)[:, :size].unflatten(1, shape or (1,)) for name, shape, size, piece in parts}

    def of_flat(self, flat: Tensor) -> dict[str, Tensor]:
        """Parameters (M, *shape) by name from their numbers one after the other, (M, parameters)."""
        parts = zip(self.names, self.shapes, flat.split(self.sizes, dim=1), strict=True)
        return {name: piece.unflatten(1, shape or (1,)) for name, shape, piece in parts}


class OracleEncoder(nn.Module):
    """φ1(x, y) = y·x_{1:D}, the encoder of the paper's proof for linear regression: its mean is w_{1:D}.

    Features are (x, y): (n, d + 1).
    """

    def __init__(self, features: int, embedding: int) -> None:
        super().__init__()
        self._embedding = _validate.integer("embedding", embedding, low=1, high=features - 1)

    def forward(self, features: Tensor) -> Tensor:
        return features[..., -1:] * features[..., : self._embedding]


class Block(nn.Module):
    """Self-attention among the query tokens, cross-attention to the context token, and an MLP for each token.

    With a single context token the softmax of the cross-attention is 1 whatever the queries are, so it adds the same
    vector W_o W_v E to each of them. That is what is computed here.
    """

    def __init__(self, width: int, heads: int, hidden: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(context, width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def cross(self, context: Tensor) -> Tensor:
        """What the cross-attention adds to each token: (M, 1, width) for a context token (M, context)."""
        return self.out(self.value(context))[:, None]

    def forward(self, tokens: Tensor, context: Tensor) -> Tensor:
        """(M, T, width) and (M, context) to (M, T, width)."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(tokens)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        tokens = tokens + self.proj(mixed)
        tokens = tokens + self.cross(context)
        return tokens + self.mlp(self.norm2(tokens))


class TransformerDecoder(nn.Module):
    """φ2: learnable query tokens, one for each token of parameters, attend to the embedding of the set."""

    def __init__(self, embedding: int, layout: Layout, *, width: int, depth: int, heads: int, hidden: int) -> None:
        super().__init__()
        if width % heads:
            raise InvalidValue("decoder_width", width, f"must be a multiple of the {heads} heads", "Change either.")
        self._layout = layout
        self.queries = nn.Parameter(0.02 * torch.randn(layout.tokens, width))
        self.blocks = nn.ModuleList(Block(width, heads, hidden, embedding) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = _small_head(width, layout.token)

    def forward(self, embedding: Tensor) -> dict[str, Tensor]:
        tokens = self.queries.expand(len(embedding), -1, -1)
        for block in self.blocks:
            tokens = block(tokens, embedding)
        return self._layout.of_tokens(self.head(self.norm(tokens)))


class MlpDecoder(nn.Module):
    """φ2 for small targets: hidden layers of GELU units, ``depth`` of them; none is a linear map."""

    def __init__(self, embedding: int, layout: Layout, *, depth: int, hidden: int) -> None:
        super().__init__()
        self._layout = layout
        widths = [embedding, *([hidden] * depth)]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.GELU()]
        self.layers = nn.Sequential(*layers, _small_head(widths[-1], layout.parameters))

    def forward(self, embedding: Tensor) -> dict[str, Tensor]:
        return self._layout.of_flat(self.layers(embedding))


class PadDecoder(nn.Module):
    """φ2 of the paper's proof: the embedding is the first D parameters, the others are 0. Nothing to learn."""

    def __init__(self, embedding: int, layout: Layout) -> None:
        super().__init__()
        _validate.integer("embedding", embedding, low=1, high=layout.parameters)
        self._layout = layout

    def forward(self, embedding: Tensor) -> dict[str, Tensor]:
        return self._layout.of_flat(F.pad(embedding, (0, self._layout.parameters - embedding.shape[1])))


def _small_head(inputs: int, outputs: int) -> nn.Linear:
    head = nn.Linear(inputs, outputs)
    nn.init.normal_(head.weight, std=_HEAD_STD)
    nn.init.zeros_(head.bias)
    return head


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes of a hypernetwork.

    Attributes:
        embedding: D, the width of the set's embedding: where the noise goes.
        encoder: ``mlp``, ``linear`` or ``oracle``; encoder_width: hidden units of the first.
        decoder: ``transformer``, ``mlp`` or ``pad``; the others: its width (of tokens), depth, hidden units and heads.
    """

    embedding: int = 128
    encoder: str = "mlp"
    encoder_width: int = 512
    decoder: str = "transformer"
    decoder_width: int = 128
    decoder_depth: int = 4
    decoder_hidden: int = 512
    decoder_heads: int = 4

    def __post_init__(self) -> None:
        _validate.one_of("encoder", self.encoder, ENCODERS)
        _validate.one_of("decoder", self.decoder, DECODERS)
        for name in ("embedding", "encoder_width", "decoder_width", "decoder_hidden", "decoder_heads"):
            _validate.integer(name, getattr(self, name), low=1)
        _validate.integer("decoder_depth", self.decoder_depth, low=0)


class Hypernetwork(nn.Module):
    """φ1 and φ2.

    Args:
        features: numbers that φ1 sees of an example.
        layout: what is generated.
        architecture: sizes.
        clip_norm: C of an embedding.
        seed: of the initial weights; the global random state is left as it was.
    """

    def __init__(
        self, *, features: int, layout: Layout, architecture: Architecture, clip_norm: float, seed: int
    ) -> None:
        super().__init__()
        self.features = _validate.integer("features", features, low=1)
        self.layout, self.architecture = layout, architecture
        self.clip_norm = _validate.positive("clip_norm", clip_norm)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.encoder = _encoder(features, architecture)
            self.decoder = _decoder(layout, architecture)

    def embed(self, features: Tensor) -> Tensor:
        """φ1, not clipped: (…, features) to (…, D).

        Raises:
            InvalidValue: the features are of another width.
        """
        if features.shape[-1] != self.features:
            raise InvalidValue(
                "features",
                features.shape[-1],
                f"must be the {self.features} numbers an example for which the encoder was made",
                "Use the encoder and the data that the hypernetwork was trained with.",
            )
        embedded: Tensor = self.encoder(features)
        return embedded

    def pool(self, features: Tensor) -> Tensor:
        """The average of the clipped embeddings of each set: (M, N, features) to (M, D), without noise."""
        vectors = self.embed(features)
        norms = vectors.norm(dim=-1, keepdim=True)
        return (vectors * (self.clip_norm / norms.clamp(min=self.clip_norm))).mean(dim=-2)

    def generate(self, embedding: Tensor) -> dict[str, Tensor]:
        """φ2: embeddings (M, D) of sets to parameters (M, *shape) by name."""
        generated: dict[str, Tensor] = self.decoder(embedding)
        return generated


def _encoder(features: int, sizes: Architecture) -> nn.Module:
    if sizes.encoder == "oracle":
        return OracleEncoder(features, sizes.embedding)
    if sizes.encoder == "linear":
        return nn.Linear(features, sizes.embedding)
    return nn.Sequential(
        nn.Linear(features, sizes.encoder_width), nn.GELU(), nn.Linear(sizes.encoder_width, sizes.embedding)
    )


def _decoder(layout: Layout, sizes: Architecture) -> nn.Module:
    if sizes.decoder == "pad":
        return PadDecoder(sizes.embedding, layout)
    if sizes.decoder == "mlp":
        return MlpDecoder(sizes.embedding, layout, depth=sizes.decoder_depth, hidden=sizes.decoder_hidden)
    return TransformerDecoder(
        sizes.embedding,
        layout,
        width=sizes.decoder_width,
        depth=sizes.decoder_depth,
        heads=sizes.decoder_heads,
        hidden=sizes.decoder_hidden,
    )
