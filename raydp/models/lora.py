"""Low-rank adaptation (LoRA; Hu et al. 2022, arXiv 2106.09685) of linear layers: W x + s·B A x, W frozen.

The two factors are weights of ordinary linear layers, so that per-example gradients see them as such. Factors of
several data sets can stand in for one: a model then runs many data sets in one pass, with no loop over them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from raydp import _validate
from raydp.errors import InvalidValue, UnknownName

#: Layers of an attention block that are adapted.
ATTENTION = ("qkv", "proj")


class LoraLinear(nn.Module):
    """A frozen linear layer and its low-rank update.

    ``down`` (A: r × inputs) begins as N(0, 1/inputs), ``up`` (B: outputs × r) as zero, so that the layer begins as
    it was.

    Args:
        base: the layer; its weights are frozen.
        rank: r >= 1.
        scale: s, often written alpha/r.
    """

    def __init__(self, base: nn.Linear, *, rank: int, scale: float = 1.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        placed = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.down = nn.Linear(base.in_features, rank, bias=False, **placed)
        self.up = nn.Linear(rank, base.out_features, bias=False, **placed)
        self.scale = scale
        nn.init.normal_(self.down.weight, std=base.in_features**-0.5)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """(n, positions, inputs) to (n, positions, outputs).

        Where the factors have a leading dimension of S data sets, the examples of each are adjacent and equally many:
        n = S·m, and each data set's examples meet its own factors.
        """
        down, up = self.down.weight, self.up.weight
        if down.dim() == 2:
            return self.base(inputs) + self.scale * self.up(self.down(inputs))
        by_set = inputs.reshape(len(down), -1, inputs.shape[-1])  # (S, m·positions, inputs)
        update = torch.bmm(torch.bmm(by_set, down.transpose(1, 2)), up.transpose(1, 2))
        return self.base(inputs) + self.scale * update.view(*inputs.shape[:-1], -1)


def add_lora(model: nn.Module, *, rank: int, scale: float = 1.0, targets: tuple[str, ...] = ATTENTION) -> None:
    """Freeze the model and put a low-rank update on each linear layer whose own name is in ``targets``, in place.

    The trainable parameters are then exactly the factors: r·(inputs + outputs) numbers a layer.

    Raises:
        InvalidValue: rank < 1, or the model has such updates already.
        UnknownName: a target is no linear layer of the model; near names are suggested.
    """
    rank = _validate.integer("rank", rank, low=1)
    scale = _validate.positive("scale", scale)
    if any(isinstance(module, LoraLinear) for module in model.modules()):
        raise InvalidValue("model", type(model).__name__, "has low-rank updates already", "Fold or remove them first.")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    known = {name.rpartition(".")[2] for name in linears}
    for target in targets:
        if target not in known:
            raise UnknownName("LoRA target", target, known)
    model.requires_grad_(False)
    for name, base in linears.items():
        path, _, own = name.rpartition(".")
        if own in targets:
            setattr(model.get_submodule(path), own, LoraLinear(base, rank=rank, scale=scale))


def fold_lora(model: nn.Module) -> None:
    """Add each low-rank update to the weight that it adapts and take it away, in place.

    The model computes what it did, up to rounding; its weights stay frozen.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLinear):
            with torch.no_grad():
                module.base.weight += module.scale * module.up.weight @ module.down.weight
            path, _, own = name.rpartition(".")
            setattr(model.get_submodule(path), own, module.base)


def takes_stacked(model: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether the parameters of these names are low-rank factors, so that the model runs with those of many data
    sets at once (see :meth:`LoraLinear.forward`)."""
    factors = {
        f"{path}.{part}.weight"
        for path, module in model.named_modules()
        if isinstance(module, LoraLinear)
        for part in ("down", "up")
    }
    return bool(names) and factors.issuperset(names)
