"""One training step of each library, as a function that takes no arguments. All take the same batch of examples.

All loops of a workload begin with equal weights, clip to the same norm and add noise of the same standard deviation, so
without noise they move the weights equally (tests/test_benchmarks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn

from raydp.errors import Diverged
from raydp.geometry import Geometry, Identity, Support, support_size, top_k
from raydp.geometry.base import frozen_parameters
from raydp.methods.scores import random_ranking
from raydp.privacy.mechanism import Phase, PhaseSpec
from raydp.privacy.noise import NoiseKey
from raydp.training.gradients import PerExampleGradients, equal_parts
from raydp.training.optimizer import CoordinateOptimizer, all_finite
from raydp.training.run import RunSpec
from raydp.training.step import private_gradient
from tests.benchmarks.peers.workloads import WORKLOADS, ExampleLosses, Workload

Advance = Callable[[], object]

#: The loops of Opacus; each takes the whole batch at once, or micro-batches.
OPACUS = ("hooks", "functorch", "ghost")
#: TP-TopK's second phase: the active ratio and where its coordinates lie.
SUPPORTS = {"topk 0.4 scattered": (0.4, "scattered"), "topk 0.1 last layers": (0.1, "last")}
_POPULATION = 50_000


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all private loops have in common.

    Attributes:
        learning_rate: of the average gradient. Tiny, so that weights, and with them the time of a step, stay the same.
        clip_norm: C.
        noise_multiplier: sigma; the noise of the sum has standard deviation sigma·C.
    """

    learning_rate: float = 1e-6
    clip_norm: float = 1.0
    noise_multiplier: float = 1.0


def loop(workload: str, batch: int, name: str, *, setting: Setting = Setting()) -> tuple[nn.Module, Advance]:
    """The model that a loop trains, and the loop.

    Args:
        workload: of :data:`WORKLOADS`. batch: B, the number of examples in every step.
        name: ``plain``; ``raydp``, or one of :data:`SUPPORTS`; or one of :data:`OPACUS`, with the size of a micro-batch
            after it unless it takes the whole batch: ``hooks 64``.

    Raises:
        KeyError: there is no such workload or loop.
    """
    found = WORKLOADS[workload]
    model = found.model()
    inputs, targets = found.batch(batch)
    if name == "plain":
        return model, plain_step(model, found.losses, inputs, targets, setting)
    if name == "raydp" or name in SUPPORTS:
        return model, raydp_step(model, found, inputs, targets, setting, support=SUPPORTS.get(name))
    kind, _, size = name.partition(" ")
    if kind not in OPACUS:
        raise KeyError(name)
    make = ghost_step if kind == "ghost" else opacus_step
    parts = list(zip(inputs.split(int(size or batch)), targets.split(int(size or batch)), strict=True))
    return model, make(model, found.losses, parts, setting, batch=batch, functorch=kind == "functorch")


def plain_step(model: nn.Module, losses: ExampleLosses, inputs: Tensor, targets: Tensor, setting: Setting) -> Advance:
    """SGD without privacy: one pass over the whole batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.learning_rate)

    def advance() -> None:
        optimizer.zero_grad(set_to_none=True)
        losses(model(inputs), targets).mean().backward()
        optimizer.step()

    return advance


def raydp_step(
    model: nn.Module,
    workload: Workload,
    inputs: Tensor,
    targets: Tensor,
    setting: Setting,
    *,
    support: tuple[float, str] | None = None,
) -> Advance:
    """The step of a run of ``dp_sgd``, or of TP-TopK's second phase: what ``raydp.training.run`` does between drawing
    the batch and writing the ledger, on the engine, the micro-batches and the release that it uses."""
    gradients = PerExampleGradients(
        model, lambda outputs, wanted: workload.losses(outputs, wanted).sum(), example=torch.zeros_like(inputs[:1])
    )
    batch, parameters = len(inputs), gradients.parameters
    spec = PhaseSpec(
        name="train",
        steps=1000,
        batch_size=batch,
        population=max(_POPULATION, batch),
        clip_norm=setting.clip_norm,
    )
    phase, key = Phase(spec=spec, noise_multiplier=setting.noise_multiplier), NoiseKey.insecure(0)
    geometry = _geometry([parameter.numel() for parameter in parameters], support)
    frozen = frozen_parameters(geometry)
    optimizer = CoordinateOptimizer(parameters, geometry.support, kind="sgd", momentum=0.0, weight_decay=0.0)
    step = 0

    def advance() -> None:
        nonlocal step
        parts = equal_parts(batch, min(RunSpec.micro_batch, gradients.compact_batch))
        vectors = (gradients.compact(inputs[part], targets[part], frozen=frozen) for part in parts)
        released = private_gradient(
            vectors, geometry=geometry, phase=phase, step=step, key=key, shapes=gradients.shapes
        )
        optimizer.step(geometry.lift(released), setting.learning_rate)
        step += 1
        if not all_finite(parameters):
            raise Diverged(f"the weights are not finite after step {step}")

    return advance


def engine_of(workload: str) -> str:
    """How raydp computes the workload's per-example gradients: ``captured`` from layers, or by ``vmap``."""
    return PerExampleGradients(WORKLOADS[workload].model()).engine


def _geometry(sizes: list[int], support: tuple[float, str] | None) -> Geometry:
    """All coordinates; or a share of them, scattered at random or the last ones, with all layers before them frozen."""
    if support is None:
        return Identity(sizes=tuple(sizes))
    ratio, where = support
    total = sum(sizes)
    ranks = torch.arange(total) if where == "last" else random_ranking(total, seed=0)
    found: Support = top_k(ranks, support_size(ratio, total), sizes)
    return found


def opacus_step(
    model: nn.Module,
    losses: ExampleLosses,
    parts: Sequence[tuple[Tensor, Tensor]],
    setting: Setting,
    *,
    batch: int,
    functorch: bool,
) -> Advance:
    """``GradSampleModule`` and ``DPOptimizer``; micro-batches by ``signal_skip_step``, as ``BatchMemoryManager``'s."""
    wrapped = GradSampleModule(model, loss_reduction="sum", force_functorch=functorch)
    optimizer = DPOptimizer(
        torch.optim.SGD(_trainable(wrapped), lr=setting.learning_rate / batch),
        noise_multiplier=setting.noise_multiplier,
        max_grad_norm=setting.clip_norm,
        expected_batch_size=batch,
        loss_reduction="sum",
    )

    def advance() -> None:
        for position, (inputs, targets) in enumerate(parts):
            optimizer.signal_skip_step(do_skip=position < len(parts) - 1)
            losses(wrapped(inputs), targets).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return advance


def ghost_step(
    model: nn.Module,
    losses: ExampleLosses,
    parts: Sequence[tuple[Tensor, Tensor]],
    setting: Setting,
    *,
    batch: int,
    functorch: bool,
) -> Advance:
    """Ghost clipping: lengths first, then a second backward pass of the weighted losses.

    Opacus has lengths of ``Linear`` and ``Embedding``; of any other layer it computes the per-example gradients and
    drops them layer by layer.
    """
    wrapped = GradSampleModuleFastGradientClipping(
        model,
        loss_reduction="sum",
        force_functorch=functorch,
        max_grad_norm=setting.clip_norm,
        use_ghost_clipping=True,
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(_trainable(wrapped), lr=setting.learning_rate / batch),
        noise_multiplier=setting.noise_multiplier,
        max_grad_norm=setting.clip_norm,
        expected_batch_size=batch,
        loss_reduction="sum",
    )
    criterion = DPLossFastGradientClipping(wrapped, optimizer, _Criterion(losses), loss_reduction="sum")

    def advance() -> None:
        for position, (inputs, targets) in enumerate(parts):
            optimizer.signal_skip_step(do_skip=position < len(parts) - 1)
            criterion(wrapped(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return advance


class _Criterion:
    """Losses of the examples with the attribute that Opacus sets while it asks for them."""

    reduction = "sum"

    def __init__(self, losses: ExampleLosses) -> None:
        self._losses = losses

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        found = self._losses(outputs, targets)
        return found if self.reduction == "none" else found.sum()


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
