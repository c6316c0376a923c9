"""Every engine equals a loop over the examples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from raydp.errors import InvalidValue
from raydp.models import build_model
from raydp.tasks import cross_entropy_sum
from raydp.training.gradients import PerExampleGradients, average_copies, equal_parts


def looped(model: nn.Module, images: Tensor, labels: Tensor) -> list[Tensor]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rows = [
        torch.autograd.grad(cross_entropy_sum(model(images[i : i + 1]), labels[i : i + 1]), parameters)
        for i in range(len(images))
    ]
    return [torch.stack([row[position] for row in rows]) for position in range(len(parameters))]


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(
    channels=st.sampled_from([1, 3, 16]),
    width=st.sampled_from([4, 8]),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    side=st.sampled_from([10, 20]),
    bias=st.booleans(),
    count=st.integers(1, 5),
)
def test_convolution_and_norm_layers_equal_the_loop(
    channels: int, width: int, kernel: int, stride: int, padding: int, dilation: int, side: int, bias: bool, count: int
) -> None:
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(channels, width, kernel, stride, padding, dilation=dilation, bias=bias),
        nn.GroupNorm(2, width),
        nn.Tanh(),
        nn.Flatten(),
    )
    images = torch.randn(count, channels, side, side)
    model = nn.Sequential(body, nn.Linear(body(images).shape[1], 5, bias=bias))
    engine = PerExampleGradients(model)
    assert engine.engine == "captured"
    labels = torch.randint(0, 5, (count,))
    assert_same(engine(images, labels), looped(model, images, labels))


def test_grouped_convolution_and_same_padding_equal_the_loop() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2), nn.Tanh(), nn.Conv2d(8, 8, 3, padding="same"), nn.Flatten(), nn.Linear(512, 3)
    )
    images, labels = torch.randn(3, 4, 10, 10), torch.tensor([0, 2, 1])
    assert_same(PerExampleGradients(model)(images, labels), looped(model, images, labels))


def test_a_layer_without_a_formula_falls_back_to_vmap_and_equals_the_loop() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(1.5))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs * self.factor

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), Scale(), nn.Linear(9, 4))
    engine = PerExampleGradients(model)
    assert engine.engine == "vmap"
    images, labels = torch.randn(6, 1, 3, 3), torch.randint(0, 4, (6,))
    assert_same(engine(images, labels), looped(model, images, labels))


def test_a_module_that_is_called_twice_counts_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(torch.tanh(self.shared(torch.tanh(self.shared(inputs.flatten(1))))))

    torch.manual_seed(0)
    model = Twice()
    images, labels = torch.randn(5, 1, 2, 2), torch.randint(0, 3, (5,))
    assert_same(PerExampleGradients(model)(images, labels), looped(model, images, labels))


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 3))
    model[1].weight.requires_grad_(False)
    images, labels = torch.randn(2, 1, 2, 2), torch.tensor([0, 1])
    found = PerExampleGradients(model)(images, labels)
    assert [tuple(g.shape) for g in found] == [(2, 4), (2, 3, 4), (2, 3)]
    assert_same(found, looped(model, images, labels))


def test_an_empty_batch_has_gradients_of_no_example() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    found = PerExampleGradients(model)(torch.zeros(0, 1, 2, 2), torch.zeros(0, dtype=torch.long))
    assert [tuple(gradient.shape) for gradient in found] == [(0, 3, 4), (0, 3)]


def test_in_place_layers_are_refused_by_name_opacus_828() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    with pytest.raises(InvalidValue, match=r"1.*Linear.*in place"):
        PerExampleGradients(model)(torch.randn(2, 1, 2, 2), torch.tensor([0, 1]))


def test_copies_of_an_example_are_averaged_before_clipping() -> None:
    gradient = torch.arange(12.0).reshape(6, 2)
    (averaged,) = average_copies([gradient], 3)
    torch.testing.assert_close(averaged, torch.tensor([[2.0, 3.0], [8.0, 9.0]]))


@given(count=st.integers(0, 700), limit=st.integers(1, 300))
def test_parts_are_few_equal_and_cover_the_batch(count: int, limit: int) -> None:
    parts = [range(count)[part] for part in equal_parts(count, limit)]
    assert [index for part in parts for index in part] == list(range(count))
    fewest = -(-count // limit)
    assert len(parts) in (fewest, fewest + 1)
    assert len(parts) % 2 == 0 or len(parts) in (1, count)
    assert all(max(map(len, parts)) - len(part) <= 1 and 0 < len(part) <= limit for part in parts)


@pytest.mark.parametrize("name", ["tanh_cnn_small", "resnet20", "mlp"])
def test_bfloat16_passes_give_float32_rows_near_the_exact_ones(name: str) -> None:
    """Forward and backward in bfloat16 (8 bits): rows, and so norms and clipping, are float32."""
    model = build_model(name, input_shape=(3, 16, 16), outputs=4, seed=0)
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(6, 3, 16, 16, generator=generator), torch.tensor([0, 1, 2, 3, 0, 1])
    exact, rough = (PerExampleGradients(model, precision=kind)(inputs, labels) for kind in ("float32", "bfloat16"))
    assert all(row.dtype == torch.float32 for row in rough)
    left, right = (torch.cat([row.flatten(1) for row in rows], dim=1) for rows in (exact, rough))
    assert not torch.equal(left, right)
    distance = (left - right).norm(dim=1) / left.norm(dim=1)
    assert float(distance.max()) < 0.25  # eight bits through twenty layers


def test_bfloat16_by_vmap_too() -> None:
    """The fallback for layers without a formula."""
    model = Bare()
    inputs, labels = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1])
    found = PerExampleGradients(model, precision="bfloat16")
    assert found.engine == "vmap"
    exact = PerExampleGradients(model)(inputs, labels)
    for row, wanted in zip(found(inputs, labels), exact, strict=True):
        assert row.dtype == torch.float32
        torch.testing.assert_close(row, wanted, rtol=0.1, atol=0.02)


class Bare(nn.Module):
    """A weight that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6, generator=torch.Generator().manual_seed(1)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight.T
