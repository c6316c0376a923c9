"""Every engine equals a loop over the examples, in every layer, at random shapes and in both precisions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from raydp.errors import UnknownName
from raydp.geometry import Identity, Support
from raydp.geometry.base import Geometry, frozen_parameters
from raydp.geometry.rank_one import dense
from raydp.methods.base import ENGINES
from raydp.privacy.mechanism import grid_spacing
from raydp.tasks import cross_entropy_sum
from raydp.training.gradients import PerExampleGradients
from raydp.training.step import ClippedSum, clip

OUTPUTS = 40


class Attention(nn.Module):
    """Tokens to logits: embedding, attention, layer normalisation, a bare parameter."""

    def __init__(self, width: int, *, bare: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(11, width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, OUTPUTS)
        self.scale = nn.Parameter(torch.ones(width)) if bare else None

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens.long())
        hidden = hidden + F.scaled_dot_product_attention(self.query(hidden), self.key(hidden), self.value(hidden))
        hidden = self.norm(hidden).mean(dim=1)
        return self.head(hidden if self.scale is None else hidden * self.scale)


def dense_net(width: int) -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(nn.Linear(width, 30), nn.Tanh(), nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, OUTPUTS)), (
        width,
    )


def convolutional(width: int) -> tuple[nn.Module, tuple[int, ...]]:
    body = [nn.Conv2d(3, width, 3, stride=2), nn.GroupNorm(1, width), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(width * 16, OUTPUTS)), (3, 9, 9)


def attention(width: int) -> tuple[nn.Module, tuple[int, ...]]:
    return Attention(width, bare=False), (7,)


def with_a_bare_parameter(width: int) -> tuple[nn.Module, tuple[int, ...]]:
    return Attention(width, bare=True), (7,)


NETS = (dense_net, convolutional, attention, with_a_bare_parameter)


def looped(model: nn.Module, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    parameters = list(model.parameters())
    rows = [
        torch.autograd.grad(cross_entropy_sum(model(inputs[i : i + 1]), labels[i : i + 1]), parameters)
        for i in range(len(inputs))
    ]
    return [torch.stack([row[position] for row in rows]) for position in range(len(parameters))]


def prepared(
    make: Callable[[int], tuple[nn.Module, tuple[int, ...]]], width: int, count: int, dtype: torch.dtype
) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(width)
    model, shape = make(width)
    inputs = torch.randint(0, 11, (count, *shape)) if shape == (7,) else torch.randn(count, *shape)
    return model.to(dtype), inputs.to(dtype), torch.randint(0, OUTPUTS, (count,))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", NETS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@settings(max_examples=6, deadline=None)
@given(width=st.integers(2, 40), count=st.integers(1, 5))
def test_gradients_equal_the_loop(
    engine: str,
    make: Callable[[int], tuple[nn.Module, tuple[int, ...]]],
    dtype: torch.dtype,
    tolerance: float,
    width: int,
    count: int,
) -> None:
    model, inputs, labels = prepared(make, width, count, dtype)
    gradients = PerExampleGradients(model, example=torch.zeros_like(inputs[:1]), engine=engine)
    wanted = looped(model, inputs, labels)
    length = torch.stack([part.flatten(1).norm(dim=1) for part in wanted]).norm(dim=0)
    for found in (gradients(inputs, labels), gradients.compact(inputs, labels)):
        for left, right in zip(found, wanted, strict=True):
            error = (dense(left) - right).flatten(1).norm(dim=1)
            assert bool((error <= tolerance * length).all())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", NETS)
@settings(max_examples=6, deadline=None)
@given(width=st.integers(2, 40), count=st.integers(1, 5), ratio=st.sampled_from([0.0, 0.3, 1.0]))
def test_clipped_sums_equal_the_loop(
    engine: str, make: Callable[[int], tuple[nn.Module, tuple[int, ...]]], width: int, count: int, ratio: float
) -> None:
    """``ratio`` of the coordinates is trained; 1 is all of them, in DP-SGD's geometry. Some layers may be frozen."""
    model, inputs, labels = prepared(make, width, count, torch.float32)
    gradients = PerExampleGradients(model, example=torch.zeros_like(inputs[:1]), engine=engine)
    sizes = tuple(parameter.numel() for parameter in model.parameters())
    geometry: Geometry = Identity(sizes=sizes)
    if ratio < 1:
        chosen = [(torch.rand(size) < ratio).nonzero().flatten() for size in sizes]
        chosen[-1] = torch.arange(sizes[-1])  # never nothing at all
        geometry = Support(indices=tuple(chosen))
    frozen = frozen_parameters(geometry)
    clip_norm = 0.3
    total = ClippedSum(geometry=geometry, clip_norm=clip_norm, spacing=grid_spacing(clip_norm), shapes=gradients.shapes)
    total.add(gradients.compact(inputs, labels, frozen=frozen))
    wanted = [part.double().sum(dim=0) for part in clip(geometry.project(looped(model, inputs, labels)), clip_norm)]
    error = torch.cat(total.coordinates()) - torch.cat(wanted)
    # Of each example, 1e-5 of C and what its grid and the rounding of the sums give up of it.
    given_up = 2 * sum(sizes) ** 0.5 * grid_spacing(clip_norm)
    assert float(error.norm()) <= count * (1.5e-5 * clip_norm + given_up)


def test_the_engine_is_one_of_those_that_exist() -> None:
    with pytest.raises(UnknownName, match="engine"):
        PerExampleGradients(nn.Linear(2, 2), engine="fastest")


def test_what_an_engine_does_is_told() -> None:
    model, inputs, _ = prepared(convolutional, 8, 1, torch.float32)
    told = PerExampleGradients(model, example=inputs).describe()
    assert told == {
        "by": "formulas of the layers",
        "outer_products": ["4.weight"],
        "examples_at_once": told["examples_at_once"],
    }
    assert PerExampleGradients(model, example=inputs, engine="vmap").describe()["by"] == "torch.func.vmap"
    assert PerExampleGradients(model, example=inputs, engine="materialized").describe()["outer_products"] == []
