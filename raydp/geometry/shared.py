"""A curvature whose blocks are computed by the workers of a run together: each block once, by one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from raydp._workers import Workers
from raydp.geometry.blocks import Block, DiagonalBlock
from raydp.geometry.curvature import BlockCurvature, Curvature, DiagonalCurvature, LayerCurvature


def share_blocks(
    blocks: Sequence[Block],
    owner: Sequence[int],
    make: Callable[[int], BlockCurvature],
    *,
    like: Tensor,
    workers: Workers,
) -> Curvature:
    """The curvature of these blocks, with the same bits on every worker.

    Args:
        blocks: of the model.
        owner: rank of the worker that makes each block.
        make: computes the block of a position; called for this worker's own.
        like: of the type and device of the blocks' tensors.
        workers: of the run.
    """
    found = [
        make(position) if rank == workers.rank else _empty(block, like)
        for position, (block, rank) in enumerate(zip(blocks, owner, strict=True))
    ]
    for source in range(workers.count):
        given = [part for part, rank in zip(found, owner, strict=True) if rank == source]
        workers.spread([tensor for part in given for tensor in part.tensors()], source=source)
    return Curvature(blocks=tuple(found))


def eigen_cost(block: Block) -> float:
    """What the eigendecompositions of a block cost, in units of a multiplication in a large product."""
    if isinstance(block, DiagonalBlock):
        return 0.0
    return 10.0 * block.groups * (block.columns**3 + block.rows**3)  # 9 at k = 577, measured


def _empty(block: Block, like: Tensor) -> BlockCurvature:
    """A block to be filled by another worker."""
    if isinstance(block, DiagonalBlock):
        return DiagonalCurvature(block=block, eigenvalues=like.new_empty(block.size))
    groups, rows, columns = block.groups, block.rows, block.columns
    return LayerCurvature(
        block=block,
        output_basis=like.new_empty(groups, rows, rows),
        output_values=like.new_empty(groups, rows),
        input_basis=like.new_empty(groups, columns, columns),
        input_values=like.new_empty(groups, columns),
    )
