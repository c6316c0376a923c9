"""What passes through the layers of a model: inputs and output gradients, from one forward and one backward pass.

Per-example gradients and curvature factors are both products of these two. The objective must be a *sum* over the
examples, so that an output gradient is in per-example units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raydp.errors import InvalidValue
from raydp.geometry.rank_one import ExampleGradients, RankOne, dense

LossFunction = Callable[[Tensor, Tensor], Tensor]
Formula = Callable[[Any, list[Tensor], Tensor], dict[Any, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a layer on n examples.

    Attributes:
        name, module: the layer.
        activation: its input, (n, …), detached.
        output_gradient: gradient of the objective with respect to its output, (n, …).
    """

    name: str
    module: nn.Module
    activation: Tensor
    output_gradient: Tensor


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that own trainable parameters directly."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    ]


def capture(
    model: nn.Module,
    images: Tensor,
    objective: Callable[[Tensor], Tensor],
    layers: Sequence[tuple[str, nn.Module]],
) -> list[Call]:
    """Run the model forward and backward once, keeping what passes through ``layers``.

    The gradient is taken with respect to the layers' *outputs*, so the ordinary weight gradients are never computed,
    and nothing is stored on the model.

    Args:
        model: in which no layer mixes examples.
        images: (n, C, H, W), n >= 1.
        objective: maps the logits to a scalar that is a sum over the examples.
        layers: modules that own trainable parameters.

    Returns:
        The calls, in the order in which they were made; a module called twice is there twice.

    Raises:
        InvalidValue: a layer's output is changed in place by a later one.
    """
    calls: list[tuple[str, nn.Module, Tensor, Tensor, int]] = []

    def keep(name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            calls.append((name, module, inputs[0].detach(), output, output._version))

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in layers]
    try:
        value = objective(model(images))
    finally:
        for handle in handles:
            handle.remove()
    for name, module, _, output, version in calls:
        if output._version != version:
            raise InvalidValue(
                name or "model",
                type(module).__name__,
                "has an output that a later layer changes in place, which would falsify its per-example gradient",
                "Use the out-of-place form after it, such as nn.ReLU(inplace=False).",
            )
    output_gradients = torch.autograd.grad(value, [call[3] for call in calls])
    return [
        Call(name=name, module=module, activation=activation, output_gradient=gradient)
        for (name, module, activation, _, _), gradient in zip(calls, output_gradients, strict=True)
    ]


def gradients_of_calls(calls: Sequence[Call], formulas: Mapping[type[nn.Module], Formula | None]) -> dict[Any, Tensor]:
    """Per-example gradients (n, *shape) of the parameters that the calls used, summed over a layer's calls."""
    return {parameter: dense(gradient) for parameter, gradient in compact_gradients(calls, formulas, set()).items()}


def compact_gradients(
    calls: Sequence[Call], formulas: Mapping[type[nn.Module], Formula | None], rank_one: Set[nn.Parameter]
) -> dict[Any, ExampleGradients]:
    """As :func:`gradients_of_calls`, with those of the weights ``rank_one`` as outer products.

    Args:
        rank_one: weights of Linear layers that are called once, on one vector an example.
    """
    gradients: dict[Any, ExampleGradients] = {}
    with torch.no_grad():
        for call in calls:
            if isinstance(call.module, nn.Linear) and call.module.weight in rank_one:
                gradients[call.module.weight] = RankOne(rows=call.output_gradient, columns=call.activation)
                if call.module.bias is not None and call.module.bias.requires_grad:
                    gradients[call.module.bias] = call.output_gradient
                continue
            formula = formulas[type(call.module)]
            assert formula is not None  # callers check before they capture
            for parameter, gradient in formula(call.module, [call.activation], call.output_gradient).items():
                earlier = gradients.get(parameter)
                gradients[parameter] = gradient if earlier is None else dense(earlier) + gradient
    return gradients


def vmapped_gradients(
    model: nn.Module, loss: LossFunction, names: Sequence[str], images: Tensor, labels: Tensor
) -> list[Tensor]:
    """Per-example gradients (n, *shape) of the named parameters by ``torch.func.vmap``: slower, but for any layer."""
    wanted = set(names)
    everything = dict(model.named_parameters())
    chosen = {name: everything[name].detach() for name in names}
    others = {
        **{name: parameter.detach() for name, parameter in everything.items() if name not in wanted},
        **dict(model.named_buffers()),
    }

    def example_loss(values: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, {**values, **others}, (image.unsqueeze(0),))
        return loss(logits, label.unsqueeze(0))

    gradients = torch.func.vmap(torch.func.grad(example_loss), in_dims=(None, 0, 0))(chosen, images, labels)
    return [gradients[name] for name in names]
