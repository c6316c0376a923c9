"""Which parameters form which block of the curvature: one for each Linear and Conv2d layer, the rest diagonal.

Every trainable parameter is in exactly one block, so none is left out of the clip norm or the noise.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, kw_only=True)
class LayerBlock:
    """A layer whose weight gradient is a matrix for each group: (groups, rows, columns).

    The bias, where it is trained, is the last column: the input is extended by a 1. Groups of a grouped convolution are
    independent blocks that share a batch dimension.

    Attributes:
        name: the layer's name in the model.
        weight, bias: positions of its parameters among the trainable ones; bias is None where there is none.
        groups: of a convolution; 1 otherwise.
        rows: output features of a group.
        inputs: input features of a group; of a convolution C_in/groups·k_h·k_w.
    """

    name: str
    weight: int
    bias: int | None
    groups: int
    rows: int
    inputs: int

    @property
    def columns(self) -> int:
        return self.inputs + (self.bias is not None)

    @property
    def size(self) -> int:
        return self.groups * self.rows * self.columns


@dataclass(frozen=True, kw_only=True)
class DiagonalBlock:
    """A parameter without Kronecker structure, such as the affine part of a normalisation.

    Attributes:
        name: the parameter's name in the model.
        parameter: its position among the trainable ones.
        size: its number of entries.
    """

    name: str
    parameter: int
    size: int


Block = LayerBlock | DiagonalBlock


def blocks_of(model: nn.Module) -> tuple[Block, ...]:
    """The blocks of a model, layers first, each in the order of ``named_modules`` and ``named_parameters``.

    A layer counts only if its type is exactly Linear or Conv2d (a subclass may use its weight in another way) and its
    parameters belong to it alone (a tied weight has no Kronecker structure).
    """
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    position = {id(parameter): index for index, (_, parameter) in enumerate(trainable)}
    owners = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    blocks: list[Block] = []
    covered: set[int] = set()
    for name, module in model.named_modules():
        if type(module) not in (nn.Linear, nn.Conv2d) or id(module.weight) not in position:
            continue
        if owners[id(module.weight)] > 1:
            continue
        groups = module.groups if isinstance(module, nn.Conv2d) else 1
        bias = None if module.bias is None or owners[id(module.bias)] > 1 else position.get(id(module.bias))
        block = LayerBlock(
            name=name,
            weight=position[id(module.weight)],
            bias=bias,
            groups=groups,
            rows=module.weight.shape[0] // groups,
            inputs=module.weight[0].numel(),
        )
        blocks.append(block)
        covered |= {block.weight} if bias is None else {block.weight, bias}
    for index, (name, parameter) in enumerate(trainable):
        if index not in covered:
            blocks.append(DiagonalBlock(name=name, parameter=index, size=parameter.numel()))
    return tuple(blocks)
