"""Curvature factors are those of the per-example gradients, in true units (METHODS section 4, row 4)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from raydp.errors import Diverged, InvalidValue
from raydp.geometry import Whitening, kfac
from raydp.geometry.blocks import DiagonalBlock, LayerBlock, blocks_of
from raydp.geometry.capture import Call, capture, layers_of
from raydp.geometry.curvature import Curvature, DiagonalCurvature, LayerCurvature
from raydp.geometry.kfac import eigendecompose, estimate_curvature, example_gradients, fisher_labels_for, pink_noise
from raydp.tasks import cross_entropy_sum
from raydp.training.gradients import PerExampleGradients
from tests.geometry.nets import curvature_of, dense, examples, small_net


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def factors(part: LayerCurvature) -> tuple[Tensor, Tensor]:
    """(A, G) of a block, put together again."""
    return (
        part.input_basis @ part.input_values.diag_embed() @ part.input_basis.mT,
        part.output_basis @ part.output_values.diag_embed() @ part.output_basis.mT,
    )


def layer(curvature: Curvature, name: str) -> LayerCurvature:
    (found,) = [part for part in curvature.blocks if part.block.name == name]
    assert isinstance(found, LayerCurvature)
    return found


@settings(max_examples=40, deadline=None)
@given(
    groups=st.sampled_from([1, 2, 4]),
    width=st.sampled_from([1, 2]),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 3),
    padding=st.sampled_from([0, 1, 2, "same", "valid"]),
    dilation=st.integers(1, 2),
    mode=st.sampled_from(["zeros", "circular", "reflect"]),
    bias=st.booleans(),
    count=st.integers(1, 4),
)
def test_inputs_times_output_gradients_are_the_per_example_gradients(
    groups: int,
    width: int,
    kernel: tuple[int, int],
    stride: int,
    padding: int | str,
    dilation: int,
    mode: str,
    bias: bool,
    count: int,
) -> None:
    torch.manual_seed(0)
    stride = 1 if padding == "same" else stride
    convolution = nn.Conv2d(
        4, 4 * width, kernel, stride, padding, dilation=dilation, groups=groups, bias=bias, padding_mode=mode
    )
    images = torch.randn(count, 4, 7, 8)
    body = nn.Sequential(convolution, nn.Tanh(), nn.Flatten())
    model = nn.Sequential(body, nn.Linear(body(images).shape[1], 3, bias=bias)).double()
    images, labels = images.double(), torch.randint(3, (count,))
    calls = capture(model, images, lambda logits: cross_entropy_sum(logits, labels), layers_of(model))
    wanted: list[Tensor | None] = [None] * len(list(model.parameters()))
    for call, block in zip(calls, blocks_of(model), strict=True):
        assert isinstance(block, LayerBlock)
        inputs, outputs = kfac.layer_inputs(call, block), kfac.layer_outputs(call, block)
        matrices = torch.einsum("grnu,gcnu->ngrc", outputs, inputs)
        wanted[block.weight] = matrices.flatten(1)
        if block.bias is not None:
            wanted[block.bias] = outputs.sum(dim=3).permute(2, 0, 1).flatten(1)
    parameters = list(model.parameters())
    for index in range(count):  # autograd, one example at a time
        loss = cross_entropy_sum(model(images[index : index + 1]), labels[index : index + 1])
        for found, true in zip(wanted, torch.autograd.grad(loss, parameters), strict=True):
            assert found is not None
            torch.testing.assert_close(found[index], true.flatten(), rtol=1e-9, atol=1e-11)


def test_every_parameter_is_in_exactly_one_block() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(3))
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight = self.one.weight  # tied
            self.frozen_weight, self.frozen_bias = nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen_weight.weight.requires_grad_(False)
            self.frozen_bias.bias.requires_grad_(False)
            self.norm = nn.LayerNorm(4)
            self.depthwise = nn.Conv2d(4, 4, 3, groups=4)

    model = Odd()
    blocks = blocks_of(model)
    covered: list[int] = []
    for block in blocks:
        if isinstance(block, DiagonalBlock):
            covered.append(block.parameter)
        else:
            covered += [block.weight] if block.bias is None else [block.weight, block.bias]
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert sorted(covered) == list(range(len(trainable)))
    assert sum(block.size for block in blocks) == sum(p.numel() for p in trainable)
    names = {block.name: type(block) for block in blocks}
    assert names["one.weight"] is names["frozen_weight.bias"] is names["token"] is names["norm.bias"] is DiagonalBlock
    assert names["depthwise"] is names["frozen_bias"] is LayerBlock


def test_batches_and_repeated_examples_do_not_change_the_scale() -> None:
    model = small_net()
    images, labels = examples(20)
    once = estimate_curvature(model, images, generator=generator(), fisher_labels="given", labels=labels)
    pieces = estimate_curvature(
        model, images, generator=generator(), fisher_labels="given", labels=labels, batch_size=3
    )
    doubled = estimate_curvature(
        model, images.repeat(2, 1, 1, 1), generator=generator(), fisher_labels="given", labels=labels.repeat(2)
    )
    for other in (pieces, doubled):
        for left, right in zip(once.blocks, other.blocks, strict=True):
            if isinstance(left, LayerCurvature) and isinstance(right, LayerCurvature):
                for a, b in zip(factors(left), factors(right), strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(left.eigenvalues, right.eigenvalues, rtol=1e-8, atol=1e-12)


def test_a_linear_layer_on_flat_inputs_has_the_textbook_factors_with_a_bias_column() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(50, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    images, labels = examples(15)
    found = layer(estimate_curvature(model, images, generator=generator(), fisher_labels="given", labels=labels), "3")
    hidden = model[:3](images).detach().requires_grad_(True)
    extended = torch.cat([hidden, torch.ones(15, 1)], dim=1).detach()
    probabilities = model[3](hidden).softmax(dim=1).detach()
    output_gradients = probabilities - nn.functional.one_hot(labels, 4)
    input_factor, output_factor = factors(found)
    torch.testing.assert_close(input_factor[0], extended.T @ extended / 15)
    torch.testing.assert_close(output_factor[0], output_gradients.T @ output_gradients / 15)
    assert input_factor[0, -1, -1] == pytest.approx(1.0)


@pytest.mark.parametrize("bias", [True, False])
def test_expand_equals_the_explicit_fisher_when_inputs_and_output_gradients_are_independent(bias: bool) -> None:
    """Row 4: |U| positions count |U| times. Independent a (not centred) and g, uncorrelated over the positions."""
    draw = torch.Generator().manual_seed(1)
    n = 60_000
    module = nn.Conv2d(2, 2, 1, bias=bias).double()
    (block,) = blocks_of(module)
    assert isinstance(block, LayerBlock)
    inputs = torch.randn(n, 2, 2, 2, generator=draw, dtype=torch.float64) * torch.tensor([1.0, 2.0]).view(1, 2, 1, 1)
    inputs = inputs + 0.5
    outputs = torch.randn(n, 2, 2, 2, generator=draw, dtype=torch.float64) * torch.tensor([1.0, 0.5]).view(1, 2, 1, 1)
    part = kfac._LayerFactors(block, "expand", module.weight.detach())
    part.add([Call(name="", module=module, activation=inputs, output_gradient=outputs)])
    found = Curvature(blocks=(part.finish(n),))
    extended = torch.cat([inputs, torch.ones(n, 1, 2, 2)], dim=1) if bias else inputs
    gradients = torch.einsum("nrhw,nchw->nrc", outputs, extended)
    flat = torch.cat([gradients[..., :2].flatten(1), *([gradients[..., 2]] if bias else [])], dim=1)
    explicit = flat.T @ flat / n
    sizes = [4, 2] if bias else [4]
    assert found.eigenvalues.sum() / explicit.trace() == pytest.approx(1.0, abs=0.01)
    torch.testing.assert_close(dense(found, sizes), explicit, rtol=0.03, atol=0.15)


def test_reduce_takes_mean_inputs_and_summed_output_gradients() -> None:
    model = small_net(groups=1)
    images, labels = examples(12)
    found = estimate_curvature(
        model, images, generator=generator(), fisher_labels="given", labels=labels, form="reduce"
    )
    input_factor, _ = factors(layer(found, "0"))
    patches = nn.functional.unfold(images, 3, padding=1).mean(dim=2)
    extended = torch.cat([patches, torch.ones(12, 1)], dim=1)
    torch.testing.assert_close(input_factor[0], extended.T @ extended / 12)
    # The bias's gradient is the summed output gradient, so its second moment is G.
    bias_gradients = PerExampleGradients(model)(images, labels)[1]
    _, output_factor = factors(layer(found, "0"))
    torch.testing.assert_close(output_factor[0], bias_gradients.T @ bias_gradients / 12)


def test_both_forms_agree_where_there_is_one_position() -> None:
    model = small_net()
    images, labels = examples(12)
    found = [
        layer(
            estimate_curvature(model, images, generator=generator(), fisher_labels="given", labels=labels, form=form),
            "6",
        )
        for form in ("expand", "reduce")
    ]
    torch.testing.assert_close(found[0].eigenvalues, found[1].eigenvalues)


def test_a_layer_called_twice_counts_its_calls_as_positions() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(torch.tanh(self.shared(torch.tanh(self.shared(inputs.flatten(1))))))

    torch.manual_seed(0)
    found = layer(estimate_curvature(Twice(), torch.randn(9, 1, 2, 2), generator=generator()), "shared")
    assert factors(found)[0][0, -1, -1] == pytest.approx(2.0)  # the bias column: one 1 a call


def test_other_parameters_have_the_mean_square_of_their_gradients() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor([1.5, -0.5]))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs * self.factor.view(1, 2, 1, 1)

    for first in (nn.GroupNorm(1, 2), Scale()):  # with a formula of Opacus, and without
        torch.manual_seed(0)
        model = nn.Sequential(first, nn.Flatten(), nn.Linear(50, 4)).double()
        images, labels = examples(10)
        found = estimate_curvature(
            model, images, generator=generator(), fisher_labels="given", labels=labels, batch_size=4
        )
        gradients = PerExampleGradients(model)(images, labels)
        diagonals = [part for part in found.blocks if isinstance(part, DiagonalCurvature)]
        assert diagonals
        for part in diagonals:
            torch.testing.assert_close(
                part.eigenvalues, gradients[part.block.parameter].flatten(1).square().mean(dim=0)
            )


def test_example_gradients_are_those_of_the_engine() -> None:
    model = small_net()
    images, labels = examples(6)
    found = example_gradients(model, images, generator=generator(), fisher_labels="given", labels=labels)
    for left, right in zip(found, PerExampleGradients(model)(images, labels), strict=True):
        torch.testing.assert_close(left, right)


def test_labels_of_the_model_follow_its_outputs_and_the_generator_alone() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0]).repeat(20_000, 1)
    state = torch.random.get_rng_state()
    first = fisher_labels_for(logits, "model", generator=generator())
    assert torch.equal(first, fisher_labels_for(logits, "model", generator=generator()))
    assert torch.equal(state, torch.random.get_rng_state())
    shares = first.bincount(minlength=3) / len(first)
    torch.testing.assert_close(shares, logits[0].softmax(dim=0), atol=0.015, rtol=0)
    uniform = fisher_labels_for(logits, "random", generator=generator()).bincount(minlength=3) / len(logits)
    torch.testing.assert_close(uniform, torch.full((3,), 1 / 3), atol=0.015, rtol=0)


def test_given_labels_must_be_classes_of_the_model() -> None:
    model = small_net()
    images, labels = examples(5)
    with pytest.raises(InvalidValue, match=r"\[0, 4\)"):
        estimate_curvature(model, images, generator=generator(), fisher_labels="given", labels=labels + 4)
    with pytest.raises(InvalidValue, match="public"):
        estimate_curvature(model, images[:0], generator=generator())


def test_curvature_that_is_not_finite_is_divergence_and_names_the_layer() -> None:
    images = torch.full((5, 1, 2, 2), 1e200, dtype=torch.float64)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4)).double()
    with pytest.raises(Diverged, match="curvature of '1' is not finite"):  # tanh hides the size from the outputs
        estimate_curvature(model, images, generator=generator())
    with torch.no_grad():
        model[3].weight.fill_(float("nan"))
    with pytest.raises(Diverged, match="outputs"):
        estimate_curvature(model, images, generator=generator())


def test_eigendecomposition_is_symmetrised_cut_at_zero_and_orthonormal(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(2, 5, 3, generator=generator())
    matrix = matrix @ matrix.mT  # rank 3 of 5: two eigenvalues are zero up to rounding
    values, vectors = eigendecompose(matrix + 1e-7 * torch.randn(2, 5, 5, generator=generator()), "x")
    assert bool((values >= 0).all())
    torch.testing.assert_close(vectors @ values.diag_embed() @ vectors.mT, matrix, atol=1e-4, rtol=1e-4)
    assert values.dtype == vectors.dtype == torch.float32
    large = torch.randn(1, 300, 300, generator=generator())
    basis = eigendecompose(large @ large.mT, "x")[1][0].double()
    assert float(torch.linalg.matrix_norm(basis.T @ basis - torch.eye(300), 2)) < 3e-7  # in float32 ten times that

    def fails(symmetric: Tensor) -> tuple[Tensor, Tensor]:
        raise torch.linalg.LinAlgError("did not converge")

    with pytest.raises(Diverged, match="curvature of 'x'"):
        eigendecompose(matrix * float("nan"), "x")
    monkeypatch.setattr(torch.linalg, "eigh", fails)
    with pytest.raises(Diverged, match="no eigendecomposition"):
        eigendecompose(matrix, "x")


@pytest.mark.parametrize("k", [1, 47, 48, 50, 145])
def test_second_moments_in_strips_are_second_moments(k: int) -> None:
    columns = torch.randn(2, k, 20, generator=generator(), dtype=torch.float64)
    torch.testing.assert_close(kfac._gram(columns), columns @ columns.mT)


def test_a_checkpoint_of_the_curvature_is_the_curvature() -> None:
    model = small_net()
    found = curvature_of(model)
    again = Curvature.from_state(blocks_of(model), found.state())
    assert again.sizes == found.sizes
    for left, right in zip(found.state(), again.state(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_numbers_about_the_floor() -> None:
    found = curvature_of(small_net())
    values = found.eigenvalues
    floor = float(values.median())
    assert found.clamped_fraction(floor) == pytest.approx(0.5, abs=0.02)
    assert found.clamped_fraction(0.0) == 0.0
    assert found.effective_dimension(floor) == pytest.approx(float((values / values.clamp(min=floor)).sum()))
    assert found.mean_inverse(1e9) == pytest.approx(1e-9)
    assert found.mean_inverse(2e9, 2) == pytest.approx(0.25e-18)


def test_d_eff_is_the_mean_squared_length_of_a_whitened_gradient_on_the_data_of_the_fisher() -> None:
    """Exact for a diagonal block: there F is the second moment of the gradient."""
    model = nn.Sequential(nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(50, 4)).double()
    model[2].requires_grad_(False)
    images, labels = examples(25)
    found = estimate_curvature(model, images, generator=generator(), fisher_labels="given", labels=labels)
    floor = float(found.eigenvalues.median())
    gradients = PerExampleGradients(model)(images, labels)
    whitened = Whitening(curvature=found, floor=floor).project(gradients)
    squares = torch.cat(whitened, dim=1).square().sum(dim=1)
    assert found.effective_dimension(floor) == pytest.approx(float(squares.mean()))


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_noise_images_have_the_spectrum_asked_for(exponent: float) -> None:
    images = pink_noise((200, 3, 32, 32), exponent=exponent, generator=generator())
    assert torch.equal(images, pink_noise((200, 3, 32, 32), exponent=exponent, generator=generator()))
    torch.testing.assert_close(images.mean(dim=(2, 3)), torch.zeros(200, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(images.std(dim=(2, 3)), torch.ones(200, 3), atol=1e-4, rtol=0)
    power = torch.fft.rfft2(images).abs().square().mean(dim=(0, 1))
    slope = float((power[0, 8] / power[0, 2]).log() / torch.tensor(4.0).log())
    assert slope == pytest.approx(-exponent, abs=0.15)
