# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Strided copies as columns, and joining those that continue one another in both shards."""

from typing import List, NamedTuple, Tuple

import numpy as np


class SegmentTable(NamedTuple):
    """n strided copies of up to d dimensions: int64 columns of shape (n,) or (n, d), as in TransferSegment."""
    source_rank: np.ndarray
    source_offset: np.ndarray
    source_strides: np.ndarray
    target_rank: np.ndarray
    target_offset: np.ndarray
    target_strides: np.ndarray
    shape: np.ndarray

    def take(self, index: np.ndarray) -> 'SegmentTable':
        return SegmentTable(*(column[index] for column in self))

    @property
    def count(self) -> int:
        return len(self.source_rank)

    def sorted(self) -> 'SegmentTable':
        """In the order of target rank, target offset, source rank, source offset."""
        return self.take(np.lexsort((self.source_offset, self.source_rank, self.target_offset, self.target_rank)))

    def dims(self) -> np.ndarray:
        """How many trailing columns of each row carry dimensions, at least 1, once ``collapse`` aligned them."""
        used = np.argmax(self.shape != 1, axis=1)
        ndim = self.shape.shape[1]
        return np.where(np.all(self.shape == 1, axis=1), 1, ndim - used)

    def rows(self) -> List[Tuple]:
        """Python values in the order of TransferSegment's fields; leading dimensions of size 1 are left out."""
        skips = self.shape.shape[1] - self.dims()
        return list(
            zip(self.source_rank.tolist(), self.source_offset.tolist(), _row_tuples(self.source_strides, skips),
                self.target_rank.tolist(), self.target_offset.tolist(), _row_tuples(self.target_strides, skips),
                _row_tuples(self.shape, skips)))


def _row_tuples(rows: np.ndarray, skips: np.ndarray) -> List[Tuple[int, ...]]:
    """Each row as a tuple, without its first ``skips`` values."""
    if len(rows) and np.all(rows == rows[0]) and np.all(skips == skips[0]):
        # As in a reshard into equal parts: one tuple instead of a million spares memory and garbage collection.
        return [tuple(rows[0, skips[0]:].tolist())] * len(rows)
    return [tuple(row[skip:]) for row, skip in zip(rows.tolist(), skips.tolist())]


def coalesce(table: SegmentTable, max_passes: int) -> SegmentTable:
    """Join copies wherever both their shard addresses continue, then write each with as few dimensions as it needs.

    Two copies with the same strides join along a dimension when one begins where the other ends in both shards. A
    dimension is dropped when in both shards it continues the next one, so a copy that is contiguous on both sides
    ends up with one dimension, whatever box it came from, and then joins its neighbours. The result is sorted and
    depends on the set of copies only.
    """
    table = table.take(np.lexsort((table.target_rank, table.source_rank)))
    same = (table.source_rank[1:] == table.source_rank[:-1]) & (table.target_rank[1:] == table.target_rank[:-1])
    # A pair of ranks with a single copy, which is most of them in a large reshard, has nothing to join.
    several = np.zeros(table.count, dtype=bool)
    several[1:] |= same
    several[:-1] |= same
    # Boxes first: the end of a row joined to the start of the next one would no longer join along the rows.
    joined = _merged(_distinct_dims(table.take(several)), max_passes, within_rows=True)
    joined = _merged(collapse(_merged(joined, max_passes)), max_passes)
    single = collapse(table.take(~several))
    return SegmentTable(*(np.concatenate(columns) for columns in zip(joined, single))).sorted()


def _distinct_dims(table: SegmentTable) -> SegmentTable:
    """Of dimensions that step alike on both sides, as those around a size of 1 do, only the outermost one steps.

    Otherwise copies that continue along one could be joined along the other, and would then fit no third one.
    """
    shape, source_strides, target_strides = (column.copy()
                                             for column in (table.shape, table.source_strides, table.target_strides))
    for dim in reversed(range(1, shape.shape[1])):
        alike = (source_strides[:, dim] == source_strides[:, dim - 1]) & (target_strides[:, dim]
                                                                          == target_strides[:, dim - 1])
        shape[alike, dim - 1] *= shape[alike, dim]
        shape[alike, dim] = 1
        source_strides[alike, dim] = target_strides[alike, dim] = 0
    return table._replace(shape=shape, source_strides=source_strides, target_strides=target_strides)


def _merged(table: SegmentTable, max_passes: int, within_rows: bool = False) -> SegmentTable:
    for _ in range(max_passes):
        before = table.count
        for dim in reversed(range(table.shape.shape[1])):
            table = _merge_along(table, dim, within_rows)
        if table.count == before:
            break
    return table


def _merge_along(table: SegmentTable, dim: int, within_rows: bool) -> SegmentTable:
    """Join copies along one dimension; ``within_rows``, only those in the same row of the next outer dimension."""
    if table.count < 2:
        return table
    source_step, target_step = table.source_strides[:, dim], table.target_strides[:, dim]
    # Along a chain source and target addresses grow by k * source_step and k * target_step for the same k, so this
    # difference, like the remainder of the address, is the same in all of it. (Products may wrap around: equal
    # values stay equal, and what follows compares the addresses themselves.)
    difference = table.target_offset * source_step - table.source_offset * target_step
    remainder = table.target_offset % np.maximum(target_step, 1)
    other_shape = table.shape.copy()
    other_shape[:, dim] = 0
    columns = [table.source_rank, table.target_rank, difference, remainder]
    if within_rows:
        columns += [
            table.source_offset // _next_larger(table.source_strides, source_step),
            table.target_offset // _next_larger(table.target_strides, target_step)
        ]
    keys = np.concatenate([np.stack(columns, axis=1), table.source_strides, table.target_strides, other_shape], axis=1)
    order = np.lexsort((table.target_offset, *keys.T))
    table, keys = table.take(order), keys[order]
    size = table.shape[:, dim]
    follows = np.all(keys[1:] == keys[:-1], axis=1)
    follows &= table.source_offset[1:] == (table.source_offset + size * table.source_strides[:, dim])[:-1]
    follows &= table.target_offset[1:] == (table.target_offset + size * table.target_strides[:, dim])[:-1]
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    joined = table.take(first)
    joined.shape[:, dim] = np.add.reduceat(size, first)
    return joined


def _next_larger(strides: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Row by row the smallest stride above ``step``."""
    return np.where(strides > step[:, None], strides, np.iinfo(np.int64).max).min(axis=1)


def collapse(table: SegmentTable) -> SegmentTable:
    """Drop dimensions of size 1, join each dimension to the next where both sides allow it, and align to the right.

    Columns left of a row's dimensions have size 1 and stride 0. A copy of one element has one dimension, of stride 1.
    """
    count, ndim = table.shape.shape
    rows = np.arange(count)
    shape = np.ones_like(table.shape)
    source_strides, target_strides = np.zeros_like(table.shape), np.zeros_like(table.shape)
    top = np.full(count, ndim)
    for dim in reversed(range(ndim)):
        size = table.shape[:, dim]
        source_step, target_step = table.source_strides[:, dim], table.target_strides[:, dim]
        inner = np.minimum(top, ndim - 1)
        continues = (top < ndim) & (size > 1)
        continues &= source_step == source_strides[rows, inner] * shape[rows, inner]
        continues &= target_step == target_strides[rows, inner] * shape[rows, inner]
        shape[rows[continues], inner[continues]] *= size[continues]
        opens = (size > 1) & ~continues
        top[opens] -= 1
        shape[rows[opens], top[opens]] = size[opens]
        source_strides[rows[opens], top[opens]] = source_step[opens]
        target_strides[rows[opens], top[opens]] = target_step[opens]
    single = top == ndim
    source_strides[single, -1] = target_strides[single, -1] = 1
    return table._replace(shape=shape, source_strides=source_strides, target_strides=target_strides)


def serialized_bytes(table: SegmentTable, logical_shape) -> int:
    """Length of the plan's compact JSON form, without writing it."""
    dims = table.dims()
    carried = np.arange(table.shape.shape[1]) >= (table.shape.shape[1] - dims)[:, None]
    digits = sum(int(_text_width(column).sum()) for column in table if column.ndim == 1)
    digits += sum(int(_text_width(column)[carried].sum()) for column in table if column.ndim == 2)
    punctuation = len('{"shape":[],"source":[,,[]],"target":[,,[]]}') * table.count + int(3 * (dims - 1).sum())
    header = len('{"logical_shape":[],"segments":[]}') + len(','.join(map(str, logical_shape)))
    return header + digits + punctuation + max(table.count - 1, 0)


def _text_width(values: np.ndarray) -> np.ndarray:
    powers = 10**np.arange(1, 19, dtype=np.int64)
    return np.searchsorted(powers, np.abs(values), 'right') + 1 + (values < 0)
