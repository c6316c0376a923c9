"""Training a hypernetwork on public data sets (arXiv 2606.26772, section 3.2). Nothing private enters.

A step takes several data sets. Their parameters are generated together, and the target model runs with all of them at
once (``torch.func.vmap``), so there is no loop over data sets. The noise of the release is drawn here too, from public
randomness: the decoder learns to read noisy embeddings.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from raydp import _validate
from raydp._workers import ALONE, Workers, own_part
from raydp.errors import Diverged, InvalidValue
from raydp.models.hypernetwork import Hypernetwork
from raydp.models.lora import takes_stacked
from raydp.tasks import Task
from raydp.tasks.base import Draw

_WARM_UP = 0.1  # share of the steps in which the learning rate rises


@dataclass(frozen=True, kw_only=True)
class PublicSets:
    """Public data sets, as the hypernetwork sees them and as the target model does.

    Attributes:
        features: (P, f), what φ1 sees of each public example.
        inputs, targets: (P, …), what the target model and its loss see.
        sets: int64 (M, N), positions of the examples of each set.
    """

    features: Tensor
    inputs: Tensor
    targets: Tensor
    sets: Tensor

    def __post_init__(self) -> None:
        if self.sets.shape[1] < 2:
            raise InvalidValue("public sets", self.sets.shape[1], "must hold 2 examples or more each", "Give more.")
        if not bool(torch.isfinite(self.features).all()):
            raise InvalidValue("features", "NaN or infinite", "must be finite", "Check the encoder and its inputs.")

    def of(self, chosen: slice) -> PublicSets:
        """Some of the sets."""
        return dataclasses.replace(self, sets=self.sets[chosen])


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How a hypernetwork is trained.

    Attributes:
        steps: of AdamW without weight decay; the learning rate rises over the first tenth and then falls as a cosine.
        learning_rate: its peak.
        sets: data sets in a step.
        loss_points: at most so many random examples of each set enter the loss (all enter the embedding); unbiased.
        seed: of order and noise.
    """

    steps: int
    learning_rate: float
    sets: int
    loss_points: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("steps", "sets", "loss_points"):
            _validate.integer(name, getattr(self, name), low=1)
        _validate.positive("learning_rate", self.learning_rate)


class SetLosses:
    """Losses of generated parameters on their own sets, all sets in one pass of the target.

    Low-rank factors are stacked (a few batched products beside the frozen layers); any other parameters go through
    ``torch.func.vmap``.

    Args:
        target: the model whose parameters are generated; the others are held as they are.
        task: its loss.
    """

    def __init__(self, target: nn.Module, task: Task, names: tuple[str, ...]) -> None:
        self._target, self._task = target, task
        self._stacks = takes_stacked(target, names)
        self._fixed = {
            name: value.detach()
            for name, value in (*target.named_parameters(), *target.named_buffers())
            if name not in names
        }

    def draw(
        self, sets: int, points: int, input_shape: tuple[int, ...], randomness: np.random.Generator
    ) -> Draw | None:
        """The task's randomness for so many sets of so many examples each, one set after the other."""
        return self._task.draw(sets * points, input_shape, randomness)

    def __call__(
        self, parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor, draw: Draw | None = None
    ) -> Tensor:
        """Mean loss of an example in each set: (M,) for parameters (M, *shape), inputs (M, n, …), targets (M, n).

        ``draw`` is :meth:`draw`'s for these sets; a task that draws nothing needs none.
        """
        count, points = inputs.shape[:2]
        flat, wanted = self._task.examples(inputs.flatten(0, 1), targets.flatten(0, 1), draw)

        if self._stacks:
            outputs = functional_call(self._target, {**self._fixed, **parameters}, (flat,))
            by_set = (outputs.unflatten(0, (count, points)), wanted.unflatten(0, (count, points)))
            return torch.func.vmap(self._task.loss)(*by_set) / points

        def loss(generated: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return self._task.loss(functional_call(self._target, {**self._fixed, **generated}, (x,)), y) / points

        pairs = (flat.unflatten(0, (count, points)), wanted.unflatten(0, (count, points)))
        return torch.func.vmap(loss)(parameters, *pairs)


def train(
    hypernetwork: Hypernetwork,
    *,
    losses: SetLosses,
    public: PublicSets,
    noise_std: float,
    options: TrainingOptions,
    workers: Workers = ALONE,
) -> None:
    """Train in place.

    Each worker takes some of a step's data sets, and the gradients are summed: the weights stay the same on all, and
    differ from those that one worker finds by rounding alone.

    Args:
        hypernetwork: one without parameters (the explicit one of the paper's proof) is left as it is.
        losses: of generated parameters.
        public: the sets, of as many examples as the private one: the noise is right for that size alone.
        noise_std: standard deviation of the release's noise on each coordinate of the average.
        options: how.
        workers: of the run, all of which call this alike.

    Raises:
        Diverged: the weights are not finite afterwards.
    """
    weights = [parameter for parameter in hypernetwork.parameters() if parameter.requires_grad]
    if not weights:
        return
    optimizer = torch.optim.AdamW(weights, lr=options.learning_rate, weight_decay=0.0)
    warm = max(1, round(_WARM_UP * options.steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _factor(step, warm, options.steps))
    generator = torch.Generator().manual_seed(options.seed)
    randomness = np.random.default_rng(options.seed)
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(options.steps):
        if len(order) < min(options.sets, len(public.sets)):
            order = torch.randperm(len(public.sets), generator=generator)
        chosen, order = public.sets[order[: options.sets]], order[options.sets :]
        part = own_part(len(chosen), workers)
        optimizer.zero_grad(set_to_none=True)
        found = _losses(
            hypernetwork, losses, public, chosen, noise_std, options.loss_points, generator, randomness, part
        )
        if part.stop > part.start:
            (found.sum() / len(chosen)).backward()
        _sum_gradients(weights, workers)
        optimizer.step()
        schedule.step()
    if not all(bool(torch.isfinite(parameter).all()) for parameter in weights):
        raise Diverged("the hypernetwork's weights are not finite after its public training; lower its learning rate")


@torch.no_grad()
def validate(
    hypernetwork: Hypernetwork, *, losses: SetLosses, public: PublicSets, noise_std: float, seed: int, batch: int = 16
) -> float:
    """Mean loss over public sets that were not trained on, with noise as at release."""
    generator, randomness = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    found = [
        _losses(hypernetwork, losses, public, chosen, noise_std, public.sets.shape[1], generator, randomness)
        for chosen in public.sets.split(batch)
    ]
    return float(torch.cat(found).mean())


def _losses(
    hypernetwork: Hypernetwork,
    losses: SetLosses,
    public: PublicSets,
    chosen: Tensor,
    noise_std: float,
    points: int,
    generator: torch.Generator,
    randomness: np.random.Generator,
    part: slice = slice(None),
) -> Tensor:
    """Losses of some of the chosen sets. What is random is drawn for all of them, whichever ``part`` is taken."""
    sets, device = len(chosen), public.features.device
    noise = noise_std * torch.randn(sets, hypernetwork.architecture.embedding, generator=generator)[part].to(device)
    embedded = chosen[part]
    entering = embedded
    if points < chosen.shape[1]:
        entering = embedded[:, torch.randperm(chosen.shape[1], generator=generator)[:points].to(chosen.device)]
    points = entering.shape[1]
    draw = losses.draw(sets, points, tuple(public.inputs.shape[1:]), randomness)
    if draw is not None:
        first, last, _ = part.indices(sets)
        draw = draw[first * points : last * points]
    if len(embedded) == 0:
        return torch.zeros(0, device=device)
    generated = hypernetwork.generate(hypernetwork.pool(public.features[embedded]) + noise)
    return losses(generated, public.inputs[entering], public.targets[entering], draw)


def _sum_gradients(weights: Sequence[Tensor], workers: Workers) -> None:
    """The gradients of all workers' sets, on each of them; one without sets has none of its own."""
    if workers.count == 1:
        return
    for weight in weights:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    workers.sum([weight.grad for weight in weights if weight.grad is not None])


def _factor(step: int, warm: int, steps: int) -> float:
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


class HypernetworkCache:
    """Trained hypernetworks by digest of everything that they follow from, so that the runs of a search share one.

    Args:
        directory: default ``$RAYDP_CACHE/hypernetworks``, else ``~/.cache/raydp/hypernetworks``.
    """

    def __init__(self, directory: Path | None = None) -> None:
        if directory is None:
            named = os.environ.get("RAYDP_CACHE")
            directory = (Path(named) if named else Path.home() / ".cache" / "raydp") / "hypernetworks"
        self.directory = directory

    def get(self, digest: str) -> dict[str, Tensor] | None:
        """The weights, or None where there are none that can be read whole."""
        try:
            content = (self.directory / f"{digest}.pt").read_bytes()
            stated, body = content[:32], content[32:]
            if hashlib.sha256(body).digest() != stated:
                return None
            found: dict[str, Tensor] = torch.load(io.BytesIO(body), weights_only=True)
        except OSError:
            return None
        return found

    def put(self, digest: str, weights: dict[str, Tensor]) -> None:
        """Store atomically. A directory that cannot be written costs time on the next call, not the run."""
        buffer = io.BytesIO()
        torch.save(weights, buffer)
        body, temporary = buffer.getvalue(), None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.directory, suffix=".tmp", delete=False) as file:
                temporary = Path(file.name)
                file.write(hashlib.sha256(body).digest() + body)
            temporary.replace(self.directory / f"{digest}.pt")
        except OSError:
            if temporary is not None:
                temporary.unlink(missing_ok=True)


def digest_of(record: dict[str, object], tensors: dict[str, Tensor]) -> str:
    """SHA-256 (hex) of plain values and tensors."""
    found = hashlib.sha256(json.dumps({"torch": torch.__version__, **record}, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.detach().cpu().contiguous().numpy().data)
    return found.hexdigest()
