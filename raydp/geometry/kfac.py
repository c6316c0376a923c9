"""K-FAC: Kronecker factors of the Fisher matrix, estimated on examples that are public or made of noise.

For a layer whose gradient is W = Σ_u g_u a_uᵀ over positions u (one for a Linear on flat inputs, the output pixels for
a convolution), F ≈ A ⊗ G in true per-example units, whatever the number of examples:

* ``expand`` (KFC; Grosse & Martens 2016, arXiv 1602.01407): positions independent. A = E[Σ_u a aᵀ] (a *sum* over
  positions), G = E[mean_u g gᵀ], so F = |U| · mean ⊗ mean.
* ``reduce`` (Eschenhagen et al. 2023, arXiv 2311.00636): A of the mean input, G of the summed output gradient.

The floor of DP-NGD is absolute, so a wrong scale would silently be another floor: the backward pass is that of a sum of
losses, each example's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn
from torch.nn import functional as F

from raydp import _validate
from raydp._workers import ALONE, Workers, owners
from raydp.errors import Diverged, InvalidValue
from raydp.geometry.blocks import Block, DiagonalBlock, LayerBlock, blocks_of
from raydp.geometry.capture import Call, capture, gradients_of_calls, layers_of, vmapped_gradients
from raydp.geometry.curvature import Curvature, DiagonalCurvature, LayerCurvature
from raydp.geometry.shared import eigen_cost, share_blocks

FORMS = ("expand", "reduce")
LABELS = ("model", "given", "random")
_BATCH = 32  # examples at a time: bounds the memory of the patches, and is the fastest for small networks
_STRIPS_FROM = 48  # below, a product in one piece is as fast


def estimate_curvature(
    model: nn.Module,
    images: Tensor,
    *,
    generator: torch.Generator,
    fisher_labels: str = "model",
    labels: Tensor | None = None,
    form: str = "expand",
    batch_size: int = _BATCH,
    workers: Workers = ALONE,
) -> Curvature:
    """The Fisher matrix of cross-entropy on these examples, at the model's current weights, eigendecomposed.

    The products and eigendecompositions of each block, most of the time, are computed by one worker. Each runs the
    model on all examples: shared out, their sums would depend in the last bit on the number of workers, and with them
    the eigenbasis wherever eigenvalues are close, in which the noise is drawn.

    Args:
        model: in which no layer mixes examples. Its weights may be private outputs; nothing else private enters.
        images: (n, C, H, W), n >= 1, public or made of noise, normalised like the inputs in training.
        generator: a CPU generator of public randomness, which draws the labels.
        fisher_labels: ``model`` draws y ~ softmax of the logits (the Fisher itself, by Monte Carlo), ``random`` draws
            classes uniformly, ``given`` takes ``labels`` (the empirical Fisher).
        labels: (n,), for ``given``.
        form: ``expand`` or ``reduce``.
        batch_size: examples at a time; changes memory, not the estimate.
        workers: of the run, all of which call this alike.

    Raises:
        Diverged: logits or a factor are not finite; the message names the layer.
        InvalidValue: no example, or given labels that are no classes of the model.
    """
    _validate.one_of("curvature_form", form, FORMS)
    _validate.one_of("fisher_labels", fisher_labels, LABELS)
    if len(images) == 0:
        raise InvalidValue("public", 0, "must hold at least one example", "Name a public set that is not empty.")
    parameters = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
    blocks = blocks_of(model)
    parts: dict[int, _LayerFactors | _Diagonal] = {}
    owner: list[int] = []
    for start in range(0, len(images), batch_size):
        piece = slice(start, start + batch_size)
        drawn: list[Tensor] = []
        given = None if labels is None else labels[piece]
        objective = _objective(_Labels(fisher_labels, given, generator), drawn)
        calls = capture(model, images[piece], objective, capturable_layers(model))
        if not owner:  # the positions of a layer are known from its calls
            owner = owners([_cost(block, calls, len(images)) for block in blocks], workers)
            parts = {
                position: _LayerFactors(block, form, parameters[block.weight])
                if isinstance(block, LayerBlock)
                else _Diagonal(block, parameters[block.parameter])
                for position, block in enumerate(blocks)
                if owner[position] == workers.rank
            }
        _add_batch(model, images[piece], drawn[0], calls, list(parts.values()))
        del calls  # before the next batch's are made
    return share_blocks(
        blocks,
        owner,
        lambda position: parts[position].finish(len(images)),
        like=parameters[0],
        workers=workers,
    )


def _cost(block: Block, calls: Sequence[Call], examples: int) -> float:
    """Multiplications that a block's products take, and what its eigendecompositions take beside them."""
    if isinstance(block, DiagonalBlock):
        return float(block.size)
    used = [call.output_gradient for call in calls if call.name == block.name]
    positions = sum(gradient.numel() // len(gradient) for gradient in used) // (block.groups * block.rows)
    products = examples * positions * block.groups * (block.columns**2 + block.rows**2)
    return products + eigen_cost(block)


class _Labels:
    """The labels of one batch, drawn when the logits are known."""

    def __init__(self, kind: str, given: Tensor | None, generator: torch.Generator) -> None:
        self.kind, self.given, self.generator = kind, given, generator

    def draw(self, logits: Tensor) -> Tensor:
        return fisher_labels_for(logits, self.kind, generator=self.generator, given=self.given)


def fisher_labels_for(logits: Tensor, kind: str, *, generator: torch.Generator, given: Tensor | None = None) -> Tensor:
    """Labels (n,) for logits (n, classes): see :func:`estimate_curvature`."""
    logits = logits.detach()
    n, classes = logits.shape
    if not bool(torch.isfinite(logits).all()):
        raise Diverged("the model's outputs on public examples are not finite, so there is no curvature")
    if kind == "model":
        drawn = torch.multinomial(logits.double().softmax(dim=1).cpu(), 1, generator=generator).squeeze(1)
        return drawn.to(logits.device)
    if kind == "random":
        return torch.randint(classes, (n,), generator=generator).to(logits.device)
    if given is None or int(given.max()) >= classes:
        raise InvalidValue(
            "fisher_labels",
            kind,
            f"needs public labels that are classes of the model, in [0, {classes})",
            "Use fisher_labels = 'model', which draws them from the model's own outputs.",
        )
    return given


def _objective(labels: _Labels, drawn: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """The summed loss under labels that are drawn when the logits are known, and kept in ``drawn``."""

    def objective(logits: Tensor) -> Tensor:
        drawn.append(labels.draw(logits))
        return summed_loss(logits, drawn[-1])

    return objective


def _add_batch(
    model: nn.Module, images: Tensor, labels: Tensor, calls: Sequence[Call], parts: Sequence[_LayerFactors | _Diagonal]
) -> None:
    for part in parts:
        if isinstance(part, _LayerFactors):
            part.add([call for call in calls if call.name == part.block.name])
    diagonals = [part for part in parts if isinstance(part, _Diagonal)]
    if diagonals:
        gradients = named_gradients(model, images, labels, calls, [part.block.name for part in diagonals])
        for part, gradient in zip(diagonals, gradients, strict=True):
            part.add(gradient)


def example_gradients(
    model: nn.Module,
    images: Tensor,
    *,
    generator: torch.Generator,
    fisher_labels: str = "model",
    labels: Tensor | None = None,
) -> list[Tensor]:
    """Gradients (n, *shape) of every trainable parameter on each of n public examples; for diagnostics.

    Arguments as for :func:`estimate_curvature`.
    """
    drawn: list[Tensor] = []
    calls = capture(
        model, images, _objective(_Labels(fisher_labels, labels, generator), drawn), capturable_layers(model)
    )
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return named_gradients(model, images, drawn[0], calls, names)


def capturable_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Layers of which Opacus knows the gradient; Linear and Conv2d are among them."""
    return [(name, module) for name, module in layers_of(model) if type(module) in GradSampleModule.GRAD_SAMPLERS]


def named_gradients(
    model: nn.Module, images: Tensor, labels: Tensor, calls: Sequence[Call], names: Sequence[str]
) -> list[Tensor]:
    """Per-example gradients of the named parameters: by Opacus' formulas where all layers have one, or by vmap."""
    parameters = dict(model.named_parameters())
    wanted = {id(parameters[name]) for name in names}
    owners = [m for _, m in layers_of(model) if any(id(p) in wanted for p in m.parameters(recurse=False))]
    if any(type(module) not in GradSampleModule.GRAD_SAMPLERS for module in owners):
        return vmapped_gradients(model, summed_loss, names, images, labels)
    found = gradients_of_calls([call for call in calls if call.module in owners], GradSampleModule.GRAD_SAMPLERS)
    return [
        found[parameter] if parameter in found else parameter.new_zeros((len(images), *parameter.shape))  # not used
        for parameter in (parameters[name] for name in names)
    ]


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")  # a sum: per-example units


class _Diagonal:
    """E[g²] of one parameter, summed up over batches."""

    def __init__(self, block: DiagonalBlock, parameter: Tensor) -> None:
        self.block = block
        self.total = parameter.new_zeros(block.size)

    def add(self, gradients: Tensor) -> None:
        self.total = self.total + gradients.flatten(1).square().sum(dim=0)

    def finish(self, examples: int) -> DiagonalCurvature:
        values = self.total / examples
        _check_finite(self.block.name, values)
        return DiagonalCurvature(block=self.block, eigenvalues=values)


class _LayerFactors:
    """The second moments of one layer, summed up over batches."""

    def __init__(self, block: LayerBlock, form: str, weight: Tensor) -> None:
        self.block, self.form = block, form
        self.inputs = weight.new_zeros(block.groups, block.columns, block.columns)  # Σ a aᵀ
        self.outputs = weight.new_zeros(block.groups, block.rows, block.rows)  # Σ g gᵀ
        self.positions = 1  # |U|, over all calls of the layer on one example

    def add(self, calls: Sequence[Call]) -> None:
        """Add a batch; several calls of one layer count as further positions."""
        if not calls:  # a layer that the model does not use
            return
        moments = self._expanded if self.form == "expand" else self._reduced
        inputs, outputs = moments(calls)
        self.inputs = self.inputs + inputs
        self.outputs = self.outputs + outputs

    def _expanded(self, calls: Sequence[Call]) -> tuple[Tensor, Tensor]:
        pairs, self.positions = [], 0
        for call in calls:
            inputs, outputs = layer_inputs(call, self.block), layer_outputs(call, self.block)
            self.positions += inputs.shape[3]
            pairs.append((_second_moment(inputs.flatten(2), self.block), _gram(outputs.flatten(2))))
        return _sum([pair[0] for pair in pairs]), _sum([pair[1] for pair in pairs])

    def _reduced(self, calls: Sequence[Call]) -> tuple[Tensor, Tensor]:
        inputs = [layer_inputs(call, self.block) for call in calls]
        positions = sum(part.shape[3] for part in inputs)
        mean = _sum([part.sum(dim=3) for part in inputs]) / positions
        total = _sum([layer_outputs(call, self.block).sum(dim=3) for call in calls])
        return _second_moment(mean, self.block), _gram(total)

    def finish(self, examples: int) -> LayerCurvature:
        return layer_curvature(
            self.block, outputs=self.outputs / (examples * self.positions), inputs=self.inputs / examples
        )


def layer_curvature(block: LayerBlock, *, outputs: Tensor, inputs: Tensor) -> LayerCurvature:
    """A layer's curvature from its Kronecker factors (groups, rows, rows) and (groups, columns, columns)."""
    output_values, output_basis = eigendecompose(outputs, block.name)
    input_values, input_basis = eigendecompose(inputs, block.name)
    return LayerCurvature(
        block=block,
        output_basis=output_basis,
        output_values=output_values,
        input_basis=input_basis,
        input_values=input_values,
    )


def eigendecompose(factors: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Eigenvalues (groups, k), negatives cut to 0, and eigenvectors (groups, k, k) of symmetric factors.

    Symmetrised first, and decomposed in float64: a few per cent of an estimate's time, and the eigenvectors are
    orthonormal to the rounding of their entries, which whitened lengths rest on.

    Raises:
        Diverged: the factors of layer ``name`` are not finite, or no decomposition is found.
    """
    _check_finite(name, factors)
    symmetric = factors.double()
    try:
        values, vectors = torch.linalg.eigh((symmetric + symmetric.mT) / 2)
    except torch.linalg.LinAlgError as error:
        raise Diverged(f"the curvature of {name!r} has no eigendecomposition") from error
    _check_finite(name, vectors)
    # Contiguous, as it arrives at other workers: products of another layout are rounded in another order.
    return values.clamp(min=0).to(factors.dtype), vectors.to(factors.dtype).contiguous()


def _check_finite(name: str, values: Tensor) -> None:
    if not bool(torch.isfinite(values).all()):
        raise Diverged(f"the curvature of {name!r} is not finite")


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors)).sum(dim=0)


def _gram(columns: Tensor) -> Tensor:
    """Σ x xᵀ over the last axis: (groups, k, m) to (groups, k, k).

    The matrix is symmetric, so three strips on and right of the diagonal are computed and mirrored: a third less
    arithmetic, and most of an estimate's time is spent here.
    """
    groups, k, _ = columns.shape
    if k < _STRIPS_FROM:
        return columns @ columns.mT
    found = columns.new_empty(groups, k, k)
    for start, stop in pairwise((0, k // 3, 2 * k // 3, k)):
        strip = columns[:, start:stop] @ columns[:, start:].mT
        found[:, start:stop, start:] = strip
        found[:, start:, start:stop] = strip.mT
    return found


def _second_moment(inputs: Tensor, block: LayerBlock) -> Tensor:
    """Σ ā āᵀ over the last axis, ā = [a; 1] if the bias is trained, without building ā."""
    gram = _gram(inputs)
    if block.bias is None:
        return gram
    sums = inputs.sum(dim=2, keepdim=True)
    count = torch.full_like(sums[:, :1], inputs.shape[2])
    return torch.cat([torch.cat([gram, sums], dim=2), torch.cat([sums.mT, count], dim=2)], dim=1)


def layer_outputs(call: Call, block: LayerBlock) -> Tensor:
    """Output gradients (groups, rows, n, positions)."""
    gradient = call.output_gradient
    n = len(gradient)
    if isinstance(call.module, nn.Conv2d):
        return gradient.flatten(2).transpose(0, 1).reshape(block.groups, block.rows, n, -1)
    return gradient.reshape(n, -1, block.rows).permute(2, 0, 1)[None]


def layer_inputs(call: Call, block: LayerBlock) -> Tensor:
    """Inputs (groups, inputs, n, positions): of a convolution the patch below each output pixel."""
    layer, activation = call.module, call.activation
    n = len(activation)
    if not isinstance(layer, nn.Conv2d):
        return activation.reshape(n, -1, block.inputs).permute(2, 0, 1)[None]
    height, width = call.output_gradient.shape[2:]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(activation, layer._reversed_padding_repeated_twice, mode=mode)
    by_n, by_channel, by_row, by_column = padded.stride()
    (step_h, step_w), (gap_h, gap_w), (kernel_h, kernel_w) = layer.stride, layer.dilation, layer.kernel_size
    patches = padded.as_strided(
        (padded.shape[1], kernel_h, kernel_w, n, height, width),
        (by_channel, gap_h * by_row, gap_w * by_column, by_n, step_h * by_row, step_w * by_column),
    )
    return patches.reshape(block.groups, block.inputs, n, height * width)  # the one copy


def pink_noise(shape: Sequence[int], *, exponent: float, generator: torch.Generator) -> Tensor:
    """Images of structured noise: power spectrum 1/f^exponent, each channel of zero mean and unit variance.

    The data-free stand-in for public images of DP-KFC (arXiv 2605.13418); natural images have an exponent near 2,
    ``exponent=0`` is white noise.

    Args:
        shape: (n, C, H, W).
    """
    n, channels, height, width = shape
    spectrum = torch.fft.rfft2(torch.randn(n, channels, height, width, generator=generator))
    frequency = (torch.fft.fftfreq(height)[:, None] ** 2 + torch.fft.rfftfreq(width)[None, :] ** 2).sqrt()
    frequency[0, 0] = 1.0
    amplitude = frequency ** (-exponent / 2)
    amplitude[0, 0] = 0.0  # no mean
    images = torch.fft.irfft2(spectrum * amplitude, s=(height, width))
    return images / images.std(dim=(2, 3), keepdim=True).clamp(min=1e-12)
