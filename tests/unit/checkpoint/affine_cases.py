# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Random layouts, and the label oracle: what each shard must hold, by the definition of a map alone."""

import math

import numpy as np
from hypothesis import strategies as st

from deepspeed.checkpoint.affine import (AffinePiece, ParamAffineMap, block_gather_map, contiguous_split_map,
                                         flat_range_map, nest_affine_maps, replicated_map, segmented_map,
                                         sub_param_map)

MAX_NUMEL = 400
HOLE = -1


def labels(shape):
    """Every element of a tensor of this shape labelled with its flat index."""
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)


def strided(flat, shape, offset, strides):
    """View of a 1-D int64 array, with offset and strides in elements."""
    return np.lib.stride_tricks.as_strided(flat[offset:], shape, [8 * stride for stride in strides])


def shard_labels(map_, rank):
    """The labels that the shard of ``rank`` holds, flattened; HOLE where no piece writes."""
    full = labels(map_.logical_shape).reshape(-1)
    shard = np.full(math.prod(map_.shard_shapes[rank]), HOLE, dtype=np.int64)
    for piece in map_.pieces_by_rank.get(rank, ()):
        if piece.numel:
            target = strided(shard, piece.shape, piece.dest_offset, piece.dest_strides)
            assert np.all(target == HOLE), f'{piece} writes elements of rank {rank} a second time'
            target[...] = strided(full, piece.shape, piece.source_offset, piece.source_strides)
    return shard


def true_holders(map_):
    """label -> ranks whose shard holds it, from the shards' labels."""
    holders = {}
    for rank in map_.shard_shapes:
        for label in shard_labels(map_, rank).tolist():
            holders.setdefault(label, set()).add(rank)
    return holders


def assert_sound(map_):
    """The map accepts itself, covers every element, and each piece names exactly the holders of its elements."""
    map_.validate_coverage()
    holders = true_holders(map_)
    assert sorted(holders) == list(range(map_.numel))
    for rank, pieces in map_.pieces_by_rank.items():
        for piece in pieces:
            if piece.numel:
                held = strided(labels((map_.numel, )), piece.shape, piece.source_offset, piece.source_strides)
                for label in held.reshape(-1).tolist():
                    assert holders[label] == piece.locations, (rank, piece, label)


def run_plan(plan, source_map, target_map):
    """Execute a plan on labelled shards; returns target rank -> flat labels, having checked single writes."""
    sources = {rank: shard_labels(source_map, rank) for rank in source_map.shard_shapes}
    targets = {
        rank: np.full(math.prod(shape), HOLE, dtype=np.int64)
        for rank, shape in target_map.shard_shapes.items()
    }
    for segment in plan.segments:
        source, target = sources[segment.source_rank], targets[segment.target_rank]
        _assert_inside(source, segment.shape, segment.source_offset, segment.source_strides)
        _assert_inside(target, segment.shape, segment.target_offset, segment.target_strides)
        view = strided(target, segment.shape, segment.target_offset, segment.target_strides)
        assert np.all(view == HOLE), f'{segment} writes elements a second time'
        view[...] = strided(source, segment.shape, segment.source_offset, segment.source_strides)
    return targets


def _assert_inside(shard, shape, offset, strides):
    assert math.prod(shape) > 0
    assert 0 <= offset and offset + sum((size - 1) * stride for size, stride in zip(shape, strides)) < len(shard)


shapes = st.lists(st.integers(0, 6), max_size=5).map(tuple).filter(lambda shape: math.prod(shape) <= MAX_NUMEL)
split_shapes = shapes.filter(lambda shape: len(shape) > 0)


@st.composite
def partitions(draw, total, parts):
    """``total`` cut into ``parts`` sizes, some of them possibly 0."""
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=parts - 1, max_size=parts - 1)))
    return [stop - start for start, stop in zip([0] + cuts, cuts + [total])]


@st.composite
def split_maps(draw, shape):
    """A tensor-parallel layout of a parameter of one dimension or more."""
    kind = draw(st.sampled_from(['contiguous', 'sub_param', 'segmented', 'block_gather']))
    dim, degree = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))
    size = shape[dim]
    if kind == 'contiguous':
        return contiguous_split_map(shape, draw(partitions(size, degree)), dim)
    if kind == 'block_gather':
        block = draw(st.sampled_from([width for width in range(1, size + 1) if size % width == 0] or [1]))
        order = draw(st.permutations(range(size // block)))
        counts = draw(partitions(size // block, degree))
        starts = np.cumsum([0] + counts)
        ids = {rank: order[starts[rank]:starts[rank + 1]] for rank in range(degree)}
        return block_gather_map(shape, ids, block, dim)
    sub_sizes = draw(partitions(size, draw(st.integers(1, 3))))
    widths = [draw(partitions(sub_size, degree)) for sub_size in sub_sizes]
    if kind == 'sub_param':
        return sub_param_map(shape, sub_sizes, widths, dim)
    replicated = [draw(st.booleans()) for _ in sub_sizes]
    return segmented_map(shape, list(zip(sub_sizes, replicated)), dim, degree,
                         [width for width, whole in zip(widths, replicated) if not whole])


@st.composite
def outer_maps(draw, shape):
    if not shape or draw(st.integers(0, 4)) == 0:
        return replicated_map(shape, draw(st.integers(1, 4)))
    return draw(split_maps(shape))


@st.composite
def zero_ranges(draw, numel, first_location=0):
    """Flat ranges as ZeRO makes them: equal with a short tail, or any cut; locations in any order, some empty."""
    world = draw(st.integers(1, 5))
    locations = draw(st.permutations(range(first_location, first_location + world)))
    if draw(st.booleans()):
        part = -(-numel // world)
        sizes = [max(0, min(part, numel - index * part)) for index in range(world)]
    else:
        sizes = draw(partitions(numel, world))
    starts = np.cumsum([0] + sizes).tolist()
    return {location: (start, size) for location, start, size in zip(locations, starts, sizes)}


@st.composite
def nested_parts(draw, shape):
    """An outer map and the ZeRO map of each of its shards, in the shard's shape or flattened."""
    kind = draw(st.sampled_from(['outer', 'outer', 'zero', 'transposed']))
    if kind == 'zero':
        outer = flat_range_map(shape, draw(zero_ranges(math.prod(shape))))
    else:
        outer = draw(outer_maps(shape) if kind == 'outer' else transposed_maps(shape))
    inner, first_location = {}, 0
    for rank, shard_shape in sorted(outer.shard_shapes.items()):
        numel = math.prod(shard_shape)
        ranges = draw(zero_ranges(numel, first_location))
        inner[rank] = flat_range_map(draw(st.sampled_from([shard_shape, (numel, )])), ranges)
        first_location += len(ranges)
    return outer, inner


@st.composite
def transposed_maps(draw, shape):
    """A split layout whose shards are stored with their dimensions reversed."""
    straight = draw(outer_maps(shape))
    pieces_by_rank, shard_shapes = {}, {}
    for rank, shard_shape in straight.shard_shapes.items():
        # Element (i, j) of the shard sits where element (j, i) of a row-major tensor of the reversed shape does.
        steps = [math.prod(shard_shape[:dim]) for dim in range(len(shard_shape))]
        shard_shapes[rank] = shard_shape[::-1]
        pieces_by_rank[rank] = []
        for piece in straight.pieces_by_rank[rank]:
            corner, rest = [], piece.dest_offset
            for dim in range(len(shard_shape)):
                inner = math.prod(shard_shape[dim + 1:])
                corner.append(rest // inner if inner else 0)
                rest = rest % inner if inner else 0
            pieces_by_rank[rank].append(
                AffinePiece(piece.shape, piece.source_offset, piece.source_strides,
                            sum(first * step for first, step in zip(corner, steps)), steps, piece.locations))
    return ParamAffineMap(straight.logical_shape, shard_shapes, pieces_by_rank)


@st.composite
def permuted_maps(draw, shape):
    """A layout whose pieces list the dimensions of the parameter in another order."""
    straight = draw(outer_maps(shape))
    order = draw(st.permutations(range(len(shape))))

    def permuted(piece):
        shape, source, dest = ([row[dim] for dim in order]
                               for row in (piece.shape, piece.source_strides, piece.dest_strides))
        return AffinePiece(shape, piece.source_offset, source, piece.dest_offset, dest, piece.locations)

    pieces = {rank: [permuted(piece) for piece in held] for rank, held in straight.pieces_by_rank.items()}
    return ParamAffineMap(straight.logical_shape, straight.shard_shapes, pieces)


@st.composite
def any_maps(draw, shape):
    kind = draw(st.sampled_from(['outer', 'zero', 'nested', 'transposed', 'permuted']))
    if kind == 'permuted':
        return draw(permuted_maps(shape))
    if kind == 'outer':
        return draw(outer_maps(shape))
    if kind == 'zero':
        return flat_range_map(shape, draw(zero_ranges(math.prod(shape))))
    if kind == 'transposed':
        return draw(transposed_maps(shape))
    return nest_affine_maps(*draw(nested_parts(shape)))
