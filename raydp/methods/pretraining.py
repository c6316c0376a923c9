"""Ordinary training on public examples before the first private step. It costs no budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from raydp import _validate
from raydp.errors import Diverged, InvalidValue
from raydp.methods.base import GradientHyperparameters, PublicExamples, Setting, option, refuse_unused
from raydp.methods.public import model_classes, public_generator, public_seed, require_public
from raydp.tasks import Task

HEADS = ("auto", "keep", "swap")
OPTIMIZERS = ("sgd", "adam")
_MOMENTUM = 0.9  # of sgd
_ORDER, _HEAD, _TASK = 2**31 + 1, 2**31 + 2, 2**31 + 3  # addresses of public randomness; steps have the small ones


@dataclass(frozen=True, kw_only=True)
class PretrainableHyperparameters(GradientHyperparameters):
    """The shared hyperparameters, and how the model is trained on public examples first."""

    pretrain_epochs: int = option(0, "passes over the public examples before the first private step; 0 for none")
    pretrain_optimizer: str = option("adam", "optimiser on the public examples: adam, or sgd with momentum 0.9")
    pretrain_learning_rate: float = option(1e-3, "its learning rate")
    pretrain_batch_size: int = option(64, "public examples in one of its steps")
    pretrain_head: str = option(
        "auto",
        "the last Linear: keep trains it (public classes must fit), swap trains a temporary one and puts the untrained "
        "one back, auto swaps where the numbers of classes differ",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.integer("pretrain_epochs", self.pretrain_epochs, low=0)
        _validate.one_of("pretrain_optimizer", self.pretrain_optimizer, OPTIMIZERS)
        _validate.positive("pretrain_learning_rate", self.pretrain_learning_rate)
        _validate.integer("pretrain_batch_size", self.pretrain_batch_size, low=1)
        _validate.one_of("pretrain_head", self.pretrain_head, HEADS)
        if self.pretrain_epochs == 0:
            unused = ("pretrain_optimizer", "pretrain_learning_rate", "pretrain_batch_size", "pretrain_head")
            refuse_unused(self, unused, because="pretrain_epochs = 0")

    @property
    def pretrains(self) -> bool:
        return self.pretrain_epochs > 0


class Pretraining:
    """The pre-training that a policy runs when it prepares a new run.

    Args:
        hyperparameters: with ``pretrain_epochs = 0`` there is nothing to do.
        setting: of the run.

    Raises:
        InvalidValue: there are no public examples, the model has no head to swap, or its head does not fit the public
            classes. All before anything is trained.
    """

    def __init__(self, hyperparameters: PretrainableHyperparameters, setting: Setting) -> None:
        self._hyperparameters, self._setting = hyperparameters, setting
        self._public: PublicExamples | None = None
        if not hyperparameters.pretrains:
            return
        self._public = require_public(setting, purpose="on which the model is trained first")
        self._swaps = False
        if self._public.num_classes is None:  # nothing of the model depends on a number of classes
            refuse_unused(hyperparameters, ("pretrain_head",), because="targets that are numbers")
            return
        classes = model_classes(setting, self._public.inputs)
        if hyperparameters.pretrain_head == "keep" and self._public.num_classes > classes:
            raise InvalidValue(
                "pretrain_head",
                "keep",
                f"needs public classes that the model has, but there are {self._public.num_classes} for "
                f"{classes} outputs",
                "Use 'auto' or 'swap', which train a temporary head.",
            )
        differ = self._public.num_classes != classes
        self._swaps = hyperparameters.pretrain_head == "swap" or (hyperparameters.pretrain_head == "auto" and differ)
        if self._swaps:
            _head(setting.model, classes)

    def run(self) -> None:
        """Train the model in place.

        The private head, if it was swapped out, comes back as it was initialised: its parameters are the same objects.

        Raises:
            Diverged: the weights are not finite afterwards.
        """
        if self._public is None:
            return
        model, seed = self._setting.model, self._setting.seed
        if not self._swaps:
            _train(model, self._public, self._hyperparameters, self._setting.task, seed)
            return
        assert self._public.num_classes is not None
        owner, name, head = _head(model, model_classes(self._setting, self._public.inputs))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(public_seed(seed, _HEAD))
            temporary = nn.Linear(head.in_features, self._public.num_classes, bias=head.bias is not None)
        setattr(owner, name, temporary.to(head.weight))
        try:
            _train(model, self._public, self._hyperparameters, self._setting.task, seed)
        finally:
            setattr(owner, name, head)


def _head(model: nn.Module, classes: int) -> tuple[nn.Module, str, nn.Linear]:
    """The last Linear of the model, with the module that holds it and its name there."""
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linears or linears[-1][1].out_features != classes or not linears[-1][0]:
        raise InvalidValue(
            "model",
            type(model).__name__,
            f"must end in a Linear layer with its {classes} outputs, so that it can get a temporary head",
            "Choose another model, or public examples of the same classes with pretrain_head = 'keep'.",
        )
    path, head = linears[-1]
    owner, _, name = path.rpartition(".")
    return model.get_submodule(owner), name, head


def _train(
    model: nn.Module, public: PublicExamples, chosen: PretrainableHyperparameters, task: Task, seed: int
) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rate = chosen.pretrain_learning_rate
    optimizer: torch.optim.Optimizer = (
        torch.optim.Adam(parameters, lr=rate)
        if chosen.pretrain_optimizer == "adam"
        else torch.optim.SGD(parameters, lr=rate, momentum=_MOMENTUM)
    )
    generator, randomness = public_generator(seed, _ORDER), np.random.default_rng(public_seed(seed, _TASK))
    for _ in range(chosen.pretrain_epochs):
        order: Tensor = torch.randperm(len(public.targets), generator=generator).to(public.targets.device)
        for batch in order.split(chosen.pretrain_batch_size):
            optimizer.zero_grad(set_to_none=True)
            inputs, targets = public.inputs[batch], public.targets[batch]
            inputs, targets = task.examples(inputs, targets, task.draw(len(batch), inputs.shape[1:], randomness))
            (task.loss(model(inputs), targets) / len(batch)).backward()
            optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
        raise Diverged("the weights are not finite after the public pre-training")
