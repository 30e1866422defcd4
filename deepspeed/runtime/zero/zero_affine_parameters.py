# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where the low-precision weights of an engine's model live, and how they are made to follow their masters.

Under stage 3 every parameter is cut into equal partitions, one per rank, which stay when it is gathered for a while;
under stages 1 and 2 every rank keeps it whole. Both hold for frozen parameters too, and the first for an engine
without optimizer. What experts and tensor parallelism spread over ranks is described as for the optimizer.
"""

import math
from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch

import deepspeed.comm as dist
from deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap
from deepspeed.checkpoint.affine_boxes import row_major_strides
from deepspeed.runtime.zero.zero_affine_agreement import DIGEST_BYTES, exchange, read_together
from deepspeed.runtime.zero.zero_affine_layout import Placement, Spread, digest_of, spreads_of
from deepspeed.runtime.zero.zero_affine_parallel import Counterparts, counterparts_of
from deepspeed.runtime.zero.zero_affine_upstream_parameters import (LpParameter, lp_parameters, lp_tensors,
                                                                    obstacle_to_update, update_lp_parameters)

__all__ = [
    'ParameterLayout', 'ParameterNotReadyError', 'read_parameters', 'read_parameters_together',
    'update_parameters_together', 'views_of_parameters'
]

# As long as a digest: ranks that ask for maps instead learn of it here, and not from a collective that breaks.
_UPDATING = b'update_lp_params'
_REFUSING = bytes(DIGEST_BYTES)


class ParameterNotReadyError(RuntimeError):
    """The storage of a parameter cannot be used as it is now; the text says what is missing or what to do first."""


class Copies(NamedTuple):
    """A parameter, or a shard of it, that each of ``ranks`` holds whole."""
    shape: Tuple[int, ...]
    ranks: Tuple[int, ...]

    def to_map(self) -> ParamAffineMap:
        strides = row_major_strides(self.shape)
        piece = AffinePiece(self.shape, 0, strides, 0, strides, self.ranks)
        return ParamAffineMap(self.shape, dict.fromkeys(self.ranks, self.shape),
                              {rank: [piece]
                               for rank in self.ranks})


class OwnPart(NamedTuple):
    """What this rank keeps of the parameter that its module calls ``name``: in which shape, and in which the view is.

    The view ends before the padding of a partition. It is empty and 1-D where ``view_shape`` is None, for an expert
    that this rank does not have.
    """
    name: str
    kept_shape: Tuple[int, ...]
    view_shape: Optional[Tuple[int, ...]]


class ParameterLayout(NamedTuple):
    """How the parameter of each key is spread, and which part of it this rank has."""
    spreads: Dict[str, Spread]
    own_parts: Dict[str, OwnPart]


def read_parameters(engine: Any) -> ParameterLayout:
    """The layout of all parameters, in the order of the keys. Communicates nothing.

    Raises UnsupportedEngineError, on every rank alike, for a parameter whose split nobody describes, and RuntimeError
    for one that is not partitioned or that differs from what is said of its shards.
    """
    counterparts = counterparts_of(engine, engine.module.named_parameters())
    parameters = lp_parameters(engine)
    placements_by_name = {beside.name: _placements(parameters[beside.name], beside) for beside in counterparts}
    spreads = spreads_of(counterparts, placements_by_name)
    own_parts = {}
    for beside in counterparts:
        own_part = _own_part(beside.name, parameters[beside.name])
        own_parts.update(dict.fromkeys(beside.keys, own_part._replace(view_shape=None)))
        own_parts[beside.keys[beside.own]] = own_part
    return ParameterLayout(spreads, {key: own_parts[key] for key in spreads})


def read_parameters_together(engine: Any) -> ParameterLayout:
    """``read_parameters`` on every rank, once all ranks are known to have read the same. One collective."""

    def read():
        layout = read_parameters(engine)
        return layout, digest_of(layout.spreads)

    return read_together(read, 'parameter')


def _placements(parameter: LpParameter, beside: Counterparts) -> Tuple[Any, ...]:
    """What each group of ranks has of the parameter, as a Placement or as Copies."""
    groups = beside.data_parallel_groups(parameter.ranks)
    shapes = beside.shapes if len(groups) > 1 else (parameter.shape, )
    if parameter.partition_numel is None:
        placements = tuple(Copies(shape, ranks) for shape, ranks in zip(shapes, groups))
        own = Copies(parameter.shape, parameter.ranks)
    else:
        placements = tuple(
            Placement(shape, ranks, -(-math.prod(shape) // len(ranks)), 0) for shape, ranks in zip(shapes, groups))
        own = Placement(parameter.shape, parameter.ranks, parameter.partition_numel, 0)
    if own not in placements:
        raise RuntimeError(f'parameter {beside.name}: rank {dist.get_rank()} has {own}, expected one of '
                           f'{placements}')
    return placements


def _own_part(name: str, parameter: LpParameter) -> OwnPart:
    if parameter.partition_numel is None:
        return OwnPart(name, parameter.shape, parameter.shape)
    numel = math.prod(parameter.shape)
    begin = min(parameter.ranks.index(dist.get_rank()) * parameter.partition_numel, numel)
    return OwnPart(name, (parameter.partition_numel, ), (min(parameter.partition_numel, numel - begin), ))


def views_of_parameters(engine: Any, layout: ParameterLayout) -> Dict[str, torch.Tensor]:
    """This rank's views, shaped as its shards in the maps; raises ParameterNotReadyError for what is kept otherwise
    than when the layout was read.
    """
    tensors = lp_tensors(engine)
    return {key: _view(tensors.get(part.name), part) for key, part in layout.own_parts.items()}


def _view(tensor: Optional[torch.Tensor], part: OwnPart) -> torch.Tensor:
    if tensor is None or tensor.shape != part.kept_shape:
        found = 'no parameter' if tensor is None else f'{tensor.numel()} elements of shape {tuple(tensor.shape)}'
        raise ParameterNotReadyError(f'parameter {part.name} on rank {dist.get_rank()}: have {found}, want '
                                     f'{math.prod(part.kept_shape)} of shape {part.kept_shape}; was the parameter '
                                     'replaced, or its data by a placeholder?')
    view = tensor.detach()
    if part.view_shape is None:
        return view.as_strided((0, ), (1, ))
    return view if part.view_shape == part.kept_shape else view[:part.view_shape[0]]


def update_parameters_together(engine: Any) -> None:
    """Refresh the low-precision weights, or raise ParameterNotReadyError on every rank before anything is changed."""
    obstacle = obstacle_to_update(engine)
    words = exchange(_REFUSING if obstacle else _UPDATING)
    elsewhere = [rank for rank, word in enumerate(words) if word not in (_UPDATING, _REFUSING)]
    if elsewhere:
        raise RuntimeError(f'update_lp_params: ranks {elsewhere} call another method')
    refusing = [rank for rank, word in enumerate(words) if word == _REFUSING]
    if refusing:
        raise ParameterNotReadyError(f'update_lp_params: {obstacle or f"ranks {refusing} refuse, see their errors"}')
    update_lp_parameters(engine)
