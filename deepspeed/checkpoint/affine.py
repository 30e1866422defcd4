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
from dataclasses import dataclass
from typing import Any, Dict, FrozenSet, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch

from .affine_boxes import BoxJoin, BoxSet, disjoint_cells, flat_range_boxes, grid_shape, row_major_strides
from .affine_pieces import (AffineMapError, CoverageError, HolderError, OutOfBoundsError, OverlapError, PieceTable,
                            RankIdError, ShardSizeError, UnreadablePieceError, check_coverage, check_ranks,
                            check_shards, element_offsets, holders_by_offset, piece_columns, piece_table,
                            uncovered_offsets)

__all__ = [
    'AFFINE_MAP_FORMAT_VERSION', 'SCALE_POWER_BY_STATE', 'AffineMapError', 'AffinePiece', 'CoverageError',
    'HolderError', 'OutOfBoundsError', 'OverlapError', 'ParamAffineMap', 'RankIdError', 'ShardSizeError',
    'UnreadablePieceError', 'block_gather_map', 'contiguous_split_map', 'flat_range_map', 'nest_affine_maps',
    'replicated_map', 'segmented_map', 'sub_param_map'
]

# Version of the dictionary form below; a reader refuses a newer one.
AFFINE_MAP_FORMAT_VERSION = 1

# Power of a piece's scale that applies to each state. Where a shard holds s * w, its gradient is 1/s of that of w,
# so Adam's first moment scales by 1/s and its second by 1/s^2.
SCALE_POWER_BY_STATE = {'fp32': 1, 'exp_avg': -1, 'exp_avg_sq': -2}

Shape = Tuple[int, ...]


@dataclass(frozen=True)
class AffinePiece:
    """A box of elements, where it sits in the full row-major tensor and where in the shard that holds it.

    ``shape`` is common to both sides. Offsets and strides are in elements and are the arguments of
    ``torch.as_strided``: ``source_*`` address the full tensor, ``dest_*`` the shard. ``locations`` are all ranks that
    hold exactly these elements. The shard holds ``full * scale``; a scale of 0, or one that is not finite, raises
    ValueError.
    """
    shape: Shape
    source_offset: int
    source_strides: Shape
    dest_offset: int
    dest_strides: Shape
    locations: FrozenSet[int]
    scale: float = 1.0

    def __post_init__(self):
        for name in ('shape', 'source_strides', 'dest_strides'):
            object.__setattr__(self, name, tuple(map(int, getattr(self, name))))
        for name in ('source_offset', 'dest_offset'):
            object.__setattr__(self, name, int(getattr(self, name)))
        object.__setattr__(self, 'locations', frozenset(map(int, self.locations)))
        object.__setattr__(self, 'scale', float(self.scale))
        if self.scale == 0.0 or not math.isfinite(self.scale):
            raise ValueError(f'a piece of scale {self.scale} cannot be scaled back')

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def source_view(self, full_param: torch.Tensor) -> torch.Tensor:
        """The view of the (contiguous) full parameter that this piece stands for."""
        return _strided_view(full_param, self.shape, self.source_strides, self.source_offset)

    def dest_view(self, shard: torch.Tensor) -> torch.Tensor:
        """The view of the (contiguous) shard that this piece stands for."""
        return _strided_view(shard, self.shape, self.dest_strides, self.dest_offset)

    def source_offsets(self) -> Iterator[int]:
        """Flat offset in the full tensor of every element, in row-major order of the piece."""
        return iter(element_offsets(self.shape, self.source_offset, self.source_strides).tolist())


def _strided_view(tensor: torch.Tensor, shape: Shape, strides: Shape, offset: int) -> torch.Tensor:
    # as_strided counts from the start of the storage, a map from the tensor's first element: views share storages.
    return torch.as_strided(tensor, shape, strides, tensor.storage_offset() + offset)


class ParamAffineMap:
    """How one parameter is spread over locations ("ranks"): the pieces that each one's shard is made of.

    ``logical_shape`` is the full parameter's shape, ``shard_shapes`` gives the shape of each rank's shard and
    ``pieces_by_rank`` the list of its AffinePieces. ``rule`` names the layout's rule where more than one is in use
    under one name, so that two ends that mean different ones are not planned together. Maps compare by value.
    """

    def __init__(self,
                 logical_shape: Sequence[int],
                 shard_shapes: Mapping[int, Sequence[int]],
                 pieces_by_rank: Mapping[int, Sequence[AffinePiece]],
                 rule: Optional[str] = None):
        self.logical_shape = tuple(map(int, logical_shape))
        self.shard_shapes = {int(rank): tuple(map(int, shape)) for rank, shape in shard_shapes.items()}
        self.pieces_by_rank = {int(rank): list(pieces) for rank, pieces in pieces_by_rank.items()}
        for rank in self.shard_shapes:
            self.pieces_by_rank.setdefault(rank, [])
        self.rule = rule

    @property
    def numel(self) -> int:
        return math.prod(self.logical_shape)

    def uncovered_offsets(self) -> List[int]:
        """Flat offsets, ascending, of the elements that no rank holds; [] where the parameter can be rebuilt."""
        return uncovered_offsets(self.logical_shape, self.pieces_by_rank)

    def holders(self) -> Dict[int, set]:
        """For the flat offset of every held element, the set of ranks holding it. One entry per element."""
        return holders_by_offset(self.logical_shape, self.pieces_by_rank)

    def validate(self) -> None:
        """Check that each rank's pieces fill its shard exactly.

        Raises ShardSizeError, OutOfBoundsError, OverlapError or RankIdError (all ValueError). Cost follows the number
        of pieces.
        """
        check_shards(self.shard_shapes, self.pieces_by_rank, piece_columns(self.pieces_by_rank))

    def validate_coverage(self) -> None:
        """``validate``, and: every element is held, and each piece's ``locations`` are exactly its holders.

        Raises CoverageError or HolderError (ValueError, and AssertionError as well) besides. Cost follows the number
        of pieces; pieces that are not boxes of the full tensor are walked element by element up to a size of
        2**24 elements and refused with UnreadablePieceError above it.
        """
        columns = piece_columns(self.pieces_by_rank)
        check_shards(self.shard_shapes, self.pieces_by_rank, columns)
        check_coverage(self.logical_shape, self.pieces_by_rank, columns)

    def rebuild(self, shards: Mapping[int, torch.Tensor], scale_power: int = 1) -> torch.Tensor:
        """The full parameter, put together from ``shards`` (rank -> tensor with its shard's number of elements).

        A shard holds ``full * scale ** scale_power``: 1 for a parameter, SCALE_POWER_BY_STATE for optimizer states.
        Raises ValueError for a wrong shard size or replicas that differ, NotImplementedError for an optimizer state
        under a scale, because lr and eps would have to be rescaled with it.
        """
        self.validate()
        self._refuse_scaled_state(scale_power)
        flat_shards = self._flat_shards(shards)
        any_shard = next(iter(shards.values()))
        full = torch.empty(self.numel, dtype=any_shard.dtype, device=any_shard.device)
        # Most maps hold each element once; only where some do not has what was written to be remembered.
        written = torch.zeros(self.numel, dtype=torch.bool, device=full.device) if self._has_replicas() else None
        for rank, pieces in self.pieces_by_rank.items():
            for piece in pieces:
                if piece.numel:
                    value = piece.dest_view(flat_shards[rank]).to(full.device)
                    value = value if piece.scale == 1.0 else value / piece.scale**scale_power
                    if written is not None:
                        _check_agreement(rank, piece, value, full, written)
                    piece.source_view(full).copy_(value)
        return full.view(self.logical_shape)

    def _flat_shards(self, shards):
        for rank, pieces in self.pieces_by_rank.items():
            if pieces and rank not in shards:
                raise RankIdError(f'rank {rank}: no shard was given; shards came for {sorted(shards)}')
        for rank, shard in shards.items():
            if rank not in self.shard_shapes:
                raise RankIdError(f'rank {rank}: the map knows no such rank, only {sorted(self.shard_shapes)}')
            if shard.numel() != math.prod(self.shard_shapes[rank]):
                raise ShardSizeError(f'rank {rank}: got a shard of {shard.numel()} elements, expected shape '
                                     f'{self.shard_shapes[rank]}')
        if not shards:
            raise RankIdError('no shard was given, so the dtype and device of the parameter are not known')
        return {rank: shard.reshape(-1) for rank, shard in shards.items()}

    def _has_replicas(self) -> bool:
        """Whether some element is held more than once, or that cannot be told from boxes."""
        try:
            boxes = piece_table(piece_columns(self.pieces_by_rank), self.logical_shape).boxes
        except UnreadablePieceError:
            return True
        return boxes.first_overlap() is not None

    def _refuse_scaled_state(self, scale_power):
        if scale_power == 1:
            return
        for rank, pieces in self.pieces_by_rank.items():
            for piece in pieces:
                if piece.scale != 1.0:
                    raise NotImplementedError(f'rank {rank}: {piece} is scaled. An optimizer state cannot pass a '
                                              'scale unless the learning rate and eps are rescaled with it, which a '
                                              'map of geometry does not do.')

    def extract(self, full_param: torch.Tensor, rank: int, scale_power: int = 1) -> torch.Tensor:
        """The shard of ``rank`` as a new tensor, cut from the full parameter."""
        self._refuse_scaled_state(scale_power)
        if rank not in self.shard_shapes:
            raise RankIdError(f'rank {rank}: the map knows no such rank, only {sorted(self.shard_shapes)}')
        if full_param.numel() != self.numel:
            raise ShardSizeError(f'got a full parameter of {full_param.numel()} elements, expected shape '
                                 f'{self.logical_shape}')
        flat = full_param.reshape(-1)
        shard = torch.empty(math.prod(self.shard_shapes[rank]), dtype=full_param.dtype, device=full_param.device)
        for piece in self.pieces_by_rank[rank]:
            if piece.numel:
                held = piece.dest_view(shard).copy_(piece.source_view(flat))
                if piece.scale != 1.0:
                    held *= piece.scale**scale_power  # in place, so that integers are refused and not cut
        return shard.view(self.shard_shapes[rank])

    def to_dict(self) -> Dict[str, Any]:
        """Plain scalars, lists and dicts, of AFFINE_MAP_FORMAT_VERSION. JSON turns the rank keys into strings.

        Raises RankIdError where a rank has pieces but no shard shape.
        """
        check_ranks(self.shard_shapes, self.pieces_by_rank)
        entry: Dict[str, Any] = {
            'logical_shape': list(self.logical_shape),
            'ranks': {
                rank: {
                    'shard_shape': list(self.shard_shapes[rank]),
                    'pieces': [_piece_to_dict(piece) for piece in self.pieces_by_rank[rank]]
                }
                for rank in sorted(self.shard_shapes)
            }
        }
        return entry if self.rule is None else {**entry, 'rule': self.rule}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> 'ParamAffineMap':
        """The map that ``to_dict`` wrote, also after a trip through JSON."""
        ranks = {int(rank): value for rank, value in entry['ranks'].items()}
        return cls(entry['logical_shape'], {
            rank: value['shard_shape']
            for rank, value in ranks.items()
        }, {
            rank: [_piece_from_dict(piece) for piece in value['pieces']]
            for rank, value in ranks.items()
        },
                   rule=entry.get('rule'))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ParamAffineMap):
            return NotImplemented
        return (self.logical_shape == other.logical_shape and self.shard_shapes == other.shard_shapes
                and self.pieces_by_rank == other.pieces_by_rank and self.rule == other.rule)

    def __hash__(self) -> int:
        # Cheap rather than exact: a model's maps are hashed for every parameter, and few of one shape differ.
        return hash((self.logical_shape, len(self.shard_shapes)))

    def __repr__(self) -> str:
        counts = {rank: len(pieces) for rank, pieces in sorted(self.pieces_by_rank.items())}
        return f'ParamAffineMap(logical_shape={self.logical_shape}, pieces_per_rank={counts})'


def _check_agreement(rank, piece, value, full, written) -> None:
    """What was written of this piece before must be the same, bit for bit or NaN; marks the piece as written."""
    target, seen = piece.source_view(full), piece.source_view(written)
    if seen.all() and torch.equal(target, value):
        return
    differs = seen & (target != value) & ~((target != target) & (value != value))
    if differs.any():
        where = tuple(differs.nonzero()[0].tolist())
        raise ValueError(f'rank {rank}: its replica of {piece} differs from that of another holder, first at index '
                         f'{where} of the piece')
    seen.fill_(True)


def _piece_to_dict(piece: AffinePiece) -> Dict[str, Any]:
    entry = {
        'shape': list(piece.shape),
        'source': [piece.source_offset, list(piece.source_strides)],
        'dest': [piece.dest_offset, list(piece.dest_strides)],
        'locations': sorted(piece.locations)
    }
    return entry if piece.scale == 1.0 else {**entry, 'scale': piece.scale}


def _piece_from_dict(entry: Mapping[str, Any]) -> AffinePiece:
    return AffinePiece(entry['shape'], *entry['source'], *entry['dest'], entry['locations'], entry.get('scale', 1.0))


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
