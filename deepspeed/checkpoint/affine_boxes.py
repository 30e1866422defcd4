# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Arithmetic on sets of boxes of a row-major tensor: which overlap, what they leave uncovered, how they overlay.

A box set of n boxes in d dimensions is a pair of int64 arrays of shape (n, d): ``lower`` (the first coordinate) and
``upper`` (one past the last). All sets here have at least one dimension: a 0-d tensor is the one element of a tensor
of shape (1,), see :func:`grid_shape`. Cost follows the number of boxes and of overlapping pairs, never the number of
elements in a box.
"""

import math
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

__all__ = [
    'BoxJoin', 'BoxSet', 'chunk_bounds', 'coordinates', 'disjoint_cells', 'lattice_boxes', 'flat_range_boxes',
    'grid_shape', 'row_major_strides'
]

# Candidate pairs looked at together: bounds the memory of a join to some 100 MB whatever the number of boxes.
_PAIRS_PER_BLOCK = 1 << 21

_NO_END = 1 << 62

# A box as plain ints, (start, stop) per dimension, for the few boxes that are cut one by one.
Span = Tuple[Tuple[int, int], ...]


def row_major_strides(shape: Sequence[int]) -> Tuple[int, ...]:
    """Strides in elements of a densely packed tensor: (2, 3, 4) gives (12, 4, 1)."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def grid_shape(shape: Sequence[int]) -> Tuple[int, ...]:
    """``shape`` itself, or (1,) for the 0-d shape, so that box arrays always have a column."""
    return tuple(shape) or (1, )


def chunk_bounds(size: int, parts: int, index: int, padded_size: int = 0) -> Tuple[int, int]:
    """(start, stop) of one chunk, as ``torch.chunk`` cuts: ceil(size / parts) each, the last ones shorter or empty.

    With ``padded_size``, chunks are as long as those of that many indices. 5 in 3 parts: (0, 2), (2, 4), (4, 5).
    """
    chunk = -(-max(size, padded_size) // parts)
    return min(index * chunk, size), min((index + 1) * chunk, size)


def coordinates(offsets: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Grid coordinates (n, d) of flat offsets (n,); an offset beyond the tensor gets one beyond its first size."""
    result = np.empty((len(offsets), len(shape)), dtype=np.int64)
    for dim, stride in enumerate(row_major_strides(shape)):
        # A stride is 0 in a tensor without elements only, where any answer is out of bounds.
        result[:, dim], offsets = np.divmod(offsets, max(stride, 1))
    return result


class BoxSet(NamedTuple):
    lower: np.ndarray
    upper: np.ndarray

    @classmethod
    def of(cls, lower: Sequence[Sequence[int]], extent: Sequence[Sequence[int]], ndim: int) -> 'BoxSet':
        lower = np.asarray(lower, dtype=np.int64).reshape(-1, ndim)
        return cls(lower, lower + np.asarray(extent, dtype=np.int64).reshape(-1, ndim))

    @property
    def extent(self) -> np.ndarray:
        return self.upper - self.lower

    def volumes(self) -> np.ndarray:
        """Elements in each box, shape (n,)."""
        return np.prod(np.maximum(self.extent, 0), axis=1)

    def solid(self) -> np.ndarray:
        """Which boxes have elements, bool of shape (n,)."""
        return np.all(self.upper > self.lower, axis=1)

    def take(self, index: np.ndarray) -> 'BoxSet':
        return BoxSet(self.lower[index], self.upper[index])

    def intersection(self, other: 'BoxSet') -> 'BoxSet':
        """Row by row; not solid where the two rows share nothing."""
        return BoxSet(np.maximum(self.lower, other.lower), np.minimum(self.upper, other.upper))

    def unique(self) -> Tuple['BoxSet', np.ndarray]:
        """The distinct boxes in ascending order of their corners, and for each box the index of its equal there."""
        rows, inverse = np.unique(np.concatenate(self, axis=1), axis=0, return_inverse=True)
        ndim = self.lower.shape[1]
        return BoxSet(rows[:, :ndim], rows[:, ndim:]), inverse.reshape(-1)

    def first_overlap(self) -> Optional[Tuple[int, int]]:
        """Indices of two boxes of the set that share an element, or None where all are disjoint."""
        for left, right in BoxJoin(self, self).blocks():
            twice = np.flatnonzero(left < right)
            if twice.size:
                return int(left[twice[0]]), int(right[twice[0]])
        return None

    def covers(self, shape: Sequence[int]) -> bool:
        """Whether the boxes, which lie inside ``shape`` and may overlap, leave none of its elements out."""
        distinct, _ = self.unique()
        if int(distinct.volumes().sum()) < math.prod(shape):
            return False
        return distinct.first_overlap() is None or not distinct.uncovered(shape)

    def uncovered(self, shape: Sequence[int]) -> List[Span]:
        """Disjoint boxes that fill what no box of the set covers of a tensor of this shape."""
        if 0 in shape:
            return []
        return _uncovered(tuple(shape), self.take(self.solid()))


def _uncovered(shape: Tuple[int, ...], boxes: BoxSet) -> List[Span]:
    # Between two neighbouring corners of dimension 0 the set of boxes is constant: solve each such slab in one
    # dimension less.
    if not len(boxes.lower):
        return [tuple((0, size) for size in shape)]
    starts, stops = boxes.lower[:, 0], boxes.upper[:, 0]
    cuts = np.unique(np.concatenate([[0, shape[0]], starts, stops]))
    holes = []
    for start, stop in zip(cuts[:-1].tolist(), cuts[1:].tolist()):
        active = np.flatnonzero((starts <= start) & (stops >= stop))
        if len(shape) > 1:
            rest = _uncovered(shape[1:], BoxSet(boxes.lower[active, 1:], boxes.upper[active, 1:]))
        else:
            rest = [] if active.size else [()]
        holes.extend(((start, stop), ) + hole for hole in rest)
    return holes


def lattice_boxes(offsets: Sequence[int],
                  shapes: Sequence[Sequence[int]],
                  strides: Sequence[Sequence[int]],
                  more_strides: Sequence[int] = ()) -> Optional[BoxSet]:
    """Strided sets of addresses, not below 0, as boxes of one grid, or None where they have no grid in common.

    All the strides, each dividing the next larger one, are those of such a grid: columns stored alternately, of
    strides (2 * n, 2), are boxes of a grid (rows, n, 2). ``more_strides`` may refine it.
    """
    steps = {stride for shape, held in zip(shapes, strides) for size, stride in zip(shape, held) if size > 1}
    steps = sorted(steps | set(more_strides) | {1}, reverse=True)
    if steps[-1] < 1 or any(outer % inner for outer, inner in zip(steps, steps[1:])):
        return None
    # The outermost dimension has no end.
    grid = (_NO_END, *(outer // inner for outer, inner in zip(steps, steps[1:])))
    dim_by_stride = {stride: dim for dim, stride in enumerate(steps)}
    lower = np.empty((len(offsets), len(grid)), dtype=np.int64)
    rest = np.array(offsets, dtype=np.int64)
    for dim, step in enumerate(steps):
        lower[:, dim], rest = np.divmod(rest, step)
    extent = np.ones_like(lower)
    for row, (shape, held) in enumerate(zip(shapes, strides)):
        for size, stride in zip(shape, held):
            if size > 1:
                dim = dim_by_stride[stride]
                if extent[row, dim] > 1:
                    return None
                extent[row, dim] = size
    return BoxSet(lower, lower + extent) if np.all(lower + extent <= grid) else None


class BoxJoin:
    """The pairs of a box of ``left`` and a box of ``right`` that share an element.

    Pairs that overlap along one dimension are found by sorting; the dimension taken is the one that leaves the
    fewest ``candidates``, so that the cost is about (n + m) log(n + m) + candidates. The interval from a box's first
    to its last element in row-major order serves as one more dimension: on it, boxes that come from cutting a
    flattened tensor are disjoint even where they meet in every other dimension.
    """

    def __init__(self, left: BoxSet, right: BoxSet):
        self._left_solid, self._right_solid = np.flatnonzero(left.solid()), np.flatnonzero(right.solid())
        self._left, self._right = left.take(self._left_solid), right.take(self._right_solid)
        self._intervals: Optional[_IntervalJoin] = None
        if self._left_solid.size and self._right_solid.size:
            joins = [_IntervalJoin(*intervals) for intervals in _intervals_by_dim(self._left, self._right)]
            self._intervals = min(joins, key=lambda join: join.pairs)

    @property
    def candidates(self) -> int:
        """How many pairs ``blocks`` has to look at: known before any of them is."""
        return self._intervals.pairs if self._intervals else 0

    def blocks(self) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
        """Index arrays (i, j) of the pairs, each pair once, in blocks of bounded size."""
        for i, j in self._intervals.blocks() if self._intervals else ():
            both = self._left.take(i).intersection(self._right.take(j)).solid()
            if both.any():
                yield self._left_solid[i[both]], self._right_solid[j[both]]

    def pairs(self) -> Tuple[np.ndarray, np.ndarray]:
        """All blocks in one."""
        blocks = [np.empty((2, 0), dtype=np.int64)] + [np.stack(block) for block in self.blocks()]
        i, j = np.concatenate(blocks, axis=1)
        return i, j


def _intervals_by_dim(left: BoxSet, right: BoxSet) -> Iterator[Tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    for dim in range(left.lower.shape[1]):
        yield left.lower[:, dim], left.upper[:, dim], right.lower[:, dim], right.upper[:, dim]
    strides = row_major_strides(np.maximum(left.upper.max(axis=0), right.upper.max(axis=0)).tolist())
    yield (left.lower @ strides, (left.upper - 1) @ strides + 1, right.lower @ strides,
           (right.upper - 1) @ strides + 1)


class _IntervalJoin:
    """The overlapping pairs of two interval sets: those where right starts within left, then the strict converse."""

    def __init__(self, left_start, left_stop, right_start, right_stop):
        self.left_order = np.argsort(left_start, kind='stable')
        self.right_order = np.argsort(right_start, kind='stable')
        left_sorted, right_sorted = left_start[self.left_order], right_start[self.right_order]
        self.right_first = np.searchsorted(right_sorted, left_start, 'left')
        self.right_count = np.searchsorted(right_sorted, left_stop, 'left') - self.right_first
        self.left_first = np.searchsorted(left_sorted, right_start, 'right')
        self.left_count = np.searchsorted(left_sorted, right_stop, 'left') - self.left_first
        self.pairs = int(self.right_count.sum() + self.left_count.sum())

    def blocks(self) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
        for i, position in _expanded(self.right_first, self.right_count):
            yield i, self.right_order[position]
        for j, position in _expanded(self.left_first, self.left_count):
            yield self.left_order[position], j


def _expanded(first: np.ndarray, count: np.ndarray) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
    """For every k, the pairs (k, first[k]), ..., (k, first[k] + count[k] - 1), in blocks of bounded size."""
    ends = np.cumsum(count)
    begin = 0
    while begin < len(count):
        done = int(ends[begin - 1]) if begin else 0
        stop = max(begin + 1, int(np.searchsorted(ends, done + _PAIRS_PER_BLOCK, 'right')))
        counts = count[begin:stop]
        index = np.repeat(np.arange(begin, stop), counts)
        if index.size:
            within = np.arange(index.size) - np.repeat(ends[begin:stop] - counts - done, counts)
            yield index, first[index] + within
        begin = stop


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> List[Tuple[Tuple[int, ...], Tuple[int, ...]]]:
    """Cut elements [start, stop) of the flattened tensor into boxes, each a (first coordinate, extents) pair.

    The boxes have the full rank, come in row-major order and are at most 2 * (ndim - 1) + 1: whole rows in the
    middle, what is left of a row before and after them, each cut again in one dimension less. For shape (3, 4),
    [2, 11) gives 0:1 x 2:4, then 1:2 x 0:4, then 2:3 x 0:3.
    """
    if stop <= start:
        return []
    if not shape:
        return [((), ())]
    # (Without elements in a row nothing lies in [start, stop): any divisor will do.)
    row = max(math.prod(shape[1:]), 1)
    first, last = -(-start // row), stop // row
    if first > last:
        # Both ends lie inside one row.
        return _boxes_of_row(shape, last, start - last * row, stop - last * row)
    boxes = _boxes_of_row(shape, first - 1, start - (first - 1) * row, row) if start % row else []
    if first < last:
        boxes.append(((first, ) + (0, ) * (len(shape) - 1), (last - first, ) + tuple(shape[1:])))
    if stop % row:
        boxes += _boxes_of_row(shape, last, 0, stop - last * row)
    return boxes


def _boxes_of_row(shape, row_index, start, stop):
    return [((row_index, ) + lower, (1, ) + extent) for lower, extent in flat_range_boxes(shape[1:], start, stop)]


def disjoint_cells(boxes: BoxSet) -> Tuple[BoxSet, np.ndarray, np.ndarray]:
    """Cut overlapping boxes along one another into disjoint cells.

    Returns the cells, in ascending order of their corners, and two index arrays (cell, box) with one entry for each
    cell that a box is made of, sorted by cell and then by box. Every box is exactly the union of its cells; where no
    two different boxes overlap, the cells are the distinct boxes. The cells depend on the set of boxes only, not on
    their order.
    """
    distinct, equal_to = boxes.unique()
    overlapping = _overlapping(distinct)
    alone = np.flatnonzero(distinct.solid() & ~overlapping)
    cut, cut_cell, cut_distinct = _cut_along_edges(distinct, np.flatnonzero(overlapping))
    lower = np.concatenate([distinct.lower[alone], cut.lower])
    upper = np.concatenate([distinct.upper[alone], cut.upper])
    cell_of = np.concatenate([np.arange(alone.size), alone.size + cut_cell])
    distinct_of = np.concatenate([alone, cut_distinct])

    order = np.lexsort(np.concatenate([lower, upper], axis=1).T[::-1])
    position = np.empty_like(order)
    position[order] = np.arange(order.size)

    # Every distinct box stands for all its equals: expand (cell, distinct) to (cell, box).
    by_distinct = np.argsort(equal_to, kind='stable')
    count = np.bincount(equal_to, minlength=len(distinct.lower))
    first = np.cumsum(count) - count
    pairs = [np.empty((2, 0), dtype=np.int64)]
    for entry, member in _expanded(first[distinct_of], count[distinct_of]):
        pairs.append(np.stack([position[cell_of[entry]], by_distinct[member]]))
    cell_index, box_index = np.concatenate(pairs, axis=1)
    final = np.lexsort((box_index, cell_index))
    return BoxSet(lower[order], upper[order]), cell_index[final], box_index[final]


def _overlapping(distinct: BoxSet) -> np.ndarray:
    """Which of these distinct boxes share an element with another one."""
    overlapping = np.zeros(len(distinct.lower), dtype=bool)
    for left, right in BoxJoin(distinct, distinct).blocks():
        overlapping[left[left != right]] = True
    return overlapping


def _cut_along_edges(distinct: BoxSet, chosen: np.ndarray) -> Tuple[BoxSet, np.ndarray, np.ndarray]:
    ndim = distinct.lower.shape[1]
    cells = sorted(_swept_cells([(_span(distinct, box), box) for box in chosen.tolist()]))
    corners = np.asarray([span for span, _ in cells], dtype=np.int64).reshape(-1, ndim, 2)
    entries = [(index, box) for index, (_, holders) in enumerate(cells) for box in holders]
    cell_index, box_index = np.asarray(entries, dtype=np.int64).reshape(-1, 2).T
    return BoxSet(corners[:, :, 0], corners[:, :, 1]), cell_index, box_index


def _span(boxes: BoxSet, index: int) -> Span:
    return tuple(zip(boxes.lower[index].tolist(), boxes.upper[index].tolist()))


def _swept_cells(boxes: List[Tuple[Span, int]]) -> List[Tuple[Span, Tuple[int, ...]]]:
    """Cells of the given (span, number) boxes, each with the numbers of the boxes that cover it, ascending.

    A sweep along dimension 0: between two neighbouring edges the boxes present are constant and are cut in one
    dimension less. A cell that is the same in the next slab goes on there, so edges elsewhere do not cut it.
    """
    edges: Dict[int, Tuple[List, List]] = {}
    for span, number in boxes:
        (start, stop), rest = span[0], span[1:]
        edges.setdefault(start, ([], []))[0].append((rest, number))
        edges.setdefault(stop, ([], []))[1].append((rest, number))
    present: set = set()
    begun: Dict[Tuple[Span, Tuple[int, ...]], int] = {}
    cells = []
    for edge in sorted(edges):
        opening, closing = edges[edge]
        present.difference_update(closing)
        present.update(opening)
        slab = _slab_cells(sorted(present, key=lambda box: box[1]))
        for cell in [cell for cell in begun if cell not in slab]:
            rest, holders = cell
            cells.append((((begun.pop(cell), edge), ) + rest, holders))
        for cell in slab:
            begun.setdefault(cell, edge)
    return cells


def _slab_cells(present: List[Tuple[Span, int]]) -> Dict[Tuple[Span, Tuple[int, ...]], None]:
    if not present:
        return {}
    if not present[0][0]:
        return {((), tuple(number for _, number in present)): None}
    return dict.fromkeys(_swept_cells(present))
