# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Affine maps of DTensor layouts: where ``DTensor.to_local()`` of every rank of a mesh has its elements."""

import itertools
from typing import Dict, List, Sequence, Tuple

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from .affine import AffinePiece, ParamAffineMap
from .affine_boxes import chunk_bounds, row_major_strides
from .affine_pieces import AffineMapError

__all__ = ['NESTED_CHUNK', 'UNFLATTEN_THEN_PAD', 'dtensor_map']

# The two rules in use for strided sharding where sizes do not divide. Both cut a dimension into `split_factor` chunks
# and each of them over the mesh dimension; the second one cuts every chunk where it cuts the first, longest one.
NESTED_CHUNK = 'nested chunk'
UNFLATTEN_THEN_PAD = 'unflatten then pad'

# Indices of one tensor dimension that a rank holds, in the order it holds them, as (start, size) runs.
Runs = Tuple[Tuple[int, int], ...]


def dtensor_map(shape: Sequence[int],
                mesh: DeviceMesh,
                placements: Sequence[Placement],
                strided_rule: str = NESTED_CHUNK) -> ParamAffineMap:
    """Where a DTensor of global ``shape`` with these ``placements`` keeps its elements.

    Locations are the mesh's global ranks; a location's shard is its local tensor, whose shape may have a size of 0.
    Shards follow torch 2.13: ``Shard`` cuts like ``torch.chunk``; several mesh dimensions may shard one tensor
    dimension, cutting it in their order; ``_StridedShard`` cuts into ``split_factor`` chunks and each of these over
    the mesh dimension. Over ranks 0 and 1, ``[Shard(0)]`` puts 0..4 as [0, 1, 2], [3, 4] and
    ``[_StridedShard(0, split_factor=2)]`` as [0, 1, 3], [2, 4]. A tensor laid out by the other rule in use,
    ``strided_rule=UNFLATTEN_THEN_PAD``, has [0, 1, 3, 4], [2] there; a strided map carries its rule.

    Reads the mesh only: any process may call it, also one outside the mesh. Raises AffineMapError for ``Partial``
    (its elements are spread over the ranks as summands), a wrong number of placements, or a dimension out of range.
    """
    shape = tuple(int(size) for size in shape)
    _check_placements(shape, mesh, placements)
    if strided_rule not in (NESTED_CHUNK, UNFLATTEN_THEN_PAD):
        raise AffineMapError(
            f'strided_rule: got {strided_rule!r}, expected {NESTED_CHUNK!r} or {UNFLATTEN_THEN_PAD!r}')
    coordinates = itertools.product(*(range(size) for size in mesh.mesh.shape))
    held = _HeldRuns(shape, mesh, placements, strided_rule)
    ranks_by_runs: Dict[Tuple[Runs, ...], List[int]] = {}
    for coordinate, rank in zip(coordinates, mesh.mesh.flatten().tolist()):
        ranks_by_runs.setdefault(held.at(coordinate), []).append(rank)
    shard_shapes, pieces_by_rank = {}, {}
    for runs, ranks in ranks_by_runs.items():
        shard_shape = tuple(_size(dim_runs) for dim_runs in runs)
        pieces = _pieces(shape, shard_shape, runs, ranks)
        shard_shapes.update(dict.fromkeys(ranks, shard_shape))
        pieces_by_rank.update(dict.fromkeys(ranks, pieces))
    strided = any(isinstance(placement, _StridedShard) and placement.split_factor > 1 for placement in placements)
    return ParamAffineMap(shape, shard_shapes, pieces_by_rank, rule=strided_rule if strided else None)


def _check_placements(shape, mesh, placements) -> None:
    if len(placements) != mesh.ndim:
        raise AffineMapError(f'placements: got {len(placements)} for a mesh of {mesh.ndim} dimensions')
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, (Shard, _StridedShard)):
            if not -len(shape) <= placement.dim < len(shape):
                raise AffineMapError(f'placements[{mesh_dim}]: {placement} of a tensor of shape {shape}')
        elif not isinstance(placement, Replicate):
            raise AffineMapError(f'placements[{mesh_dim}]: {placement!r} has no map, since no rank holds the elements '
                                 'themselves; redistribute the tensor to Shard or Replicate first')


class _HeldRuns:
    """The runs of every tensor dimension that a mesh coordinate holds; each is worked out once."""

    def __init__(self, shape, mesh, placements, strided_rule):
        self._strided_rule = strided_rule
        self._whole = [((0, size), ) if size else () for size in shape]
        # For each tensor dimension, the (mesh dimension, number of parts, split factor) of the cuts, in their order.
        self._cuts: List[List[Tuple[int, int, int]]] = [[] for _ in shape]
        for mesh_dim, placement in enumerate(placements):
            if not isinstance(placement, Replicate):
                # Strided sharding is not a subclass of Shard in every torch.
                split_factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
                self._cuts[placement.dim % len(shape)].append((mesh_dim, mesh.size(mesh_dim), split_factor))
        self._known: Dict[Tuple[int, ...], Runs] = {}

    def at(self, coordinate: Tuple[int, ...]) -> Tuple[Runs, ...]:
        return tuple(self._along(dim, coordinate) for dim in range(len(self._cuts)))

    def _along(self, dim: int, coordinate: Tuple[int, ...]) -> Runs:
        key = (dim, *(coordinate[mesh_dim] for mesh_dim, _, _ in self._cuts[dim]))
        if key not in self._known:
            runs = self._whole[dim]
            for mesh_dim, parts, split_factor in self._cuts[dim]:
                runs = self._cut(runs, parts, split_factor, coordinate[mesh_dim])
            self._known[key] = _merged(runs)
        return self._known[key]

    def _cut(self, runs: Runs, parts: int, split_factor: int, index: int) -> Runs:
        chunks = [_part(runs, *chunk_bounds(_size(runs), split_factor, chunk)) for chunk in range(split_factor)]
        padded_size = _size(chunks[0]) if self._strided_rule == UNFLATTEN_THEN_PAD else 0
        return sum((_part(chunk, *chunk_bounds(_size(chunk), parts, index, padded_size)) for chunk in chunks), ())


def _size(runs: Runs) -> int:
    return sum(size for _, size in runs)


def _part(runs: Runs, first: int, last: int) -> Runs:
    """The indices at positions [first, last) of those that ``runs`` lists."""
    part, position = [], 0
    for start, size in runs:
        begin, end = max(first - position, 0), min(last - position, size)
        if begin < end:
            part.append((start + begin, end - begin))
        position += size
    return tuple(part)


def _merged(runs: Runs) -> Runs:
    merged: List[Tuple[int, int]] = []
    for start, size in runs:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((start, size))
    return tuple(merged)


def _pieces(shape, shard_shape, runs: Tuple[Runs, ...], ranks: List[int]) -> List[AffinePiece]:
    """One piece for every combination of a run in each dimension."""
    source_strides, dest_strides = row_major_strides(shape), row_major_strides(shard_shape)
    runs_with_position = []
    for dim_runs in runs:
        positions = itertools.accumulate((size for _, size in dim_runs), initial=0)
        runs_with_position.append([(start, size, position) for (start, size), position in zip(dim_runs, positions)])
    pieces = []
    for box in itertools.product(*runs_with_position):
        pieces.append(
            AffinePiece(shape=[size for _, size, _ in box],
                        source_offset=sum(start * stride for (start, _, _), stride in zip(box, source_strides)),
                        source_strides=source_strides,
                        dest_offset=sum(position * stride for (_, _, position), stride in zip(box, dest_strides)),
                        dest_strides=dest_strides,
                        locations=ranks))
    return pieces
