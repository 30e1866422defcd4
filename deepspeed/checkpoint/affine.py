# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Affine maps: which shard holds which elements of a parameter, and where.

A map knows shapes, offsets and strides in elements. It knows nothing of processes, devices or dtypes: a *location*
is a number that the map's user binds to whatever holds the bytes. For a (4, 6) parameter whose first four columns are
on one rank and last two on the next,

    >>> contiguous_split_map((4, 6), [4, 2], partition_dim=1).pieces_by_rank[1]
    [AffinePiece(shape=(4, 2), source_offset=4, source_strides=(6, 1), dest_offset=0, dest_strides=(2, 1), ...)]

says that the shard of rank 1 is element 4, 5, 10, 11, 16, ... of the flattened parameter.
"""

import math
from typing import Dict, FrozenSet, Iterator, List, Mapping, NamedTuple, Sequence, Tuple

from .affine_boxes import flat_range_boxes, row_major_strides
from .affine_map import AFFINE_MAP_FORMAT_VERSION, SCALE_POWER_BY_STATE, AffinePiece, ParamAffineMap
from .affine_nesting import nest_affine_maps
from .affine_pieces import (AffineMapError, CoverageError, HolderError, OutOfBoundsError, OverlapError, RankIdError,
                            ShardSizeError, UnreadablePieceError)

__all__ = [
    'AFFINE_MAP_FORMAT_VERSION', 'SCALE_POWER_BY_STATE', 'AffineMapError', 'AffinePiece', 'CoverageError',
    'HolderError', 'OutOfBoundsError', 'OverlapError', 'ParamAffineMap', 'RankIdError', 'ShardSizeError',
    'UnreadablePieceError', 'block_gather_map', 'contiguous_split_map', 'flat_range_map', 'nest_affine_maps',
    'replicated_map', 'segmented_map', 'sub_param_map'
]


class _Interval(NamedTuple):
    """Elements [start, start + size) of the partitioned dimension, and the ranks that hold them."""
    start: int
    size: int
    locations: Sequence[int]


def _partitioned_map(shape: Sequence[int], partition_dim: int,
                     intervals_by_rank: Mapping[int, Sequence[_Interval]]) -> ParamAffineMap:
    """Each rank's shard is its intervals of ``partition_dim``, one after another."""
    shape = tuple(shape)
    source_strides = row_major_strides(shape)

    def with_size(size):
        sizes = list(shape)
        sizes[partition_dim] = size
        return tuple(sizes)

    shard_shapes, pieces_by_rank = {}, {}
    for rank, intervals in intervals_by_rank.items():
        shard_shapes[rank] = with_size(sum(interval.size for interval in intervals))
        dest_strides = row_major_strides(shard_shapes[rank])
        pieces, filled = [], 0
        for start, size, locations in intervals:
            pieces.append(
                AffinePiece(with_size(size), start * source_strides[partition_dim], source_strides,
                            filled * dest_strides[partition_dim], dest_strides, locations))
            filled += size
        pieces_by_rank[rank] = pieces
    return ParamAffineMap(shape, shard_shapes, pieces_by_rank)


def replicated_map(shape: Sequence[int], tp_degree: int, scale: float = 1.0) -> ParamAffineMap:
    """Ranks 0..tp_degree-1 each hold the whole parameter, times ``scale``.

    ``replicated_map((3, ), 2)``: both ranks hold [0, 1, 2]. A row-parallel bias is replicated with scale 1/tp_degree.
    """
    shape = tuple(shape)
    strides = row_major_strides(shape)
    piece = AffinePiece(shape, 0, strides, 0, strides, range(tp_degree), scale)
    return ParamAffineMap(shape, {rank: shape
                                  for rank in range(tp_degree)}, {rank: [piece]
                                                                  for rank in range(tp_degree)})


def contiguous_split_map(shape: Sequence[int], per_rank_sizes: Sequence[int], partition_dim: int) -> ParamAffineMap:
    """Rank r holds the next ``per_rank_sizes[r]`` indices of ``partition_dim``; sizes may differ and may be 0.

    ``contiguous_split_map((5, ), [3, 2], 0)``: rank 0 holds [0, 1, 2], rank 1 holds [3, 4].
    """
    intervals, start = {}, 0
    for rank, size in enumerate(per_rank_sizes):
        intervals[rank] = [_Interval(start, size, [rank])]
        start += size
    return _partitioned_map(shape, partition_dim, intervals)


def sub_param_map(shape: Sequence[int], sub_dim_sizes: Sequence[int], shard_widths: Sequence[Sequence[int]],
                  partition_dim: int) -> ParamAffineMap:
    """Sub-parameters concatenated along ``partition_dim`` (fused Q, K, V), each split over the ranks on its own.

    ``sub_dim_sizes[i]`` is the size of sub-parameter i and ``shard_widths[i][r]`` what rank r holds of it; a row of
    them adds up to its size (else ShardSizeError).
    ``sub_param_map((6, ), [4, 2], [[2, 2], [1, 1]], 0)``: rank 0 holds [0, 1, 4], rank 1 holds [2, 3, 5].
    """
    if len(shard_widths) != len(sub_dim_sizes):
        raise ShardSizeError(f'{len(sub_dim_sizes)} sub-parameters, but widths of {len(shard_widths)}')
    intervals = {rank: [] for rank in range(len(shard_widths[0]))}
    sub_start = 0
    for index, (size, widths) in enumerate(zip(sub_dim_sizes, shard_widths)):
        _check_widths(f'sub-parameter {index}', size, widths, len(intervals))
        start = sub_start
        for rank, held in intervals.items():
            held.append(_Interval(start, widths[rank], [rank]))
            start += widths[rank]
        sub_start += size
    return _partitioned_map(shape, partition_dim, intervals)


def segmented_map(shape: Sequence[int], segments: Sequence[Tuple[int, bool]], partition_dim: int, tp_degree: int,
                  split_widths: Sequence[Sequence[int]]) -> ParamAffineMap:
    """Segments along ``partition_dim``, each either split over the ranks or held whole by all of them.

    ``segments`` are (size, replicated) pairs, ``split_widths`` the per-rank sizes of each split one in order; they
    must add up to it (ShardSizeError). ``segmented_map((6, ), [(4, False), (2, True)], 0, 2, [[1, 3]])``: rank 0
    holds [0, 4, 5], rank 1 holds [1, 2, 3, 4, 5].
    """
    everyone = range(tp_degree)
    intervals = {rank: [] for rank in everyone}
    remaining_widths = iter(split_widths)
    segment_start = 0
    for index, (size, replicated) in enumerate(segments):
        start, widths = segment_start, ()
        if not replicated:
            widths = list(next(remaining_widths, ()))
            _check_widths(f'segment {index}', size, widths, tp_degree)
        for rank in everyone:
            if replicated:
                intervals[rank].append(_Interval(start, size, everyone))
            else:
                intervals[rank].append(_Interval(start, widths[rank], [rank]))
                start += widths[rank]
        segment_start += size
    return _partitioned_map(shape, partition_dim, intervals)


def _check_widths(what: str, size: int, widths: Sequence[int], tp_degree: int) -> None:
    if len(widths) != tp_degree or sum(widths) != size:
        raise ShardSizeError(f'{what} has {size} elements to split over {tp_degree} ranks, but its widths are '
                             f'{list(widths)}')


def block_gather_map(shape: Sequence[int], block_ids_by_rank: Mapping[int, Sequence[int]], block_size: int,
                     partition_dim: int) -> ParamAffineMap:
    """Each rank holds the listed blocks of ``block_size`` indices of ``partition_dim``, in the listed order.

    ``block_gather_map((8, ), {0: [0, 2], 1: [3, 1]}, 2, 0)``: rank 0 holds [0, 1, 4, 5], rank 1 holds [6, 7, 2, 3].
    """
    intervals = {}
    for rank, block_ids in block_ids_by_rank.items():
        held: List[_Interval] = []
        for block in block_ids:
            if held and held[-1].start + held[-1].size == block * block_size:
                held[-1] = held[-1]._replace(size=held[-1].size + block_size)
            else:
                held.append(_Interval(block * block_size, block_size, [rank]))
        intervals[rank] = held
    return _partitioned_map(shape, partition_dim, intervals)


def flat_range_map(shape: Sequence[int], ranges: Mapping[int, Tuple[int, int]]) -> ParamAffineMap:
    """Each location holds elements [start, start + numel) of the flattened parameter, in a 1-D shard.

    ``ranges`` is location -> (start, numel). The pieces are boxes of the parameter's full rank, at most
    2 * (ndim - 1) + 1 per location. ``flat_range_map((2, 3), {7: (0, 4), 9: (4, 2)})``: location 7 holds [0, 1, 2, 3],
    location 9 holds [4, 5]. Locations may hold the same elements where their ranges are equal; other overlaps are
    cut so that each piece has the same holders throughout. Raises OutOfBoundsError for a range outside the parameter.
    """
    shape = tuple(shape)
    total = math.prod(shape)
    for location, (start, numel) in ranges.items():
        if start < 0 or numel < 0 or (numel and start + numel > total):
            raise OutOfBoundsError(f'location {location}: elements [{start}, {start + numel}) are outside the '
                                   f'parameter of shape {shape} with {total} elements')
    strides = row_major_strides(shape)
    pieces_by_rank = {location: [] for location in ranges}
    for start, stop, locations in _common_ranges(ranges):
        for lower, extent in flat_range_boxes(shape, start, stop):
            offset = sum(first * stride for first, stride in zip(lower, strides))
            for location in locations:
                pieces_by_rank[location].append(
                    AffinePiece(extent, offset, strides, offset - ranges[location][0], strides, locations))
    return ParamAffineMap(shape, {location: (numel, ) for location, (_, numel) in ranges.items()}, pieces_by_rank)


def _common_ranges(ranges) -> Iterator[Tuple[int, int, FrozenSet[int]]]:
    """Cut ranges along one another: ascending (start, stop, locations that hold all of it)."""
    edges: Dict[int, List[int]] = {}
    for location, (start, numel) in ranges.items():
        if numel:
            edges.setdefault(start, []).append(location)
            edges.setdefault(start + numel, []).append(location)
    open_locations: set = set()
    cuts = sorted(edges)
    for start, stop in zip(cuts, cuts[1:]):
        open_locations ^= set(edges[start])
        if open_locations:
            yield start, stop, frozenset(open_locations)
