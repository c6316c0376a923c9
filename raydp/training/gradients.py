"""Per-example gradients, by Opacus' layer formulas on captured activations and output gradients.

Opacus' ``GradSampleModule`` wraps the model, lets ``loss.backward()`` also compute every ordinary weight gradient, and
hangs the result on the parameters. Here the same per-layer formulas (``opacus.grad_sample``) are fed directly: forward
hooks keep each layer's input and output, one ``torch.autograd.grad`` with respect to the *outputs* gives the output
gradients without the ordinary weight gradients, and nothing is stored on the model
(:mod:`raydp.geometry.capture`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn
from torch.nn import functional as F

from raydp import _validate
from raydp.data import PrivateData
from raydp.geometry.capture import (
    Call,
    Formula,
    LossFunction,
    capture,
    compact_gradients,
    gradients_of_calls,
    layers_of,
    vmapped_gradients,
)
from raydp.geometry.rank_one import ExampleGradients, dense
from raydp.methods.base import ENGINES, PRECISIONS
from raydp.models.standardized import StandardizedConv2d
from raydp.privacy.noise import NoiseKey
from raydp.tasks import Task, cross_entropy_sum

# Per-example gradients held at once run fastest when they stay near the processor's caches: 16 MiB of float32.
_PREFERRED_FLOATS = 2**22
_SMALLEST_BATCH = 32  # below it, the calls cost more than the arithmetic
_LEAST_ENTRIES = 1024  # of a matrix; below it, more calls cost more than fewer entries save


def _conv2d_formula(layer: nn.Conv2d, activations: list[Tensor], output_gradient: Tensor) -> dict[Tensor, Tensor]:
    """Per-example gradients of an ungrouped Conv2d, faster than the general formula (which serves all else).

    The gradient is a product of output gradients and patches. Patches are copied from a strided view, which beats
    ``F.unfold``. Many channels at many positions are unfolded along the width alone, one product for each kernel row:
    a row's patches are then a slice, so the copy is k_w instead of k_h·k_w times the input
    (measured; ``tests/benchmarks/bench_step.py``).
    """
    if layer.groups != 1 or isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        return GradSampleModule.GRAD_SAMPLERS[nn.Conv2d](layer, activations, output_gradient)
    flat = output_gradient.flatten(2)  # (n, outputs, positions)
    result: dict[Tensor, Tensor] = {}
    if layer.bias is not None and layer.bias.requires_grad:
        result[layer.bias] = flat.sum(dim=2)
    if not layer.weight.requires_grad:
        return result
    (pad_h, pad_w), (step_h, step_w), (gap_h, gap_w) = layer.padding, layer.stride, layer.dilation
    kernel_h, kernel_w = layer.kernel_size
    padded = F.pad(activations[0], (pad_w, pad_w, pad_h, pad_h))
    (n, channels, rows, _), (height, width) = padded.shape, output_gradient.shape[2:]
    by_n, by_channel, by_row, by_column = padded.stride()
    if step_h > 1 or channels < 16 or height * width < 256:
        patches = padded.as_strided(
            (n, channels, kernel_h, kernel_w, height, width),
            (by_n, by_channel, gap_h * by_row, gap_w * by_column, step_h * by_row, step_w * by_column),
        ).reshape(n, channels * kernel_h * kernel_w, height * width)
        result[layer.weight] = torch.bmm(flat, patches.transpose(1, 2)).view(-1, *layer.weight.shape)
        return result
    strips = padded.as_strided(
        (n, channels, kernel_w, rows, width), (by_n, by_channel, gap_w * by_column, by_row, step_w * by_column)
    ).reshape(n, channels * kernel_w, rows * width)
    kernel_rows = []
    for row in range(kernel_h):
        patches = strips[:, :, row * gap_h * width : (row * gap_h + height) * width]
        kernel_rows.append(torch.bmm(flat, patches.transpose(1, 2)).view(n, -1, channels, kernel_w))
    result[layer.weight] = torch.stack(kernel_rows, dim=3)
    return result


def _standardized_conv2d_formula(
    layer: StandardizedConv2d, activations: list[Tensor], output_gradient: Tensor
) -> dict[Tensor, Tensor]:
    found = _conv2d_formula(layer.plain(), activations, output_gradient)
    return {p: layer.weight_gradient(g) if p is layer.weight else g for p, g in found.items()}


_FORMULAS: dict[type[nn.Module], Formula] = {
    nn.Conv2d: _conv2d_formula,
    StandardizedConv2d: _standardized_conv2d_formula,
}


class PerExampleGradients:
    """Callable that returns the gradient of each example's own loss with respect to every trainable parameter.

    Layers with an Opacus formula (Linear, Conv1d/2d/3d, GroupNorm, LayerNorm, Embedding, …) are captured; a model with
    any other parametrised module falls back to ``torch.func.vmap`` for the whole model. So does one that uses a layer's
    weights without calling the layer (a tied output layer, say), which its captured calls do not show.

    Args:
        model: a model in which no layer mixes examples (see :func:`raydp.models.validate_model`).
        loss: maps outputs (n, …) and targets (n, …) to the *sum* of the examples' losses; that of a task.
        probe: None, or public inputs (n, …) on which captured gradients are held against ordinary ones first, for a
            model that nobody has tested.
        example: None, or the inputs (1, …) of a made-up example, which shows the layers whose gradients can be handed
            over as outer products.
        engine: ``auto``; or, to compare, ``materialized`` (no outer products) or ``vmap`` (no formulas of layers).
        precision: ``float32``; or ``bfloat16``, in which the passes through the model are then computed where torch's
            autocast does so. What is made of them (each example's gradient, its norm, its clipping) is float32, so the
            clip norm bounds it as ever: it is another function of the example, no looser a bound.

    Attributes:
        engine: ``captured`` or ``vmap``.
        shapes: rows and columns of the parameters that :meth:`compact` hands over as outer products: weights of Linear
            layers that are called once, on one vector an example.
        preferred_batch: the number of examples at a time that is fast for a model of this size; a smaller batch
            saves memory, a larger one mostly costs it.
        compact_batch: the same for :meth:`compact`.
        numbers_held: what :meth:`compact` holds of each example.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction = cross_entropy_sum,
        *,
        probe: Tensor | None = None,
        example: Tensor | None = None,
        engine: str = "auto",
        precision: str = "float32",
    ) -> None:
        self.model = model
        self.loss = loss
        self.precision = _validate.one_of("precision", precision, PRECISIONS)
        self.names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._layers = layers_of(model)
        formulas = {**GradSampleModule.GRAD_SAMPLERS, **_FORMULAS}
        self._formulas = {type(module): formulas.get(type(module)) for _, module in self._layers}
        _validate.one_of("engine", engine, ENGINES)
        self.engine = "vmap" if None in self._formulas.values() or engine == "vmap" else "captured"
        if probe is not None and self.engine == "captured" and not self._captures_all(probe):
            self.engine = "vmap"
        self.shapes: dict[int, tuple[int, int]] = {}
        if example is not None and self.engine == "captured" and engine == "auto":
            self.shapes = self._rank_one_weights(example)
        sizes = [parameter.numel() for parameter in self.parameters]
        self.preferred_batch = _batch_of(sum(sizes))
        self.numbers_held = sum(
            sum(self.shapes[index]) if index in self.shapes else size for index, size in enumerate(sizes)
        )
        self.compact_batch = _batch_of(self.numbers_held)

    def __call__(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """Gradients of n examples.

        Args:
            inputs: (n, …), n >= 0.
            targets: (n, …).

        Returns:
            One tensor (n, *parameter.shape) for each trainable parameter, in ``named_parameters`` order.
        """
        if len(inputs) == 0:
            return [parameter.new_zeros((0, *parameter.shape)) for parameter in self.parameters]
        if self.engine == "vmap":
            return self._vmapped(inputs, targets)
        return [dense(gradient) for gradient in self._captured(inputs, targets, frozenset(), frozenset())]

    def compact(
        self, inputs: Tensor, targets: Tensor, *, frozen: frozenset[int] = frozenset()
    ) -> list[ExampleGradients]:
        """As :meth:`__call__`, with outer products left as they are and without what is not needed.

        Args:
            inputs, targets: (n, …), n >= 0.
            frozen: parameters of which no gradient is needed; theirs may be (n, 0).
        """
        if len(inputs) == 0 or self.engine == "vmap":
            return list(self(inputs, targets))
        return self._captured(inputs, targets, frozenset(self.shapes), frozen)

    def describe(self) -> dict[str, Any]:
        """How the gradients come about: by what, which parameters as outer products, and how many examples at once."""
        return {
            "by": "torch.func.vmap" if self.engine == "vmap" else "formulas of the layers",
            "outer_products": [self.names[index] for index in self.shapes],
            "examples_at_once": self.compact_batch,
        }

    def _rank_one_weights(self, example: Tensor) -> dict[int, tuple[int, int]]:
        """Linear layers that are called once, on one vector an example, and whose weight is nobody else's."""
        position = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        seen: dict[int, list[bool]] = {}

        def look(module: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
            for parameter in module.parameters(recurse=False):
                single = type(module) is nn.Linear and parameter is module.weight and inputs[0].dim() == 2
                seen.setdefault(id(parameter), []).append(single)

        handles = [module.register_forward_hook(look) for _, module in self._layers]
        try:
            with torch.no_grad():
                self.model(example)
        finally:
            for handle in handles:
                handle.remove()
        found = {}
        for key, calls in seen.items():
            if calls == [True] and key in position and self.parameters[position[key]].numel() >= _LEAST_ENTRIES:
                rows, columns = self.parameters[position[key]].shape
                found[position[key]] = (rows, columns)
        return found

    def _captures_all(self, probe: Tensor) -> bool:
        """Whether the captured gradients of the examples sum up to the ordinary gradient."""

        def objective(outputs: Tensor) -> Tensor:
            return outputs.square().sum()

        found = gradients_of_calls(capture(self.model, probe, objective, self._layers), self._formulas)
        wanted = torch.autograd.grad(objective(self.model(probe)), self.parameters, allow_unused=True)
        for parameter, gradient in zip(self.parameters, wanted, strict=True):
            if gradient is None:
                continue
            if parameter not in found:
                return False
            if not torch.allclose(found[parameter].sum(dim=0), gradient, rtol=1e-3, atol=1e-4 * float(gradient.norm())):
                return False
        return True

    def _captured(
        self, inputs: Tensor, targets: Tensor, rank_one: frozenset[int], frozen: frozenset[int]
    ) -> list[ExampleGradients]:
        still = {self.parameters[index] for index in frozen}
        layers = [pair for pair in self._layers if not still.issuperset(pair[1].parameters(recurse=False))]
        with self._autocast(inputs):
            calls = capture(self.model, inputs, lambda outputs: self.loss(outputs, targets), layers)
        if self.precision != "float32":
            calls = [_widened(call) for call in calls]
        kept = {self.parameters[index] for index in rank_one}
        gradients = compact_gradients(calls, self._formulas, kept)
        n = len(inputs)
        return [
            # The others are not needed, or were not used.
            gradients[p] if p in gradients else p.new_zeros((n, 0) if index in frozen else (n, *p.shape))
            for index, p in enumerate(self.parameters)
        ]

    def _vmapped(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        with self._autocast(inputs):
            return vmapped_gradients(self.model, self.loss, self.names, inputs, targets)

    def _autocast(self, inputs: Tensor) -> torch.autocast:
        return torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=self.precision == "bfloat16")


def _batch_of(floats: int) -> int:
    """How many examples that hold so many numbers each are fast at once."""
    return max(_SMALLEST_BATCH, _PREFERRED_FLOATS // max(1, floats))


def _widened(call: Call) -> Call:
    """A call of which the products, and so norms and sums, are taken in float32."""
    activation = call.activation.float() if call.activation.is_floating_point() else call.activation
    return dataclasses.replace(call, activation=activation, output_gradient=call.output_gradient.float())


def made_up_example(task: Task, private: PrivateData, *, copies: int = 1, device: str = "cpu") -> Tensor | None:
    """What a model is given for an example of zeros, (1, …), which shows its layers.

    Args:
        task, private: which examples; none of them is read.
        copies: augmented copies of an example. The gradient of more than one is no outer product: None.
    """
    if copies > 1:
        return None
    draw = task.draw(1, private.input_shape, NoiseKey.insecure(0).generator("shape"))
    targets = torch.zeros(1, dtype=torch.long if task.classes else torch.float32)
    return task.examples(torch.zeros(1, *private.input_shape), targets, draw)[0].to(device)


def equal_parts(count: int, limit: int, *, workers: int = 1) -> list[slice]:
    """Cut ``count`` examples into few consecutive parts of at most ``limit``, of sizes that differ by at most 1.

    A Poisson batch is hardly ever a multiple of the limit; a small rest would cost almost as much as a full part. More
    than one part are an even number. So the cut, and with it every last bit, is that of one worker unless it would
    leave workers idle: only where the busiest of them would get more than 1.5 times its share are there more parts.
    """
    if count == 0:
        return []
    parts = -(-count // limit)
    parts += parts % 2 if parts > 1 else 0
    busiest = -(-parts // workers)
    if 2 * busiest * workers > 3 * parts:
        parts = busiest * workers
    parts = min(parts, count)
    edges = [count * part // parts for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


def average_copies(gradients: Sequence[ExampleGradients], multiplicity: int) -> list[ExampleGradients]:
    """Average the gradients of an example's augmented copies, before anything is clipped (De et al. 2022).

    Args:
        gradients: tensors (n·K, …), the K copies of one example adjacent.
        multiplicity: K >= 1.

    Returns:
        Tensors (n, …). One example stays one vector, so the sensitivity stays C.
    """
    if multiplicity == 1:
        return list(gradients)
    return [dense(gradient).unflatten(0, (-1, multiplicity)).mean(dim=1) for gradient in gradients]
