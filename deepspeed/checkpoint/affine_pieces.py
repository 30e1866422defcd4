# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The pieces of an affine map as columns, and the checks a map must pass.

A piece whose strides are those of the full tensor is a box of it, and whole maps are then checked by comparing boxes.
Pieces that cannot be read so (transposed or strided through the tensor) are walked element by element, up to
ELEMENTWISE_LIMIT elements.
"""

import math
from typing import Dict, FrozenSet, List, Mapping, NamedTuple, Sequence, Set, Tuple

import numpy as np

from .affine_boxes import BoxSet, coordinates, disjoint_cells, grid_shape, lattice_boxes, row_major_strides

ELEMENTWISE_LIMIT = 1 << 24
_INT64_LIMIT = 1 << 62


class AffineMapError(ValueError):
    """An affine map contradicts itself."""


class ShardSizeError(AffineMapError):
    """The pieces of a rank do not add up to its shard, or a shard to what a map says of it."""


class OutOfBoundsError(AffineMapError):
    """A piece reaches outside its shard or outside the full tensor."""


class OverlapError(AffineMapError):
    """Two pieces of a rank claim the same element of its shard."""


class RankIdError(AffineMapError):
    """A rank is missing, unknown, or named twice."""


class CoverageError(AffineMapError, AssertionError):
    """No rank holds some element, so the full tensor cannot be rebuilt."""


class HolderError(AffineMapError, AssertionError):
    """The ranks that a piece names are not the ranks that hold its elements."""


class UnreadablePieceError(AffineMapError):
    """A piece is not a box of the full tensor, and the question asked needs boxes."""


class PieceTable(NamedTuple):
    """Every piece with elements, one row each, ordered by rank.

    Columns: the ``rank`` that holds it; ``boxes`` in the full tensor's grid; the shard address of element x of the
    tensor is ``address + (x - boxes.lower) @ strides``; ``scale`` and ``locations`` are the piece's own.
    """
    rank: np.ndarray
    boxes: BoxSet
    address: np.ndarray
    strides: np.ndarray
    scale: np.ndarray
    locations: List[FrozenSet[int]]

    def describe(self, row: int) -> str:
        return f'rank {self.rank[row]} piece {describe_box(self.boxes, row)}'

    def address_of(self, rows: np.ndarray, corner: np.ndarray) -> np.ndarray:
        """Shard addresses of the tensor elements ``corner`` (one per row), which lie in the rows' boxes."""
        return self.address[rows] + ((corner - self.boxes.lower[rows]) * self.strides[rows]).sum(axis=1)

    def shard_boxes(self, shard_shape: Sequence[int]) -> BoxSet:
        """The pieces as boxes of a shard of this shape, dimension by dimension as in the full tensor.

        Raises UnreadablePieceError where a piece is scattered over the shard in another way.
        """
        shape = grid_shape(shard_shape)
        extent = self.boxes.extent
        lower = coordinates(self.address, shape)
        if lower.shape != extent.shape:
            raise UnreadablePieceError(
                f'a shard of shape {tuple(shard_shape)} has other dimensions than the parameter')
        scattered = np.any((extent > 1) & (self.strides != row_major_strides(shape)), axis=1)
        scattered |= np.any(lower + extent > shape, axis=1)
        if scattered.any():
            raise UnreadablePieceError(f'{self.describe(np.argmax(scattered))} is not a box of its shard of shape '
                                       f'{tuple(shard_shape)}')
        return BoxSet(lower, lower + extent)

    def holders_by_cell(self, cell_index: np.ndarray, row_index: np.ndarray, cells: int) -> List[FrozenSet[int]]:
        """The ranks of each cell's rows, for the index arrays that ``disjoint_cells`` returns."""
        bounds = np.searchsorted(cell_index, np.arange(cells + 1)).tolist()
        ranks = self.rank[row_index].tolist()
        return [frozenset(ranks[begin:end]) for begin, end in zip(bounds, bounds[1:])]


class PieceColumns(NamedTuple):
    """The pieces of a map that have elements, in ascending order of rank, as they were written.

    Pieces of fewer dimensions than others are filled up with leading dimensions of size 1 and stride 0.
    """
    rank: np.ndarray
    shape: np.ndarray
    source_offset: np.ndarray
    source_strides: np.ndarray
    dest_offset: np.ndarray
    dest_strides: np.ndarray
    pieces: List


def piece_columns(pieces_by_rank: Mapping[int, Sequence]) -> PieceColumns:
    """Raises AffineMapError for a piece whose numbers contradict one another or do not fit 64 bits."""
    ranked = [(rank, piece) for rank, held in sorted(pieces_by_rank.items()) for piece in held if 0 not in piece.shape]
    for rank, piece in ranked:
        if not len(piece.shape) == len(piece.source_strides) == len(piece.dest_strides):
            raise AffineMapError(f'rank {rank}: {piece} has other numbers of strides than dimensions')
        if piece.shape and min(piece.shape) < 0:
            raise AffineMapError(f'rank {rank}: {piece} has a negative size')
    try:
        columns = _as_columns(ranked)
        fits = _fits_int64(columns)
    except OverflowError:
        # Some number is no int64 at all: look at them one by one.
        fits = [_fits_int64(_as_columns([entry], np.float64)).all() for entry in ranked]
    if not np.all(fits):
        rank, piece = ranked[int(np.argmin(fits))]
        raise AffineMapError(f'rank {rank}: {piece} reaches beyond 2**62 elements')
    return columns


def _as_columns(ranked, dtype=np.int64) -> PieceColumns:
    pieces = [piece for _, piece in ranked]
    ndim = max((len(piece.shape) for piece in pieces), default=1)

    def column(values):
        return np.array(values, dtype=dtype)

    def rows(values, fill):
        return column([(fill, ) * (ndim - len(row)) + row for row in values]).reshape(-1, max(ndim, 1))

    return PieceColumns(rank=column([rank for rank, _ in ranked]),
                        shape=rows([piece.shape or (1, ) for piece in pieces], 1),
                        source_offset=column([piece.source_offset for piece in pieces]),
                        source_strides=rows([piece.source_strides or (1, ) for piece in pieces], 0),
                        dest_offset=column([piece.dest_offset for piece in pieces]),
                        dest_strides=rows([piece.dest_strides or (1, ) for piece in pieces], 0),
                        pieces=pieces)


def _fits_int64(columns: PieceColumns) -> np.ndarray:
    """Which pieces have addresses, sizes and ranks that 64 bits hold; in floating point, which does not wrap."""
    shape = columns.shape.astype(np.float64)
    fits = (np.prod(shape, axis=1) < _INT64_LIMIT) & (np.abs(columns.rank.astype(np.float64)) < _INT64_LIMIT)
    for offset, strides in ((columns.source_offset, columns.source_strides), (columns.dest_offset,
                                                                              columns.dest_strides)):
        reach = np.abs(offset.astype(np.float64)) + ((shape - 1) * np.abs(strides.astype(np.float64))).sum(axis=1)
        fits &= reach < _INT64_LIMIT
    return fits


def piece_table(columns: PieceColumns, logical_shape: Sequence[int]) -> PieceTable:
    """Read the pieces of a map as boxes of a tensor of ``logical_shape``.

    A piece may list the tensor's dimensions in another order (a transposed shard). Raises UnreadablePieceError for
    one that is no box, OutOfBoundsError for one that leaves the tensor, naming rank and piece.
    """
    shape = grid_shape(logical_shape)
    if math.prod(shape) >= _INT64_LIMIT:
        raise AffineMapError(f'a parameter of shape {tuple(logical_shape)} has more than 2**62 elements')
    if columns.shape.shape[1] == len(shape):
        extent, strides = columns.shape, columns.dest_strides
        odd = np.any((extent > 1) & (columns.source_strides != row_major_strides(shape)), axis=1)
        # A dimension of one index has the stride of its neighbour: the piece may mean the other one.
        odd |= np.any(extent > shape, axis=1)
    else:
        extent = strides = np.ones((len(columns.rank), len(shape)), dtype=np.int64)
        odd = np.ones(len(columns.rank), dtype=bool)
    if odd.any():
        extent, strides = extent.copy(), strides.copy()
        for row in np.flatnonzero(odd).tolist():
            extent[row], strides[row] = _aligned(columns.rank[row], columns.pieces[row], shape, logical_shape)
    lower = coordinates(columns.source_offset, shape)
    outside = np.flatnonzero(np.any((lower < 0) | (lower + extent > shape), axis=1))
    if outside.size:
        raise OutOfBoundsError(f'rank {columns.rank[outside[0]]}: {columns.pieces[outside[0]]} reaches outside the '
                               f'full tensor of shape {tuple(logical_shape)}')
    return PieceTable(rank=columns.rank,
                      boxes=BoxSet(lower, lower + extent),
                      address=columns.dest_offset,
                      strides=strides,
                      scale=np.array([piece.scale for piece in columns.pieces]),
                      locations=[piece.locations for piece in columns.pieces])


def _aligned(rank, piece, shape, logical_shape) -> Tuple[Sequence[int], Sequence[int]]:
    """Extents and shard strides for each dimension of the full tensor, of a piece that lists them otherwise."""
    logical_strides = row_major_strides(shape)
    # Dimensions of more than one element have distinct strides, so a stride names its dimension.
    dim_by_stride = {stride: dim for dim, (stride, size) in enumerate(zip(logical_strides, shape)) if size > 1}
    extent, strides = [1] * len(shape), [0] * len(shape)
    for size, source_stride, dest_stride in zip(piece.shape, piece.source_strides, piece.dest_strides):
        if size == 1:
            continue
        dim = dim_by_stride.pop(source_stride, None)
        if dim is None:
            raise UnreadablePieceError(f'rank {rank}: {piece} is not a box of the full tensor of shape '
                                       f'{tuple(logical_shape)}: no dimension of it has stride {source_stride}')
        extent[dim], strides[dim] = size, dest_stride
    return extent, strides


def describe_box(boxes: BoxSet, index: int) -> str:
    spans = zip(boxes.lower[index].tolist(), boxes.upper[index].tolist())
    return '[' + ', '.join(f'{start}:{stop}' for start, stop in spans) + ']'


def element_offsets(shape: Sequence[int], offset: int, strides: Sequence[int]) -> np.ndarray:
    """Storage offsets of a strided view's elements in row-major order, int64 of shape (numel,)."""
    offsets = np.full((1, ) * len(shape), offset, dtype=np.int64)
    for dim, (size, stride) in enumerate(zip(shape, strides)):
        along = np.arange(size, dtype=np.int64) * stride
        offsets = offsets + along.reshape((1, ) * dim + (size, ) + (1, ) * (len(shape) - dim - 1))
    return offsets.reshape(-1)


def check_ranks(shard_shapes, pieces_by_rank) -> None:
    for rank in sorted(pieces_by_rank.keys() - shard_shapes.keys()):
        raise RankIdError(f'rank {rank} has pieces but no shard shape; shards are known for {sorted(shard_shapes)}')


def check_shards(shard_shapes, pieces_by_rank, columns: PieceColumns) -> None:
    """Each rank's pieces fill its shard: they add up to it, stay inside it and do not overlap there."""
    check_ranks(shard_shapes, pieces_by_rank)
    ranks = np.array(sorted(shard_shapes), dtype=np.int64)
    shard_numel = np.array([math.prod(shard_shapes[rank]) for rank in ranks.tolist()], dtype=np.int64)
    shard = np.searchsorted(ranks, columns.rank)
    held = np.zeros_like(shard_numel)
    np.add.at(held, shard, [piece.numel for piece in columns.pieces])
    for index in np.flatnonzero(held != shard_numel)[:1].tolist():
        rank = int(ranks[index])
        raise ShardSizeError(
            f'rank {rank}: its shard of shape {shard_shapes[rank]} has {shard_numel[index]} elements, '
            f'its pieces have {held[index]}')
    first = columns.dest_offset
    last = first + ((columns.shape - 1) * columns.dest_strides).sum(axis=1)
    outside = (first < 0) | (last >= shard_numel[shard]) | np.any(columns.dest_strides < 0, axis=1)
    for row in np.flatnonzero(outside)[:1].tolist():
        raise OutOfBoundsError(
            f'rank {columns.rank[row]}: {columns.pieces[row]} writes shard elements {first[row]} to '
            f'{last[row]}, outside the shard of {shard_numel[shard[row]]} elements')
    # Dense pieces, the common case, are apart where their address ranges are; others are looked at one by one.
    order = np.lexsort((first, shard))
    meets_next = (shard[order[1:]] == shard[order[:-1]]) & (first[order[1:]] <= last[order[:-1]])
    suspects = set(columns.rank[order[1:]][meets_next].tolist()) | set(columns.rank[~_dense(columns)].tolist())
    for rank in sorted(suspects):
        held_here = [piece for piece in pieces_by_rank[rank] if piece.numel]
        _check_pieces_apart(rank, held_here, shard_shapes[rank])


def _dense(columns: PieceColumns) -> np.ndarray:
    """Which pieces fill a run of shard addresses without gap or repetition."""
    strides = np.where(columns.shape > 1, columns.dest_strides, 0)
    order = np.argsort(strides, axis=1, kind='stable')
    strides = np.take_along_axis(strides, order, axis=1)
    sizes = np.take_along_axis(columns.shape, order, axis=1)
    # From the innermost dimension on, each one steps over all that the ones before it reach.
    reach = np.cumprod(sizes, axis=1) // sizes
    return np.all((sizes == 1) | (strides == reach), axis=1)


def _check_pieces_apart(rank, pieces, shard_shape) -> None:
    """No shard element is written twice, by one piece or by two."""
    boxes = lattice_boxes([piece.dest_offset for piece in pieces], [piece.shape for piece in pieces],
                          [piece.dest_strides for piece in pieces], row_major_strides(shard_shape))
    if boxes is not None:
        twice = boxes.first_overlap()
        if twice:
            raise OverlapError(
                f'rank {rank}: {pieces[twice[0]]} and {pieces[twice[1]]} write the same elements of the '
                'shard')
        return
    starts, lengths, owner = _runs(rank, pieces)
    order = np.argsort(starts, kind='stable')
    starts, stops, owner = starts[order], (starts + lengths)[order], owner[order]
    twice = np.flatnonzero(starts[1:] < stops[:-1])
    if twice.size:
        at = twice[0]
        raise OverlapError(f'rank {rank}: {pieces[owner[at]]} and {pieces[owner[at + 1]]} write the same element of '
                           f'the shard, {starts[at + 1]}')


def _runs(rank, pieces):
    """The contiguous address runs that pieces are made of: starts, lengths and the index of the piece."""
    starts, lengths, owner = [], [], []
    total = 0
    for index, piece in enumerate(pieces):
        dims = sorted((stride, size) for size, stride in zip(piece.shape, piece.dest_strides) if size > 1)
        length = 1
        while dims and dims[0][0] == length:
            length *= dims.pop(0)[1]
        total += piece.numel // length
        if total > ELEMENTWISE_LIMIT:
            raise UnreadablePieceError(f'rank {rank}: {piece} is scattered over its shard in too many runs to check '
                                       f'(limit {ELEMENTWISE_LIMIT})')
        first = element_offsets([size for _, size in dims], piece.dest_offset, [stride for stride, _ in dims])
        starts.append(first)
        lengths.append(np.full(first.size, length, dtype=np.int64))
        owner.append(np.full(first.size, index, dtype=np.int64))
    return np.concatenate(starts), np.concatenate(lengths), np.concatenate(owner)


def check_coverage(logical_shape, pieces_by_rank, columns: PieceColumns) -> None:
    """Every element of the tensor is held, and each piece names exactly the ranks that hold its elements."""
    try:
        table = piece_table(columns, logical_shape)
    except UnreadablePieceError:
        _check_coverage_elementwise(logical_shape, pieces_by_rank)
        return
    cells, cell_index, row_index = disjoint_cells(table.boxes)
    if sum(cells.volumes().tolist()) != math.prod(logical_shape):
        shape = grid_shape(logical_shape)
        corner = [start for start, _ in min(cells.uncovered(shape))]
        raise _coverage_error(logical_shape, sum(np.multiply(corner, row_major_strides(shape)).tolist()))
    check_cell_holders(table, cells, cell_index, row_index)


def _coverage_error(logical_shape, offset) -> CoverageError:
    return CoverageError(f'no rank holds the element at flat offset {offset} of the parameter of shape '
                         f'{tuple(logical_shape)}, among others, so its shards do not make it up')


def check_cell_holders(table: PieceTable, cells: BoxSet, cell_index: np.ndarray, row_index: np.ndarray) -> None:
    """Each piece names exactly the ranks that hold its elements.

    ``cells`` and the index arrays are the ``disjoint_cells`` of the table's boxes.
    """
    holders = table.holders_by_cell(cell_index, row_index, len(cells.lower))
    for cell, row in zip(cell_index.tolist(), row_index.tolist()):
        if table.locations[row] != holders[cell]:
            raise _holder_error(table.describe(row), table.locations[row], describe_box(cells, cell), holders[cell])


def _holder_error(who, locations, where, holders) -> HolderError:
    return HolderError(f'{who} names the holders {sorted(locations)}, but {where} is held by {sorted(holders)}; all '
                       'elements of a piece must have the same holders')


def uncovered_offsets(logical_shape, pieces_by_rank) -> List[int]:
    """Flat offsets of all elements that no rank holds, ascending."""
    shape = grid_shape(logical_shape)
    strides = row_major_strides(shape)
    try:
        boxes = piece_table(piece_columns(pieces_by_rank), logical_shape).boxes
    except UnreadablePieceError:
        held = np.zeros(_walkable_numel(logical_shape), dtype=bool)
        for rank, pieces in pieces_by_rank.items():
            for piece in pieces:
                held[_source_offsets(rank, piece, logical_shape)] = True
        return np.flatnonzero(~held).tolist()
    if boxes.covers(shape):
        return []
    holes = [
        element_offsets([stop - start for start, stop in hole],
                        sum(start * stride for (start, _), stride in zip(hole, strides)), strides)
        for hole in boxes.uncovered(shape)
    ]
    return np.sort(np.concatenate(holes)).tolist()


def holders_by_offset(logical_shape, pieces_by_rank) -> Dict[int, Set[int]]:
    """For each held element's flat offset, the ranks that hold it."""
    holders: Dict[int, Set[int]] = {}
    for rank, pieces in pieces_by_rank.items():
        for piece in pieces:
            for offset in _source_offsets(rank, piece, logical_shape).tolist():
                holders.setdefault(offset, set()).add(rank)
    return holders


def _check_coverage_elementwise(logical_shape, pieces_by_rank) -> None:
    missing = uncovered_offsets(logical_shape, pieces_by_rank)
    if missing:
        raise _coverage_error(logical_shape, missing[0])
    holders: Dict[int, FrozenSet[int]] = holders_by_offset(logical_shape, pieces_by_rank)
    for rank, pieces in pieces_by_rank.items():
        for piece in pieces:
            for offset in _source_offsets(rank, piece, logical_shape).tolist():
                if piece.locations != holders[offset]:
                    raise _holder_error(f'rank {rank}: {piece}', piece.locations, f'flat offset {offset}',
                                        holders[offset])


def _walkable_numel(logical_shape) -> int:
    numel = math.prod(logical_shape)
    if numel > ELEMENTWISE_LIMIT:
        raise UnreadablePieceError(f'a parameter of shape {tuple(logical_shape)} is too large to check element by '
                                   f'element (limit {ELEMENTWISE_LIMIT}), and its pieces are not boxes of it')
    return numel


def _source_offsets(rank, piece, logical_shape) -> np.ndarray:
    offsets = element_offsets(piece.shape, piece.source_offset, piece.source_strides)
    numel = math.prod(logical_shape)
    if offsets.size and (offsets.min() < 0 or offsets.max() >= numel):
        raise OutOfBoundsError(f'rank {rank}: {piece} covers flat offsets {offsets.min()} to {offsets.max()}, outside '
                               f'the full tensor of {numel} elements')
    return offsets
