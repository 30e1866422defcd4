# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Plan the copies that take a parameter from one affine layout straight to another.

A plan is a value: segments, each a strided copy from one location's shard into another's, with addresses in elements.
It knows nothing of processes, devices or dtypes, and no step here allocates per element. The maps' pieces are
compared as boxes of the full parameter, by sorting (see affine_boxes.py), so planning costs about
(S + T) log(S + T) for S source and T target pieces, plus the segments.
"""

import math
from dataclasses import dataclass, field
from typing import AbstractSet, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from .affine import AffineMapError, ParamAffineMap, UnreadablePieceError
from .affine_boxes import BoxJoin, BoxSet, disjoint_cells
from .affine_pieces import PieceTable, check_cell_holders, check_shards, piece_columns, piece_table
from .affine_replicas import HolderRuns, ReplicaCandidate, ReplicaSelectionRequest, SpreadReplicas
from .affine_segments import SegmentTable, coalesce, serialized_bytes

__all__ = [
    'AffineTransferError', 'InvalidMapError', 'InvalidReplicaPolicyError', 'PlanBudget', 'PlanStatistics',
    'ReplicaCandidate', 'ReplicaSelectionRequest', 'SpreadReplicas', 'TransferPlan', 'TransferSegment',
    'UnsupportedLayoutError', 'plan_model', 'plan_transfer'
]


class AffineTransferError(ValueError):
    """No plan was made. Of this class itself: a limit of the PlanBudget was reached."""


class InvalidMapError(AffineTransferError):
    """A map contradicts itself, or the two maps contradict each other: correct the maps."""


class UnsupportedLayoutError(AffineTransferError):
    """A layout that this planner has no plan for: rebuild the parameter and shard it again."""


class InvalidReplicaPolicyError(AffineTransferError):
    """The replica selector chose a rank that is none of the candidates."""


@dataclass(frozen=True)
class PlanBudget:
    """Limits on the size of one parameter's plan. More than one of them raises AffineTransferError, never a part of
    the plan; ``max_ndim``, UnsupportedLayoutError.

    The counts of pieces, pairs and merges are checked before the work that they stand for. The defaults leave room for
    a parameter over 16,384 ranks.
    """
    max_ndim: int = 8
    max_pieces_per_map: int = 1 << 20
    max_pair_checks: int = 1 << 28
    max_segments: int = 1 << 22
    max_merge_passes: int = 8
    max_plan_bytes: int = 1 << 30
    max_merge_checks: int = 1 << 28


@dataclass(frozen=True)
class PlanStatistics:
    """Distinct source regions, target pieces, pairs of them compared, and segments before and after joining.

    ``plan_bytes`` is the length of ``TransferPlan.to_dict`` as compact JSON.
    """
    source_pieces: int
    target_pieces: int
    pair_checks: int
    segments_before_merge: int
    segments: int
    plan_bytes: int


# A pure function from a request to the source rank that sends, or the policy that spreads.
ReplicaSelector = Union[Callable[[ReplicaSelectionRequest], int], SpreadReplicas]


@dataclass(frozen=True)
class TransferSegment:
    """One strided copy: elements of the source rank's shard to elements of the target rank's shard.

    Ranks are locations of the maps. Offsets and strides are elements of the shard's row-major storage, as
    ``torch.as_strided`` takes them; ``shape`` is common to both sides and may have fewer dimensions than the shards.
    """
    source_rank: int
    source_offset: int
    source_strides: Tuple[int, ...]
    target_rank: int
    target_offset: int
    target_strides: Tuple[int, ...]
    shape: Tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def to_dict(self) -> Dict[str, List[object]]:
        """Plain scalars and lists; ``from_dict`` reads them back."""
        return {
            'shape': list(self.shape),
            'source': [self.source_rank, self.source_offset,
                       list(self.source_strides)],
            'target': [self.target_rank, self.target_offset,
                       list(self.target_strides)]
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Sequence]) -> 'TransferSegment':
        ends = []
        for side in ('source', 'target'):
            rank, offset, strides = entry[side]
            ends += [int(rank), int(offset), tuple(map(int, strides))]
        return cls(*ends, shape=tuple(map(int, entry['shape'])))


@dataclass(frozen=True)
class TransferPlan:
    """The copies of one parameter, sorted by target rank, target offset, source rank and source offset.

    ``moved_elements`` counts the elements that the segments write, replicas each. ``source_shard_shapes`` and
    ``target_shard_shapes`` give the shard shape of every location that the plan was made for.
    """
    segments: Tuple[TransferSegment, ...]
    logical_shape: Tuple[int, ...]
    moved_elements: int
    statistics: PlanStatistics
    source_shard_shapes: Mapping[int, Tuple[int, ...]] = field(default_factory=dict, hash=False)
    target_shard_shapes: Mapping[int, Tuple[int, ...]] = field(default_factory=dict, hash=False)

    def to_dict(self) -> Dict[str, List[object]]:
        return {
            'logical_shape': list(self.logical_shape),
            'segments': [segment.to_dict() for segment in self.segments]
        }


def plan_transfer(target_map: ParamAffineMap,
                  source_map: ParamAffineMap,
                  limits: Optional[PlanBudget] = None,
                  *,
                  replica_selector: Optional[ReplicaSelector] = None) -> TransferPlan:
    """Plan one parameter's move from the shards of ``source_map`` into the shards of ``target_map``.

    Every element of every target shard is written exactly once, from a location that holds it. Where several do, it is
    the lowest one, or the one that ``replica_selector`` chooses: SpreadReplicas, or a pure function from a
    ReplicaSelectionRequest to the rank of a candidate.
    Shards may have any number of dimensions and any strides; the two maps number their locations independently. For
    (2, 2) from rows to columns, ``plan_transfer(contiguous_split_map((2, 2), [1, 1], 1),
    contiguous_split_map((2, 2), [1, 1], 0))`` has four segments of one element; element (1, 0) goes from source rank
    1, offset 0, to target rank 0, offset 1.

    Raises InvalidMapError for maps that contradict themselves or one another (another shape, overlapping or missing
    elements, wrong holders), UnsupportedLayoutError for a scaled piece or one that is not a box of the parameter,
    InvalidReplicaPolicyError for a selector's wrong answer, AffineTransferError for a limit.
    """
    return _Geometry(target_map, source_map, limits or PlanBudget(), replica_selector).plan()


def plan_model(target_maps: Mapping[str, ParamAffineMap],
               source_maps: Mapping[str, ParamAffineMap],
               limits: Optional[PlanBudget] = None,
               *,
               replica_selector: Optional[ReplicaSelector] = None,
               ranks: Optional[Iterable[int]] = None,
               source_ranks: Optional[Iterable[int]] = None,
               target_ranks: Optional[Iterable[int]] = None) -> Dict[str, TransferPlan]:
    """Plan every parameter of a model: name -> TransferPlan, in the order of ``target_maps``.

    Parameters of equal geometry share one plan. With ``ranks``, only segments that read from or write to one of these
    locations are kept (and only their parts are worked out); where the two sides number their locations
    independently, give ``source_ranks`` and ``target_ranks`` instead. A location's segments, and their order, are the
    same in every such part of the plan.

    Raises what ``plan_transfer`` raises, naming the parameter, and InvalidMapError where the two sides do not list
    the same parameters.
    """
    if target_maps.keys() != source_maps.keys():
        lacking = {
            'source': target_maps.keys() - source_maps.keys(),
            'target': source_maps.keys() - target_maps.keys()
        }
        raise InvalidMapError('parameters ' + '; '.join(f'without a {side} map: {sorted(names)}'
                                                        for side, names in lacking.items() if names))
    if ranks is not None:
        if source_ranks is not None or target_ranks is not None:
            raise TypeError('plan_model takes either ranks, or source_ranks and target_ranks')
        source_ranks = target_ranks = frozenset(ranks)
    elif source_ranks is not None or target_ranks is not None:
        source_ranks, target_ranks = frozenset(source_ranks or ()), frozenset(target_ranks or ())
    names_by_geometry: Dict[Tuple[ParamAffineMap, ParamAffineMap], List[str]] = {}
    names_by_identity: Dict[Tuple[int, int], List[str]] = {}
    for name in sorted(target_maps):
        maps = (target_maps[name], source_maps[name])
        # Comparing maps by value is dear, and many parameters share theirs.
        if tuple(map(id, maps)) not in names_by_identity:
            names_by_identity[tuple(map(id, maps))] = names_by_geometry.setdefault(maps, [])
        names_by_identity[tuple(map(id, maps))].append(name)
    plans: Dict[str, TransferPlan] = {}
    turn = 0
    for maps, names in names_by_geometry.items():
        try:
            geometry = _Geometry(*maps, limits or PlanBudget(), replica_selector, source_ranks, target_ranks)
            for name in names:
                plans[name] = geometry.plan(turn)
                turn += geometry.turns
        except AffineTransferError as error:
            raise type(error)(f'parameter {names[0]!r}: {error}') from error
    return {name: plans[name] for name in target_maps}


class _Geometry:
    """A pair of maps: checked, and their pieces brought together, once for all parameters laid out like this."""

    def __init__(self,
                 target_map: ParamAffineMap,
                 source_map: ParamAffineMap,
                 limits: PlanBudget,
                 replica_selector: Optional[ReplicaSelector],
                 source_ranks: Optional[AbstractSet[int]] = None,
                 target_ranks: Optional[AbstractSet[int]] = None):
        if source_map.logical_shape != target_map.logical_shape:
            raise InvalidMapError(
                f'source describes a parameter of shape {source_map.logical_shape} and target one of '
                f'shape {target_map.logical_shape}')
        if None not in (source_map.rule, target_map.rule) and source_map.rule != target_map.rule:
            raise InvalidMapError(f'source is laid out by the rule {source_map.rule!r} and target by the rule '
                                  f'{target_map.rule!r}: state one of them on both sides')
        self._limits = limits
        self._logical_shape = target_map.logical_shape
        self._source_ranks, self._target_ranks = source_ranks, target_ranks
        self._source_shapes = _shapes_of(source_map, source_ranks)
        self._target_shapes = _shapes_of(target_map, target_ranks)
        self._source = _checked_side('source', source_map, limits)
        self._target = _checked_side('target', target_map, limits)
        self._pairs, self._pair_checks = _pairs(self._source, self._target, limits, source_ranks, target_ranks)
        self._choose_holders(replica_selector)
        self._plan_by_turn: Dict[int, TransferPlan] = {}

    def _choose_holders(self, replica_selector: Optional[ReplicaSelector]) -> None:
        """Find who may send each box, and how many ``turns`` a plan takes among them."""
        holders = _holders(self._source, self._pairs)
        turn = np.zeros(len(self._pairs.cell), dtype=np.int64)
        self.turns = 0
        if isinstance(replica_selector, SpreadReplicas):
            table = self._target.table
            holders = holders.nearest(replica_selector, self._source.table.rank, table.rank[self._pairs.target_row])
            # Numbering target pieces box by box lets those that want the same elements turn to different holders.
            order = np.lexsort((table.rank, table.boxes.unique()[1]))
            number = np.empty_like(order)
            number[order] = np.arange(order.size)
            turn = number[self._pairs.target_row]
            self.turns = order.size
        elif replica_selector is not None:
            turn = _selected(self._source.table, self._target.table, self._pairs, holders, replica_selector,
                             len(self._logical_shape))
        self._holders, self._turn = holders, turn
        # After so many turns every holder is where it was, so that parameters that far apart share a plan.
        self._period = math.lcm(*np.unique(holders.count).tolist()) if self.turns else 1

    def plan(self, first_turn: int = 0) -> TransferPlan:
        """The plan of the parameter that takes ``turns`` turns from ``first_turn`` on."""
        first_turn %= self._period
        if first_turn not in self._plan_by_turn:
            self._plan_by_turn[first_turn] = self._planned(self._holders.in_turn(self._turn + first_turn))
        return self._plan_by_turn[first_turn]

    def _planned(self, holder: np.ndarray) -> TransferPlan:
        pairs, limits = self._pairs, self._limits
        if self._source_ranks is not None:
            kept = np.isin(self._source.table.rank[holder], list(self._source_ranks))
            kept |= np.isin(self._target.table.rank[pairs.target_row], list(self._target_ranks))
            pairs, holder = pairs.take(kept), holder[kept]
        copies = _copies(self._source.table, self._target.table, pairs, holder)
        merge_checks = copies.count * copies.shape.shape[1] * limits.max_merge_passes
        _check_limit('merge checks', merge_checks, 'max_merge_checks', limits)
        segments = coalesce(copies, limits.max_merge_passes)
        _check_limit('segments', segments.count, 'max_segments', limits)
        plan_bytes = serialized_bytes(segments, self._logical_shape)
        _check_limit('bytes of plan', plan_bytes, 'max_plan_bytes', limits)
        return TransferPlan(segments=tuple(TransferSegment(*row) for row in segments.rows()),
                            logical_shape=self._logical_shape,
                            moved_elements=sum(np.prod(segments.shape, axis=1).tolist()),
                            statistics=PlanStatistics(source_pieces=len(self._source.cells.lower),
                                                      target_pieces=len(self._target.table.rank),
                                                      pair_checks=self._pair_checks,
                                                      segments_before_merge=copies.count,
                                                      segments=segments.count,
                                                      plan_bytes=plan_bytes),
                            source_shard_shapes=self._source_shapes,
                            target_shard_shapes=self._target_shapes)


def _shapes_of(map_: ParamAffineMap, ranks: Optional[AbstractSet[int]]) -> Dict[int, Tuple[int, ...]]:
    return {rank: shape for rank, shape in map_.shard_shapes.items() if ranks is None or rank in ranks}


def _check_limit(what: str, count: int, limit_name: str, limits: PlanBudget) -> None:
    limit = getattr(limits, limit_name)
    if count > limit:
        raise AffineTransferError(f'{count} {what}, more than {limit_name} = {limit} of the PlanBudget')


class _Side(NamedTuple):
    """A checked map: its pieces, and the disjoint cells of their overlay.

    ``cell_index`` and ``row_index`` pair each cell with the rows of the table that hold it, ascending.
    """
    table: PieceTable
    cells: BoxSet
    cell_index: np.ndarray
    row_index: np.ndarray


def _checked_side(side: str, map_: ParamAffineMap, limits: PlanBudget) -> _Side:
    try:
        _check_pieces(side, map_, limits)
        columns = piece_columns(map_.pieces_by_rank)
        check_shards(map_.shard_shapes, map_.pieces_by_rank, columns)
        table = piece_table(columns, map_.logical_shape)
        checked = _Side(table, *disjoint_cells(table.boxes))
        _check_held_once(side, checked)
        check_cell_holders(*checked)
    except UnreadablePieceError as error:
        raise UnsupportedLayoutError(f'{side}: {error}') from error
    except AffineMapError as error:
        raise InvalidMapError(f'{side}: {error}') from error
    covered = sum(checked.cells.volumes().tolist())
    if covered != map_.numel:
        raise InvalidMapError(f'{side}: the pieces cover {covered} of the {map_.numel} elements of a parameter of '
                              f'shape {map_.logical_shape}')
    return checked


def _check_held_once(side: str, checked: _Side) -> None:
    """A rank that holds an element twice would leave open which of the two is read, or whether both are written."""
    table, _, cell_index, row_index = checked
    again = (cell_index[1:] == cell_index[:-1]) & (table.rank[row_index[1:]] == table.rank[row_index[:-1]])
    if again.any():
        at = int(np.argmax(again))
        raise InvalidMapError(f'{side}: {table.describe(row_index[at])} and {table.describe(row_index[at + 1])} hold '
                              'the same elements of the parameter')


def _check_pieces(side: str, map_: ParamAffineMap, limits: PlanBudget) -> None:
    ndim = len(map_.logical_shape)
    if ndim > limits.max_ndim:
        raise UnsupportedLayoutError(f'{side}: the parameter has {ndim} dimensions, more than max_ndim = '
                                     f'{limits.max_ndim} of the PlanBudget')
    count = sum(len(pieces) for pieces in map_.pieces_by_rank.values())
    _check_limit(f'pieces of the {side}', count, 'max_pieces_per_map', limits)
    for rank, pieces in map_.pieces_by_rank.items():
        for piece in pieces:
            if not piece.numel and 0 in map_.shard_shapes.get(rank, ()):
                continue
            if len(piece.shape) != ndim:
                fault = f'it has {len(piece.shape)} dimensions, the parameter {ndim}'
            elif not piece.locations:
                fault = 'it names no location'
            elif piece.scale != 1.0:
                raise UnsupportedLayoutError(f'{side} rank {rank}: {piece} is scaled, and a copy does not scale')
            else:
                continue
            raise InvalidMapError(f'{side} rank {rank}: {piece}: {fault}')


class _Pairs(NamedTuple):
    """Boxes to copy: which row of the target table, which cell of the source, and the box they have in common."""
    target_row: np.ndarray
    cell: np.ndarray
    boxes: BoxSet

    def take(self, index: np.ndarray) -> '_Pairs':
        return _Pairs(self.target_row[index], self.cell[index], self.boxes.take(index))


def _pairs(source: _Side, target: _Side, limits: PlanBudget, source_ranks: Optional[AbstractSet[int]],
           target_ranks: Optional[AbstractSet[int]]) -> Tuple[_Pairs, int]:
    """Every target piece with every source cell it meets, and the number of pairs compared to find them.

    With ranks given, a superset of what touches them: all of their target pieces, and of the other targets what meets
    a cell that one of the source ranks holds.
    """
    rows, cells = np.arange(len(target.table.rank)), np.arange(len(source.cells.lower))
    if source_ranks is None:
        parts = [(rows, cells)]
    else:
        wanted = np.isin(target.table.rank, list(target_ranks))
        held = source.cell_index[np.isin(source.table.rank[source.row_index], list(source_ranks))]
        parts = [(rows[wanted], cells), (rows[~wanted], np.unique(held))]
    joins = [BoxJoin(target.table.boxes.take(rows), source.cells.take(cells)) for rows, cells in parts]
    pair_checks = sum(join.candidates for join in joins)
    _check_limit('candidate pairs', pair_checks, 'max_pair_checks', limits)
    indices = [(rows[i], cells[j]) for (rows, cells), join in zip(parts, joins) for i, j in (join.pairs(), )]
    target_row, cell = (np.concatenate(columns) for columns in zip(*indices))
    common = target.table.boxes.take(target_row).intersection(source.cells.take(cell))
    return _Pairs(target_row, cell, common), pair_checks


def _holders(source: _Side, pairs: _Pairs) -> HolderRuns:
    """For each pair all rows of the source table that hold it, the lowest rank first."""
    bounds = np.searchsorted(source.cell_index, np.arange(len(source.cells.lower) + 1))
    return HolderRuns(source.row_index, bounds[pairs.cell], np.diff(bounds)[pairs.cell])


def _selected(source: PieceTable, target: PieceTable, pairs: _Pairs, holders: HolderRuns,
              replica_selector: Callable[[ReplicaSelectionRequest], int], ndim: int) -> np.ndarray:
    """For each pair, which of its holders the selector chooses: 0 for the first."""
    chosen = np.zeros(len(pairs.cell), dtype=np.int64)
    for index in np.flatnonzero(holders.count > 1).tolist():
        rows = holders.rows[holders.first[index]:holders.first[index] + holders.count[index]]
        request = _request(source, target, pairs, index, rows, ndim)
        rank = replica_selector(request)
        ranks = source.rank[rows].tolist()
        if type(rank) is not int or rank not in ranks:
            raise InvalidReplicaPolicyError(f'for target rank {request.target_rank} the replica selector returned '
                                            f'{rank!r}, expected one of {ranks}')
        chosen[index] = ranks.index(rank)
    return chosen


def _request(source: PieceTable, target: PieceTable, pairs: _Pairs, index: int, rows: np.ndarray,
             ndim: int) -> ReplicaSelectionRequest:
    target_row = pairs.target_row[index:index + 1]
    corner = pairs.boxes.lower[index:index + 1]
    addresses = source.address_of(rows, corner).tolist()
    strides = source.strides[rows][:, :ndim].tolist()
    return ReplicaSelectionRequest(
        target_rank=int(target.rank[target_row[0]]),
        logical_origin=tuple(corner[0, :ndim].tolist()),
        shape=tuple(pairs.boxes.extent[index, :ndim].tolist()),
        target_offset=int(target.address_of(target_row, corner)[0]),
        target_strides=tuple(target.strides[target_row[0], :ndim].tolist()),
        candidates=tuple(
            ReplicaCandidate(rank, address, tuple(stride))
            for rank, address, stride in zip(source.rank[rows].tolist(), addresses, strides)))


def _copies(source: PieceTable, target: PieceTable, pairs: _Pairs, holder: np.ndarray) -> SegmentTable:
    return SegmentTable(source_rank=source.rank[holder],
                        source_offset=source.address_of(holder, pairs.boxes.lower),
                        source_strides=source.strides[holder],
                        target_rank=target.rank[pairs.target_row],
                        target_offset=target.address_of(pairs.target_row, pairs.boxes.lower),
                        target_strides=target.strides[pairs.target_row],
                        shape=pairs.boxes.extent)
