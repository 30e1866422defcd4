# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Parameters that not all ranks of the world share: experts, and shards of tensor parallelism.

ZeRO partitions a parameter over a data parallel group and knows no other. Beside this rank, in its tensor parallel or
expert parallel group, stand ranks of other data parallel groups that hold another shard of the same parameter, or
another expert in the same place. What they hold is derived here from what this rank has; nobody is asked. Device
meshes are regular: the data parallel group of another rank is that of this rank, moved by the distance between the
two. The shapes of all shards are those of the map that the sharding layer publishes. Whether that is true of them is
known once all ranks have derived the same.
"""

import math
from dataclasses import replace
from functools import lru_cache
from itertools import chain, product
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

import deepspeed.comm as dist
from deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap
from deepspeed.runtime.zero.zero_affine_support import UnsupportedEngineError
from deepspeed.runtime.zero.zero_affine_upstream import read
from deepspeed.runtime.zero.zero_affine_upstream_parallel import (LocalExpert, PublishedSplit, expert_parallel_ranks,
                                                                  is_moe_param, local_experts, published_split,
                                                                  shape_of, sharded_layers, tensor_parallel_ranks)

__all__ = ['Counterparts', 'counterparts_of']

Shape = Tuple[int, ...]
Ranks = Tuple[int, ...]


class Counterparts(NamedTuple):
    """A parameter of this rank, and those in its place on the ranks ``across``, this rank among them.

    Counterpart ``i``, on global rank ``across[i]``, has the key ``keys[i]`` and the shape ``shapes[i]``. Equal keys
    are one parameter: ``outer`` maps the whole to the counterparts as its shards, by ``i``, or is None where each is
    a copy. Different keys are different experts. ``place`` orders parameters, ``(place, i)`` experts: it is the place
    of their whole list.
    """
    name: str
    parameter: torch.nn.Parameter
    place: int
    across: Ranks
    keys: Tuple[str, ...]
    shapes: Tuple[Shape, ...]
    outer: Optional[ParamAffineMap]

    @property
    def own(self) -> int:
        """The index of this rank's counterpart."""
        return self.across.index(dist.get_rank())

    def data_parallel_groups(self, ranks: Ranks) -> Tuple[Ranks, ...]:
        """The ranks that share each counterpart, where ``ranks`` share this rank's: one group if that is the world.

        Ranks 1 and 3 across 0 and 1, seen by rank 1: (0, 2) and (1, 3). Raises RuntimeError where these groups are
        not a world of distinct ranks, and where the whole world shares what differs between ranks.
        """
        world_size = dist.get_world_size()
        if len(ranks) == world_size:
            if len(set(self.keys)) > 1 or (self.outer is not None and len(self.across) > 1):
                raise RuntimeError(f'parameter {self.name} differs between ranks {list(self.across)}, but ZeRO '
                                   'partitions it over all ranks; is an expert in a parameter group of other '
                                   'parameters? See deepspeed.moe.utils.split_params_into_different_moe_groups_'
                                   'for_optimizer')
            return (ranks, )
        groups = _moved_groups(ranks, self.across, dist.get_rank(), world_size)
        if groups is None:
            raise RuntimeError(f'parameter {self.name}: ranks {list(ranks)} partition it and ranks '
                               f'{list(self.across)} hold its counterparts, which does not add up to a world of '
                               f'{world_size} ranks')
        return groups


@lru_cache(maxsize=64)
def _moved_groups(ranks: Ranks, across: Ranks, here: int, world_size: int) -> Optional[Tuple[Ranks, ...]]:
    """``ranks`` moved from ``here`` to each of ``across``; None where that is not every rank of the world once."""
    groups = tuple(tuple(rank + beside - here for rank in ranks) for beside in across)
    return groups if sorted(chain.from_iterable(groups)) == list(range(world_size)) else None


def counterparts_of(engine: Any, named_parameters: Iterable[Tuple[str, torch.nn.Parameter]]) -> List[Counterparts]:
    """The counterparts of each parameter, in the order of its keys. Communicates nothing.

    Raises UnsupportedEngineError, on every rank alike, for a parameter whose split nobody describes, and for a
    trained one of which some rank has an empty shard.
    """
    has_experts = read(engine, 'has_moe_layers')
    beside = tensor_parallel_ranks() if engine.autotp_size() > 1 else (dist.get_rank(), )
    experts = local_experts(engine.module) if has_experts else {}
    layers = sharded_layers(engine.module) if engine.autotp_size() > 1 else {}
    place_by_experts: Dict[str, int] = {}
    found = []
    for place, (name, parameter) in enumerate(named_parameters):
        split, across = published_split(parameter, layers.get(id(parameter))), beside
        if has_experts and is_moe_param(parameter):
            across = expert_parallel_ranks(parameter)
            if split is None:
                expert = _expert_of(name, experts.get(id(parameter)))
                place = place_by_experts.setdefault(expert.experts, place)
                found.append(_experts(name, parameter, place, across, expert))
                continue
        found.append(_shards(name, parameter, place, across, split))
    return sorted(found, key=lambda counterparts: counterparts.place)


def _expert_of(name: str, expert: Optional[LocalExpert]) -> LocalExpert:
    if expert is None or not name.startswith(f'{expert.experts}.{expert.index}.'):
        raise UnsupportedEngineError(f'ZeRO storage is not available for the expert parameter {name}: it has a number '
                                     'in the whole job only below deepspeed_experts of one deepspeed.moe layer; use '
                                     'such a layer, and register its parameters nowhere else')
    return expert


def _experts(name: str, parameter: torch.nn.Parameter, place: int, across: Ranks, expert: LocalExpert) -> Counterparts:
    """Rank ``across[i]`` has the experts from ``i * count`` on, as DeepSpeed numbers them in its checkpoints."""
    below = name[len(f'{expert.experts}.{expert.index}'):]
    keys = tuple(f'{expert.experts}.{i * expert.count + expert.index}{below}' for i in range(len(across)))
    return Counterparts(name, parameter, place, across, keys, (shape_of(parameter), ) * len(across), None)


def _shards(name: str, parameter: torch.nn.Parameter, place: int, across: Ranks,
            split: Optional[PublishedSplit]) -> Counterparts:
    outer, shapes = None, (shape_of(parameter), ) * len(across)
    if split is not None:
        outer = _outer_map(name, split, len(across))
        shapes = tuple(outer.shard_shapes[i] for i in range(len(across)))
    empty = [across[i] for i, shape in enumerate(shapes) if 0 in shape]
    if parameter.requires_grad and 0 < len(empty) < len(across):
        # A rank that has no element of it does not know in which parameter group the others keep it.
        raise UnsupportedEngineError(
            f'ZeRO storage is not available for parameter {name}, of which ranks {empty} have no elements: split it '
            'over fewer ranks by tensor_parallel.autotp_size, an attention layer over no more than its key-value heads'
        )
    return Counterparts(name, parameter, place, across, (name, ) * len(across), shapes, outer)


def _outer_map(name: str, split: PublishedSplit, degree: int) -> ParamAffineMap:
    """The published map, of the parameter's own shape; raises UnsupportedEngineError where it is none."""
    if split.entry is None:
        raise UnsupportedEngineError(f'ZeRO storage is not available for parameter {name}, sharded by {split.layer}: '
                                     f'{split.reason or "it publishes no affine map"}; leave that layer out of '
                                     'tensor_parallel.partition_config, or train with data parallelism only')
    published = ParamAffineMap.from_dict(split.entry)
    leading = len(published.logical_shape) - len(split.shape)
    if _merged(published.logical_shape, leading) != split.shape or sorted(published.shard_shapes) != list(
            range(degree)):
        raise UnsupportedEngineError(f'ZeRO storage is not available for parameter {name} of shape {split.shape}: '
                                     f'{split.layer} publishes a map of shape {published.logical_shape} for ranks '
                                     f'{sorted(published.shard_shapes)} of {degree}; train with data parallelism only')
    return ParamAffineMap(
        split.shape, {i: _merged(shape, leading)
                      for i, shape in published.shard_shapes.items()},
        {i: [part for piece in pieces for part in _without_leading(piece, leading)]
         for i, pieces in published.pieces_by_rank.items()})  # yapf: disable


def _merged(shape: Shape, leading: int) -> Shape:
    """The shape with its first ``leading + 1`` dimensions as one: a view of a weight as the weight itself."""
    return (math.prod(shape[:leading + 1]), ) + shape[leading + 1:] if leading > 0 else shape


def _without_leading(piece: AffinePiece, leading: int) -> Iterator[AffinePiece]:
    """The piece cut along its first ``leading`` dimensions, which merging would turn into steps over what it holds."""
    for index in product(*map(range, piece.shape[:leading])):
        yield replace(piece,
                      shape=piece.shape[leading:],
                      source_offset=piece.source_offset + _dot(index, piece.source_strides),
                      source_strides=piece.source_strides[leading:],
                      dest_offset=piece.dest_offset + _dot(index, piece.dest_strides),
                      dest_strides=piece.dest_strides[leading:])


def _dot(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(position * stride for position, stride in zip(index, strides))
