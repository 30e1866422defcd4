# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Box arithmetic against boolean masks of small grids."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint import affine_boxes
from deepspeed.checkpoint.affine_boxes import BoxJoin, BoxSet, disjoint_cells, flat_range_boxes


@st.composite
def grids(draw):
    return tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))


@st.composite
def box_sets(draw, shape, max_size=7):
    spans = st.tuples(*(st.tuples(st.integers(0, size), st.integers(0, size)) for size in shape))
    boxes = draw(st.lists(spans, max_size=max_size))
    lower = [[min(span) for span in box] for box in boxes]
    extent = [[max(span) - min(span) for span in box] for box in boxes]
    return BoxSet.of(lower, extent, len(shape))


def masks(shape, boxes):
    result = []
    for lower, upper in zip(*boxes):
        mask = np.zeros(shape, dtype=bool)
        mask[tuple(slice(start, stop) for start, stop in zip(lower, upper))] = True
        result.append(mask)
    return result


@given(st.data())
def test_a_join_yields_each_overlapping_pair_once(data):
    shape = data.draw(grids())
    left, right = data.draw(box_sets(shape)), data.draw(box_sets(shape))
    join = BoxJoin(left, right)
    found = list(zip(*(index.tolist() for index in join.pairs())))
    expected = [(i, j)
                for (i, a), (j, b) in itertools.product(enumerate(masks(shape, left)), enumerate(masks(shape, right)))
                if (a & b).any()]
    assert sorted(found) == expected
    assert join.candidates >= len(found)


def test_blocks_of_a_join_are_bounded_and_complete(monkeypatch):
    monkeypatch.setattr(affine_boxes, '_PAIRS_PER_BLOCK', 5)
    rows = BoxSet.of([[row, 0] for row in range(6)], [[1, 4]] * 6, 2)
    columns = BoxSet.of([[0, column] for column in range(4)], [[6, 1]] * 4, 2)
    blocks = list(BoxJoin(rows, columns).blocks())
    assert max(len(i) for i, _ in blocks) <= 5
    assert sorted(pair for i, j in blocks
                  for pair in zip(i.tolist(), j.tolist())) == list(itertools.product(range(6), range(4)))


def test_boxes_cut_from_a_flattened_tensor_cost_no_more_pairs_than_meet():
    # In every dimension by itself these ranges overlap all over; as ranges of the flattened tensor they do not.
    boxes = [flat_range_boxes((2, 3, 64), start, start + 3) for start in range(0, 384, 3)]
    lower, extent = zip(*itertools.chain(*boxes))
    cut = BoxSet.of(lower, extent, 3)
    assert BoxJoin(cut, cut).candidates == len(cut.lower)


@given(st.data())
def test_coverage_is_that_of_the_union(data):
    shape = data.draw(grids())
    boxes = data.draw(box_sets(shape))
    union = np.zeros(shape, dtype=bool)
    for mask in masks(shape, boxes):
        union |= mask
    assert boxes.covers(shape) == union.all()
    filled = union.copy()
    for hole in boxes.uncovered(shape):
        region = filled[tuple(slice(start, stop) for start, stop in hole)]
        assert region.size and not region.any()
        region[...] = True
    assert filled.all()


@given(st.data())
def test_cells_are_disjoint_and_make_up_every_box(data):
    shape = data.draw(grids())
    boxes = data.draw(box_sets(shape))
    cells, cell_index, box_index = disjoint_cells(boxes)
    cell_masks = masks(shape, cells)
    assert all(mask.any() for mask in cell_masks)
    assert sum(cell_masks, np.zeros(shape, dtype=int)).max(initial=0) <= 1
    for box, mask in enumerate(masks(shape, boxes)):
        of_box = sum((cell_masks[cell] for cell in cell_index[box_index == box]), np.zeros(shape, dtype=int))
        assert np.array_equal(of_box, mask)
    entries = list(zip(cell_index.tolist(), box_index.tolist()))
    assert entries == sorted(set(entries))


@given(st.data())
def test_cells_do_not_depend_on_the_order_of_the_boxes(data):
    shape = data.draw(grids())
    boxes = data.draw(box_sets(shape))
    order = np.array(data.draw(st.permutations(range(len(boxes.lower)))), dtype=int)
    cells, shuffled = disjoint_cells(boxes)[0], disjoint_cells(boxes.take(order))[0]
    assert np.array_equal(cells.lower, shuffled.lower) and np.array_equal(cells.upper, shuffled.upper)


@given(st.data())
def test_boxes_of_a_flat_range_are_its_elements_in_order(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=4)))
    total = int(np.prod(shape, dtype=int))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, total), st.integers(0, total))))
    flat = np.arange(total).reshape(shape)
    boxes = flat_range_boxes(shape, start, stop)
    listed = [
        flat[tuple(slice(first, first + size) for first, size in zip(lower, extent))].reshape(-1)
        for lower, extent in boxes
    ]
    assert np.concatenate([np.empty(0, dtype=int)] + listed).tolist() == list(range(start, stop))
    assert all(len(part) for part in listed)
    assert len(boxes) <= max(1, 2 * (len(shape) - 1) + 1)
