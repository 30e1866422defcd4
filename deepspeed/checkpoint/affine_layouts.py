# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps of the packed, interleaved, padded and blocked layouts that inference engines keep weights in."""

from dataclasses import replace
from typing import List, Sequence

import numpy as np

from .affine import (AffinePiece, ParamAffineMap, ShardSizeError, UnreadablePieceError, contiguous_split_map,
                     sub_param_map)
from .affine_boxes import chunk_bounds, coordinates, row_major_strides

__all__ = ['column_block_map', 'interleaved_map', 'packed_map', 'padded_split_map', 'transposed_map']


def packed_map(shape: Sequence[int],
               component_sizes: Sequence[int],
               tp_degree: int,
               partition_dim: int = 0) -> ParamAffineMap:
    """Components packed one after another along ``partition_dim`` (gate and up, or Q, K and V), each split evenly.

    A rank's shard is its part of each component in turn, cut as ``torch.chunk`` cuts. Of rows g0 g1 g2 g3 u0 u1 u2 u3,
    ``packed_map((8, h), [4, 4], 2)`` gives rank 1 the rows g2 g3 u2 u3. Raises ShardSizeError where the components do
    not add up to the dimension.
    """
    if sum(component_sizes) != shape[partition_dim]:
        raise ShardSizeError(f'components of sizes {list(component_sizes)} add up to {sum(component_sizes)}, but '
                             f'dimension {partition_dim} of shape {tuple(shape)} has {shape[partition_dim]}')
    bounds = [[chunk_bounds(size, tp_degree, rank) for rank in range(tp_degree)] for size in component_sizes]
    widths = [[stop - start for start, stop in parts] for parts in bounds]
    return sub_param_map(shape, component_sizes, widths, partition_dim)


def interleaved_map(shape: Sequence[int],
                    component_count: int,
                    tp_degree: int = 1,
                    partition_dim: int = 0) -> ParamAffineMap:
    """Equal components that the parameter packs one after another, and the shards index by index.

    Of rows g0 g1 u0 u1 a shard holds g0 u0 g1 u1, and rank r of ``tp_degree`` its chunk of the indices. Raises
    ShardSizeError where the dimension does not divide into ``component_count`` components.
    """
    component_size, rest = divmod(shape[partition_dim], component_count)
    if rest:
        raise ShardSizeError(f'dimension {partition_dim} of shape {tuple(shape)} does not divide into '
                             f'{component_count} equal components')
    packed = packed_map(shape, [component_size] * component_count, tp_degree, partition_dim)
    pieces_by_rank = {}
    for rank, pieces in packed.pieces_by_rank.items():
        step = row_major_strides(packed.shard_shapes[rank])[partition_dim]
        pieces_by_rank[rank] = []
        for component, piece in enumerate(pieces):
            strides = list(piece.dest_strides)
            strides[partition_dim] = step * component_count
            pieces_by_rank[rank].append(replace(piece, dest_offset=component * step, dest_strides=strides))
    return ParamAffineMap(packed.logical_shape, packed.shard_shapes, pieces_by_rank)


def padded_split_map(shape: Sequence[int], padded_size: int, tp_degree: int, partition_dim: int = 0) -> ParamAffineMap:
    """A dimension padded to ``padded_size`` at its end and split evenly, as vocabularies are.

    The map has the real indices alone: the shard of a rank is the leading part of its tensor, and the buffer for it
    is ``tensor.narrow(partition_dim, 0, shard_shape[partition_dim])``. A vocabulary of 10 padded to 12 on 4 ranks
    leaves rank 3 row 9; padded to 64 on 2 ranks, it leaves rank 1 none. Raises ShardSizeError where the padded size
    is smaller than the dimension, so that no real row is ever cropped, or does not divide by ``tp_degree``.
    """
    size = shape[partition_dim]
    if padded_size < size:
        raise ShardSizeError(f'dimension {partition_dim} of shape {tuple(shape)} has {size} indices, more than the '
                             f'padded size {padded_size}')
    if padded_size % tp_degree:
        raise ShardSizeError(f'the padded size {padded_size} does not divide by {tp_degree} ranks')
    part = padded_size // tp_degree
    real_sizes = [min(part, max(0, size - rank * part)) for rank in range(tp_degree)]
    return contiguous_split_map(shape, real_sizes, partition_dim)


def transposed_map(map_: ParamAffineMap) -> ParamAffineMap:
    """The same parts, each shard stored with its last two dimensions exchanged.

    Raises ShardSizeError for a shard of fewer dimensions, UnreadablePieceError for a piece that does not step through
    the dimensions of its shard.
    """
    shard_shapes, pieces_by_rank = {}, {}
    for rank, shape in map_.shard_shapes.items():
        if len(shape) < 2:
            raise ShardSizeError(f'rank {rank}: a shard of shape {shape} has no two dimensions to exchange')
        shard_shapes[rank] = shape[:-2] + (shape[-1], shape[-2])
        pieces_by_rank[rank] = [_transposed_piece(rank, piece, shape) for piece in map_.pieces_by_rank[rank]]
    return ParamAffineMap(map_.logical_shape, shard_shapes, pieces_by_rank, map_.rule)


def _transposed_piece(rank: int, piece: AffinePiece, shard_shape: Sequence[int]) -> AffinePiece:
    strides = row_major_strides((*shard_shape[:-2], shard_shape[-1], shard_shape[-2]))
    strides = (*strides[:-2], strides[-1], strides[-2])
    # Addresses are linear in the coordinates of the shard as long as no step carries from one into the next.
    start, *steps = coordinates(np.array([piece.dest_offset, *piece.dest_strides], dtype=np.int64), shard_shape)
    last = start + sum((size - 1) * step for size, step in zip(piece.shape, steps))
    if piece.numel and np.any(last >= shard_shape):
        raise UnreadablePieceError(f'rank {rank}: {piece} does not step through the dimensions of its shard of shape '
                                   f'{tuple(shard_shape)}')
    return replace(piece, dest_offset=int(start @ strides), dest_strides=[int(step @ strides) for step in steps])


def column_block_map(shape: Sequence[int], block_size: int) -> ParamAffineMap:
    """One location, 0, that stores blocks of ``block_size`` columns one after another, as matrix kernels want them.

    For shape (..., rows, columns) the shard has shape (..., columns / block_size, rows, block_size). Raises
    ShardSizeError where the columns do not divide into blocks.
    """
    *outer, rows, columns = shape
    if columns % block_size:
        raise ShardSizeError(f'{columns} columns do not divide into blocks of {block_size}')
    shard_shape = (*outer, columns // block_size, rows, block_size)
    source_strides, shard_strides = row_major_strides(shape), row_major_strides(shard_shape)
    block_step, dest_strides = shard_strides[-3], shard_strides[:-3] + shard_strides[-2:]
    pieces: List[AffinePiece] = [
        AffinePiece((*outer, rows, block_size), block * block_size, source_strides, block * block_step, dest_strides,
                    [0]) for block in range(columns // block_size)
    ]
    return ParamAffineMap(shape, {0: shard_shape}, {0: pieces})
