# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How trainers and rollout workers lay out parameters, as affine maps.

Parameters of a model that are laid out alike share one map, as in an engine's own ``optimizer_storage_maps()``.
"""

import math
from dataclasses import replace
from typing import Dict, List, Mapping, Sequence, Tuple

from deepspeed.checkpoint.affine import (ParamAffineMap, contiguous_split_map, flat_range_map, nest_affine_maps,
                                         replicated_map, sub_param_map)

Shape = Tuple[int, ...]

# The dimension along which tensor parallelism splits a parameter, by the name of its layer; others are replicated.
SPLIT_DIM_BY_LAYER = {
    'embed_tokens': 0,
    'lm_head': 0,
    'q_proj': 0,
    'k_proj': 0,
    'v_proj': 0,
    'o_proj': 1,
    'gate_proj': 0,
    'up_proj': 0,
    'down_proj': 1,
    # Latent attention of DeepSeek-V3: what projects down to the latent is replicated.
    'q_b_proj': 0,
    'kv_b_proj': 0,
}


def split_sizes(size: int, parts: int) -> List[int]:
    """``size`` in ``parts`` equal sizes, the remainder one each to the first: (7, 3) gives [3, 2, 2]."""
    return [size // parts + (part < size % parts) for part in range(parts)]


def zero_map(shape: Shape, locations: Sequence[int]) -> ParamAffineMap:
    """One parameter under ZeRO-3: equal ranges of the flattened parameter, the last ones shorter or absent."""
    numel = math.prod(shape)
    partition_numel = -(-numel // len(locations))
    starts = range(0, numel, partition_numel)
    return flat_range_map(shape, {
        location: (start, min(partition_numel, numel - start))
        for location, start in zip(locations, starts)
    })


def zero_in_tensor_parallel_map(shape: Shape, tensor_parallel: int, ranks: int) -> ParamAffineMap:
    """Columns split over tensor parallel ranks, each shard under ZeRO-3 over its share of ``ranks``."""
    outer = contiguous_split_map(shape, split_sizes(shape[1], tensor_parallel), 1)
    return nest_affine_maps(
        outer, {
            shard: zero_map(shard_shape, range(shard, ranks, tensor_parallel))
            for shard, shard_shape in outer.shard_shapes.items()
        })


def placed(map_: ParamAffineMap, locations_by_rank: Mapping[int, Sequence[int]]) -> ParamAffineMap:
    """``map_`` with the shard of each rank held by all of ``locations_by_rank[rank]`` in its stead."""
    shard_shapes, pieces_by_rank = {}, {}
    for rank, locations in locations_by_rank.items():
        held = [
            replace(piece,
                    locations=[location for holder in piece.locations for location in locations_by_rank[holder]])
            for piece in map_.pieces_by_rank[rank]
        ]
        for location in locations:
            shard_shapes[location] = map_.shard_shapes[rank]
            pieces_by_rank[location] = held
    return ParamAffineMap(map_.logical_shape, shard_shapes, pieces_by_rank)


def rollout_map(name: str, shape: Shape, tensor_parallel: int, groups: int, expert_parallel: bool) -> ParamAffineMap:
    """One parameter over ``groups * tensor_parallel`` inference ranks, a group's ranks numbered one after another.

    Every group holds the whole parameter, split over its ranks. With ``expert_parallel`` the groups share out the
    experts instead, and each splits every one of its experts over its ranks.
    """
    is_expert = '.experts.' in name
    if is_expert and expert_parallel:
        outer = contiguous_split_map(shape, split_sizes(shape[0], groups), 0)
        return nest_affine_maps(
            outer, {
                group:
                placed(_tensor_parallel_map(name, shard_shape, tensor_parallel),
                       {rank: [group * tensor_parallel + rank]
                        for rank in range(tensor_parallel)})
                for group, shard_shape in outer.shard_shapes.items()
            })
    ranks = range(groups * tensor_parallel)
    return placed(_tensor_parallel_map(name, shape, tensor_parallel),
                  {rank: ranks[rank::tensor_parallel]
                   for rank in range(tensor_parallel)})


def _tensor_parallel_map(name: str, shape: Shape, tensor_parallel: int) -> ParamAffineMap:
    if name.endswith('.experts.gate_up_proj'):
        # (experts, gate rows then up rows, hidden): a rank has its part of both.
        halves = [shape[1] // 2] * 2
        return sub_param_map(shape, halves, [split_sizes(half, tensor_parallel) for half in halves], 1)
    if name.endswith('.experts.down_proj'):
        return contiguous_split_map(shape, split_sizes(shape[2], tensor_parallel), 2)
    split_dim = SPLIT_DIM_BY_LAYER.get(name.split('.')[-2])
    if split_dim is None:
        return replicated_map(shape, tensor_parallel)
    return contiguous_split_map(shape, split_sizes(shape[split_dim], tensor_parallel), split_dim)


def zero_maps(shapes: Mapping[str, Shape], ranks: int) -> Dict[str, ParamAffineMap]:
    """Every parameter of a model under ZeRO-3."""
    map_by_shape = {shape: zero_map(shape, range(ranks)) for shape in set(shapes.values())}
    return {name: map_by_shape[shape] for name, shape in shapes.items()}


def replicated_maps(shapes: Mapping[str, Shape], ranks: int) -> Dict[str, ParamAffineMap]:
    """Every parameter of a model held whole by every rank, as ZeRO-1 keeps the low-precision weights."""
    map_by_shape = {shape: replicated_map(shape, ranks) for shape in set(shapes.values())}
    return {name: map_by_shape[shape] for name, shape in shapes.items()}


def rollout_maps(shapes: Mapping[str, Shape],
                 tensor_parallel: int,
                 groups: int,
                 expert_parallel: bool = False) -> Dict[str, ParamAffineMap]:
    """Every parameter of a model over inference ranks, see ``rollout_map``."""
    map_by_kind: Dict[Tuple, ParamAffineMap] = {}
    maps = {}
    for name, shape in shapes.items():
        # The last two parts of the name come after the layer's number and tell what the parameter is for.
        kind = (*name.split('.')[-2:], shape)
        if kind not in map_by_kind:
            map_by_kind[kind] = rollout_map(name, shape, tensor_parallel, groups, expert_parallel)
        maps[name] = map_by_kind[kind]
    return maps
