# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A map nested in another: the shards of the outer one, ZeRO partitions of them, become one map of the parameter."""

import math
from typing import Dict, List, Mapping, NamedTuple, Tuple

import numpy as np

from .affine_boxes import BoxJoin, BoxSet, disjoint_cells, flat_range_boxes, grid_shape, row_major_strides
from .affine_map import AffinePiece, ParamAffineMap
from .affine_pieces import (PieceTable, RankIdError, ShardSizeError, UnreadablePieceError, check_ranks, piece_columns,
                            piece_table)

__all__ = ['nest_affine_maps']

Shape = Tuple[int, ...]


def nest_affine_maps(outer: ParamAffineMap, inner_by_rank: Mapping[int, ParamAffineMap]) -> ParamAffineMap:
    """Map the full parameter straight to the storage that holds its shards.

    ``outer`` maps the parameter to shards (tensor parallelism); ``inner_by_rank[r]`` maps outer shard r, as its shape
    or flattened, to storage locations (ZeRO partitions). The result has the parameter's logical shape and the inner
    maps' locations and shard shapes; a piece's ``locations`` are all storage locations that hold its elements, over
    all replicas of the outer piece. For ``outer = contiguous_split_map((2, 2), [1, 1], 1)`` and inner
    ``{0: flat_range_map((2, ), {0: (0, 1), 1: (1, 1)}), 1: flat_range_map((2, ), {2: (0, 1), 3: (1, 1)})}``, locations
    0, 1, 2, 3 hold elements 0, 2, 1, 3.

    Raises RankIdError for missing or extra inner ranks and for a location used under two outer ranks, ShardSizeError
    for an inner map of another size than the outer shard, UnreadablePieceError where an outer piece steps through its
    shard by strides that do not nest, or an inner one is neither a box nor a range of the shard.
    """
    check_ranks(outer.shard_shapes, outer.pieces_by_rank)
    if outer.shard_shapes.keys() != inner_by_rank.keys():
        raise RankIdError(f'the outer map has ranks {sorted(outer.shard_shapes)}, but inner maps were given for '
                          f'{sorted(inner_by_rank)}')
    shard_shapes, parts = {}, []
    for rank, shape in sorted(outer.shard_shapes.items()):
        inner = inner_by_rank[rank]
        if inner.logical_shape not in (shape, (math.prod(shape), )) and grid_shape(inner.logical_shape) != shape:
            raise ShardSizeError(f'outer rank {rank}: its shard has shape {shape}, but the inner map describes shape '
                                 f'{inner.logical_shape}')
        for location in inner.shard_shapes.keys() & shard_shapes.keys():
            raise RankIdError(f'outer rank {rank}: location {location} already stores the shard of another outer rank')
        shard_shapes.update(inner.shard_shapes)
        parts.append(_composed(outer, rank, inner))
    return ParamAffineMap(outer.logical_shape,
                          shard_shapes,
                          _pieces_of_cells(_joined(parts, outer.logical_shape), outer.logical_shape, shard_shapes),
                          rule=outer.rule)


def _composed(outer: ParamAffineMap, rank: int, inner: ParamAffineMap) -> PieceTable:
    """The inner map's pieces of one outer shard, as pieces of the full parameter."""
    held = piece_table(piece_columns({rank: outer.pieces_by_rank[rank]}), outer.logical_shape)
    try:
        in_shard = held.shard_boxes(outer.shard_shapes[rank])
    except UnreadablePieceError:
        return _composed_by_address(rank, held, _address_ranges(rank, inner))
    inner = _in_shard_shape(rank, inner, outer.shard_shapes[rank])
    stored = piece_table(piece_columns(inner.pieces_by_rank), inner.logical_shape)
    i, j = BoxJoin(in_shard, stored.boxes).pairs()
    common = in_shard.take(i).intersection(stored.boxes.take(j))
    lower = held.boxes.lower[i] + common.lower - in_shard.lower[i]
    return PieceTable(rank=stored.rank[j],
                      boxes=BoxSet(lower, lower + common.extent),
                      address=stored.address_of(j, common.lower),
                      strides=stored.strides[j],
                      scale=held.scale[i] * stored.scale[j],
                      locations=[stored.locations[index] for index in j.tolist()])


class _AddressRange(NamedTuple):
    """Elements [start, stop) of a flattened shard, stored ``step`` apart from ``address`` on at one location."""
    start: int
    stop: int
    address: int
    step: int
    location: int
    piece: AffinePiece


def _address_ranges(rank: int, inner: ParamAffineMap) -> List[_AddressRange]:
    """The inner map's pieces as ranges of the flattened shard; UnreadablePieceError where one is none."""
    ranges = []
    for location, pieces in sorted(inner.pieces_by_rank.items()):
        for piece in pieces:
            if not piece.numel:
                continue
            step = piece.dest_strides[-1] if piece.shape else 1
            along = [stride * step for stride in row_major_strides(piece.shape)]
            for size, stride, dest, row_major in zip(piece.shape, piece.source_strides, piece.dest_strides, along):
                if size > 1 and (stride * step != row_major or dest != row_major):
                    raise UnreadablePieceError(f'outer rank {rank}, location {location}: {piece} is not a contiguous '
                                               'range of the flattened shard')
            start = piece.source_offset
            ranges.append(_AddressRange(start, start + piece.numel, piece.dest_offset, step, location, piece))
    return ranges


def _in_shard_shape(rank: int, inner: ParamAffineMap, shard_shape: Shape) -> ParamAffineMap:
    """``inner`` as a map of the shard's own shape, where it is a map of the flattened shard."""
    if len(inner.logical_shape) == len(shard_shape):
        return inner
    strides = row_major_strides(shard_shape)
    pieces_by_rank = {location: [] for location in inner.shard_shapes}
    for start, stop, address, step, location, piece in _address_ranges(rank, inner):
        for lower, extent in flat_range_boxes(shard_shape, start, stop):
            offset = sum(first * stride for first, stride in zip(lower, strides))
            pieces_by_rank[location].append(
                AffinePiece(extent, offset, strides, address + (offset - start) * step,
                            [stride * step for stride in strides], piece.locations, piece.scale))
    return ParamAffineMap(shard_shape, inner.shard_shapes, pieces_by_rank)


def _composed_by_address(rank: int, held: PieceTable, ranges: List[_AddressRange]) -> PieceTable:
    """As ``_composed``, for outer pieces that are no boxes of their shard: ranges of the flat parameter, transposes.

    The addresses of such a piece are cut into rows by its own strides, each of which must step over whatever the
    smaller ones reach.
    """
    rows = []
    for row in range(len(held.rank)):
        extent, strides = held.boxes.extent[row].tolist(), held.strides[row].tolist()
        order = sorted((dim for dim, size in enumerate(extent) if size > 1), key=lambda dim: -strides[dim])
        steps = [strides[dim] for dim in order] + [1]
        grid = [outer // inner for outer, inner in zip(steps, steps[1:])]
        if any(outer % inner for outer, inner in zip(steps, steps[1:])) or any(extent[dim] > size
                                                                               for dim, size in zip(order[1:], grid)):
            raise UnreadablePieceError(f'outer {held.describe(row)}: its strides {strides} do not nest')
        # A virtual tensor whose row-major addresses are those of the piece, counted from its first element.
        shape = ([extent[order[0]]] if order else []) + grid
        rows += _cut_by_ranges(held, row, order, shape, ranges)

    def as_array(values, *shape):
        return np.array(values, dtype=np.int64).reshape(len(rows), *shape)

    ndim = held.boxes.lower.shape[1]
    lower = as_array([entry[0] for entry in rows], ndim)
    return PieceTable(rank=as_array([entry[4].location for entry in rows]),
                      boxes=BoxSet(lower, lower + as_array([entry[1] for entry in rows], ndim)),
                      address=as_array([entry[2] for entry in rows]),
                      strides=as_array([entry[3] for entry in rows], ndim),
                      scale=np.array([entry[5] for entry in rows]),
                      locations=[entry[4].piece.locations for entry in rows])


def _cut_by_ranges(held: PieceTable, row: int, order: List[int], shape: List[int], ranges: List[_AddressRange]):
    first = int(held.address[row])
    strides = held.strides[row].tolist()
    for entry in ranges:
        start, stop = max(entry.start - first, 0), min(entry.stop - first, math.prod(shape))
        for corner, sizes in flat_range_boxes(shape, start, stop):
            lower, extent = held.boxes.lower[row].tolist(), [1] * len(strides)
            for dim, begin, size in zip(order, corner, sizes):
                extent[dim] = min(size, int(held.boxes.extent[row, dim]) - begin)
                lower[dim] += begin
            # The last dimension of the virtual tensor lies between elements where the piece's smallest step is not 1.
            if min(extent) <= 0 or corner[len(order):] != (0, ) * (len(corner) - len(order)):
                continue
            address = first + sum(
                (low - int(origin)) * stride for low, origin, stride in zip(lower, held.boxes.lower[row], strides))
            yield (lower, extent, entry.address + (address - entry.start) * entry.step,
                   [stride * entry.step for stride in strides], entry, float(held.scale[row]) * entry.piece.scale)


def _joined(parts: List[PieceTable], logical_shape: Shape) -> PieceTable:
    parts = parts or [piece_table(piece_columns({}), logical_shape)]
    return PieceTable(rank=np.concatenate([part.rank for part in parts]),
                      boxes=BoxSet(*(np.concatenate(corner) for corner in zip(*(part.boxes for part in parts)))),
                      address=np.concatenate([part.address for part in parts]),
                      strides=np.concatenate([part.strides for part in parts]),
                      scale=np.concatenate([part.scale for part in parts]),
                      locations=[held for part in parts for held in part.locations])


def _pieces_of_cells(table: PieceTable, logical_shape: Shape, shard_shapes) -> Dict[int, List[AffinePiece]]:
    """The table's pieces, cut so that each has the same holders throughout, in the order of their shard addresses."""
    ndim = len(logical_shape)
    source_strides = row_major_strides(logical_shape)
    cells, cell_index, row_index = disjoint_cells(table.boxes)
    extent = cells.extent[:, :ndim].tolist()
    source_offset = (cells.lower[:, :ndim] @ np.array(source_strides, dtype=np.int64)).tolist()
    address = table.address_of(row_index, cells.lower[cell_index]).tolist()
    dest_strides = table.strides[row_index][:, :ndim].tolist()
    scale = table.scale[row_index].tolist()
    locations = table.holders_by_cell(cell_index, row_index, len(extent))
    pieces_by_rank = {location: [] for location in shard_shapes}
    for entry, (cell, location) in enumerate(zip(cell_index.tolist(), table.rank[row_index].tolist())):
        pieces_by_rank[location].append(
            AffinePiece(extent[cell], source_offset[cell], source_strides, address[entry], dest_strides[entry],
                        locations[cell], scale[entry]))
    for pieces in pieces_by_rank.values():
        pieces.sort(key=lambda piece: (piece.dest_offset, piece.source_offset))
    return pieces_by_rank
