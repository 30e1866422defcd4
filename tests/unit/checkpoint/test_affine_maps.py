# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Affine maps: builders, round trips, checks and refusals."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.affine import (AffineMapError, AffinePiece, CoverageError, HolderError, OutOfBoundsError,
                                         OverlapError, ParamAffineMap, RankIdError, ShardSizeError,
                                         UnreadablePieceError, block_gather_map, contiguous_split_map, flat_range_map,
                                         nest_affine_maps, replicated_map, segmented_map, sub_param_map)
from unit.checkpoint.affine_cases import (any_maps, assert_sound, labels, nested_parts, partitions, shapes,
                                          shard_labels, split_shapes, zero_ranges)


def held(map_):
    return {rank: shard_labels(map_, rank).tolist() for rank in map_.shard_shapes}


@given(st.data())
def test_a_contiguous_split_holds_numpy_splits(data):
    shape = data.draw(split_shapes)
    dim = data.draw(st.integers(0, len(shape) - 1))
    sizes = data.draw(partitions(shape[dim], data.draw(st.integers(1, 5))))
    map_ = contiguous_split_map(shape, sizes, dim)
    for rank, part in enumerate(np.split(labels(shape), np.cumsum(sizes)[:-1], axis=dim)):
        assert map_.shard_shapes[rank] == part.shape
        assert shard_labels(map_, rank).tolist() == part.reshape(-1).tolist()


@given(st.data())
def test_a_flat_range_holds_the_slice_of_the_flattened_parameter(data):
    shape = data.draw(shapes)
    ranges = data.draw(zero_ranges(math.prod(shape)))
    map_ = flat_range_map(shape, ranges)
    for location, (start, numel) in ranges.items():
        assert map_.shard_shapes[location] == (numel, )
        assert shard_labels(map_, location).tolist() == list(range(start, start + numel))
        assert len(map_.pieces_by_rank[location]) <= max(1, 2 * (len(shape) - 1) + 1)
        assert all(len(piece.shape) == len(shape) for piece in map_.pieces_by_rank[location])


@given(st.data())
def test_overlapping_flat_ranges_are_cut_where_their_holders_change(data):
    numel = data.draw(st.integers(0, 40))
    bounds = data.draw(st.lists(st.tuples(st.integers(0, numel), st.integers(0, numel)), min_size=1, max_size=5))
    ranges = {location: (min(pair), max(pair) - min(pair)) for location, pair in enumerate(bounds)}
    ranges[len(ranges)] = (0, numel)
    assert_sound(flat_range_map((numel, ), ranges))


@given(st.data())
def test_every_layout_is_sound_and_rebuilds_what_it_extracts(data):
    map_ = data.draw(any_maps(data.draw(shapes)))
    assert_sound(map_)
    full = torch.from_numpy(labels(map_.logical_shape).astype(np.float64))
    shards = {rank: map_.extract(full, rank) for rank in map_.shard_shapes}
    for rank, shard in shards.items():
        assert tuple(shard.shape) == map_.shard_shapes[rank]
        assert shard.reshape(-1).tolist() == shard_labels(map_, rank).tolist()
    assert torch.equal(map_.rebuild(shards), full)


@given(st.data())
def test_a_map_survives_its_dictionary_form_and_json(data):
    map_ = data.draw(any_maps(data.draw(shapes)))
    assert ParamAffineMap.from_dict(map_.to_dict()) == map_
    assert ParamAffineMap.from_dict(json.loads(json.dumps(map_.to_dict()))) == map_


@given(st.data())
def test_nesting_is_the_inner_map_applied_to_the_outer_shards(data):
    outer, inner = data.draw(nested_parts(data.draw(shapes)))
    nested = nest_affine_maps(outer, inner)
    assert nested.logical_shape == outer.logical_shape
    assert_sound(nested)
    for rank, inner_map in inner.items():
        shard = shard_labels(outer, rank)
        for location, shape in inner_map.shard_shapes.items():
            assert nested.shard_shapes[location] == shape
            assert shard_labels(nested, location).tolist() == shard[shard_labels(inner_map, location)].tolist()


@pytest.mark.parametrize('holder', [0, 3])
def test_one_location_may_hold_everything_under_any_id(holder):
    nested = nest_affine_maps(contiguous_split_map((4, 6), [4], partition_dim=0),
                              {0: flat_range_map((24, ), {holder: (0, 24)})})
    assert held(nested) == {holder: list(range(24))}


def test_a_scalar_nests():
    nested = nest_affine_maps(replicated_map((), 2), {
        0: flat_range_map((1, ), {
            5: (0, 1),
            6: (1, 0)
        }),
        1: flat_range_map((), {7: (0, 1)})
    })
    assert held(nested) == {5: [0], 6: [], 7: [0]}
    assert nested.pieces_by_rank[5][0].locations == {5, 7}


def test_replicas_stored_with_other_cuts_name_common_holders():
    nested = nest_affine_maps(replicated_map((2, 3), 2), {
        0: flat_range_map((6, ), {
            0: (0, 4),
            1: (4, 2)
        }),
        1: flat_range_map((6, ), {
            2: (0, 2),
            3: (2, 4)
        })
    })
    assert_sound(nested)
    assert held(nested) == {0: [0, 1, 2, 3], 1: [4, 5], 2: [0, 1], 3: [2, 3, 4, 5]}


@pytest.mark.parametrize('builder, arguments, expected', [
    (contiguous_split_map, ((5, ), [3, 2], 0), {0: [0, 1, 2], 1: [3, 4]}),
    (sub_param_map, ((6, ), [4, 2], [[2, 2], [1, 1]], 0), {0: [0, 1, 4], 1: [2, 3, 5]}),
    (segmented_map, ((6, ), [(4, False), (2, True)], 0, 2, [[1, 3]]), {0: [0, 4, 5], 1: [1, 2, 3, 4, 5]}),
    (block_gather_map, ((8, ), {0: [0, 2], 1: [3, 1]}, 2, 0), {0: [0, 1, 4, 5], 1: [6, 7, 2, 3]}),
    (flat_range_map, ((2, 3), {7: (0, 4), 9: (4, 2)}), {7: [0, 1, 2, 3], 9: [4, 5]}),
    (replicated_map, ((3, ), 2), {0: [0, 1, 2], 1: [0, 1, 2]}),
])  # yapf: disable
def test_builders_hold_what_their_docstrings_say(builder, arguments, expected):
    assert held(builder(*arguments)) == expected


def test_pieces_address_views_from_the_first_element_of_the_view():
    base = torch.arange(12.)
    map_ = contiguous_split_map((2, 3), [1, 1], 0)
    assert map_.extract(base[6:].view(2, 3), 1).tolist() == [[9., 10., 11.]]
    piece = map_.pieces_by_rank[1][0]
    assert piece.source_view(base[6:]).tolist() == [[9., 10., 11.]]
    assert piece.dest_view(base[3:6]).tolist() == [[3., 4., 5.]]


def test_a_scale_applies_to_the_shard_and_is_undone_by_rebuild():
    map_ = replicated_map((4, ), 2, scale=0.5)
    full = torch.tensor([2., 4., 6., 8.])
    shards = {rank: map_.extract(full, rank) for rank in range(2)}
    assert shards[1].tolist() == [1., 2., 3., 4.]
    assert torch.equal(map_.rebuild(shards), full)
    for power in (-1, -2):
        with pytest.raises(NotImplementedError, match='rank 0.*scaled'):
            map_.rebuild(shards, scale_power=power)
        with pytest.raises(NotImplementedError, match='scaled'):
            map_.extract(full, 0, scale_power=power)


def test_replicas_that_differ_are_refused_and_equal_nans_are_not():
    map_ = replicated_map((3, ), 2)
    same = torch.tensor([1., float('nan'), 3.])
    assert map_.rebuild({0: same, 1: same.clone()})[1].isnan()
    with pytest.raises(ValueError, match=r'rank 1.*index \(2,\)'):
        map_.rebuild({0: same, 1: torch.tensor([1., float('nan'), 4.])})


def piece(shape, source, dest, locations):
    return AffinePiece(shape, *source, *dest, locations)


FAULTS = [
    ('too few elements', ShardSizeError, 'rank 0.*has 3 elements.*its pieces have 2',
     ((3, ), {0: (3, )}, {0: [piece((2, ), (0, (1, )), (0, (1, )), [0])]})),
    ('past the shard', OutOfBoundsError, 'rank 0.*elements 1 to 2, outside the shard of 2',
     ((2, ), {0: (2, )}, {0: [piece((2, ), (0, (1, )), (1, (1, )), [0])]})),
    ('shard element twice', OverlapError, 'rank 0.*write the same element',
     ((4, ), {0: (4, )}, {0: [piece((3, ), (0, (1, )), (0, (1, )), [0]), piece((1, ), (3, (1, )), (1, (1, )), [0])]})),
    ('strided shard element twice', OverlapError, 'rank 0.*write the same element',
     ((2, 2), {0: (2, 2)}, {0: [piece((2, 1), (0, (2, 1)), (0, (2, 1)), [0]),
                                piece((2, 1), (1, (2, 1)), (0, (2, 1)), [0])]})),
    ('broadcast shard', OverlapError, 'rank 0',
     ((2, ), {0: (2, )}, {0: [piece((2, ), (0, (1, )), (0, (0, )), [0])]})),
    ('past the parameter', OutOfBoundsError, r'rank 0.*outside the full tensor of shape \(2,\)',
     ((2, ), {0: (2, )}, {0: [piece((2, ), (1, (1, )), (0, (1, )), [0])]})),
    ('hole', CoverageError, 'no rank holds the element at flat offset 2',
     ((3, ), {0: (2, )}, {0: [piece((2, ), (0, (1, )), (0, (1, )), [0])]})),
    ('replica not named', HolderError, r'names the holders \[0\].*held by \[0, 1\]',
     ((2, ), {0: (2, ), 1: (2, )}, {rank: [piece((2, ), (0, (1, )), (0, (1, )), [0])] for rank in (0, 1)})),
    ('holder not there', HolderError, r'names the holders \[0, 7\].*held by \[0\]',
     ((2, ), {0: (2, )}, {0: [piece((2, ), (0, (1, )), (0, (1, )), [0, 7])]})),
    ('rank without shard', RankIdError, 'rank 4 has pieces but no shard shape',
     ((2, ), {0: (2, )}, {0: [piece((2, ), (0, (1, )), (0, (1, )), [0])], 4: []})),
    ('shard without pieces', ShardSizeError, 'rank 1.*has 2 elements.*its pieces have 0',
     ((2, ), {0: (2, ), 1: (2, )}, {0: [piece((2, ), (0, (1, )), (0, (1, )), [0])]})),
]  # yapf: disable


@pytest.mark.parametrize('error, message, arguments', [fault[1:] for fault in FAULTS],
                         ids=[fault[0] for fault in FAULTS])
def test_a_contradictory_map_is_refused_by_the_kind_of_its_fault(error, message, arguments):
    with pytest.raises(error, match=message):
        ParamAffineMap(*arguments).validate_coverage()
    assert issubclass(error, AffineMapError) and issubclass(error, ValueError)


@st.composite
def shards_of_random_pieces(draw):
    """One shard of a flat parameter, made of pieces with strides of any kind; mostly contradictory."""
    numel = draw(st.integers(1, 12))
    pieces, total = [], 0
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        strides = [draw(st.integers(0, 6)) for _ in shape]
        pieces.append(piece(shape, (0, strides), (draw(st.integers(0, 4)), strides), [0]))
        total += math.prod(shape)
    numel = draw(st.sampled_from([numel, total]))
    return ParamAffineMap((1000, ), {0: (numel, )}, {0: pieces})


@given(shards_of_random_pieces())
def test_a_shard_is_accepted_exactly_when_its_pieces_write_each_element_once(map_):
    written = []
    for held in map_.pieces_by_rank[0]:
        for index in np.ndindex(held.shape):
            written.append(held.dest_offset + sum(at * stride for at, stride in zip(index, held.dest_strides)))
    if sorted(written) == list(range(map_.shard_shapes[0][0])):
        map_.validate()
    else:
        with pytest.raises(AffineMapError, match='rank 0'):
            map_.validate()


@pytest.mark.parametrize('shape, strides', [((2, 3), (5, 0)), ((2, 2, 2), (5, 1, 1))])
def test_a_shard_that_repeats_elements_within_a_span_of_its_size_is_refused(shape, strides):
    source_strides = replicated_map(shape, 1).pieces_by_rank[0][0].source_strides
    with pytest.raises(OverlapError, match='rank 0'):
        ParamAffineMap(shape, {0: shape}, {0: [piece(shape, (0, source_strides), (0, strides), [0])]}).validate()


def test_a_piece_may_step_through_a_dimension_of_one_index_under_its_neighbours_stride():
    map_ = ParamAffineMap((3, 1), {0: (3, )}, {0: [piece((1, 3), (0, (1, 1)), (0, (3, 1)), [0])]})
    assert_sound(map_)
    assert held(map_) == {0: [0, 1, 2]}


def test_a_rank_may_hold_an_element_twice():
    map_ = block_gather_map((4, ), {0: [0, 1, 0]}, 2, 0)
    map_.validate_coverage()
    assert held(map_) == {0: [0, 1, 2, 3, 0, 1]}
    full = torch.arange(4.)
    assert torch.equal(map_.rebuild({0: map_.extract(full, 0)}), full)
    with pytest.raises(ValueError, match='differs'):
        map_.rebuild({0: torch.tensor([0., 1., 2., 3., 0., 9.])})


def test_columns_stored_alternately_are_checked_by_their_strides():
    # 58 million elements in runs of one: far above what is walked element by element.
    rows, columns = 7168, 4096
    map_ = ParamAffineMap((rows, 2 * columns), {0: (rows, 2 * columns)}, {
        0:
        [piece((rows, columns), (half * columns, (2 * columns, 1)), (half, (2 * columns, 2)), [0]) for half in (0, 1)]
    })
    map_.validate_coverage()
    twice = [
        map_.pieces_by_rank[0][0],
        piece((rows, columns), (columns, (2 * columns, 1)), (0, (2 * columns, 2)), [0])
    ]
    with pytest.raises(OverlapError, match='rank 0'):
        ParamAffineMap(map_.logical_shape, map_.shard_shapes, {0: twice}).validate()


@pytest.mark.parametrize('shape, source, dest', [
    ((2, ), (1 << 63, (1, )), (0, (1, ))),
    ((2, ), (0, (1, )), (0, (1 << 63, ))),
    ((1 << 32, 1 << 32), (0, (0, 0)), (0, (0, 0))),
])
def test_numbers_beyond_64_bits_are_refused_by_name(shape, source, dest):
    with pytest.raises(AffineMapError, match='rank 0'):
        ParamAffineMap((4, ), {0: (2, )}, {0: [piece(shape, source, dest, [0])]}).validate()


def test_a_parameter_beyond_64_bits_is_refused():
    with pytest.raises(AffineMapError, match='beyond 2.*62 elements'):
        replicated_map((1 << 32, 1 << 32), 1).validate_coverage()


def test_a_rank_without_pieces_survives_the_dictionary_form_and_one_without_shard_is_refused():
    map_ = ParamAffineMap((2, ), {0: (2, ), 1: (0, )}, {0: [piece((2, ), (0, (1, )), (0, (1, )), [0])]})
    assert ParamAffineMap.from_dict(map_.to_dict()) == map_
    orphan = ParamAffineMap((2, ), {0: (2, )}, {5: map_.pieces_by_rank[0]})
    with pytest.raises(RankIdError, match='rank 5'):
        orphan.to_dict()
    with pytest.raises(RankIdError, match='rank 5'):
        nest_affine_maps(orphan, {0: flat_range_map((2, ), {0: (0, 2)})})


def test_nothing_nests_in_a_map_without_shards():
    empty = ParamAffineMap((0, ), {}, {})
    assert nest_affine_maps(empty, {}) == empty
    with pytest.raises(RankIdError, match='no shard'):
        empty.rebuild({})


def test_replicas_cut_along_rows_and_along_columns_meet_in_cells():
    size = 64
    nested = nest_affine_maps(
        replicated_map((size, size), 2), {
            0: contiguous_split_map((size, size), [1] * size, 0),
            1: shifted(contiguous_split_map((size, size), [1] * size, 1), size)
        })
    assert all(len(pieces) == size for pieces in nested.pieces_by_rank.values())
    nested.validate_coverage()
    assert nested.pieces_by_rank[3][5].locations == {3, size + 5}


def shifted(map_, by):
    """The same layout at locations ``by`` further on."""
    return ParamAffineMap(map_.logical_shape, {
        rank + by: shape
        for rank, shape in map_.shard_shapes.items()
    }, {
        rank + by: [
            piece(held.shape, (held.source_offset, held.source_strides),
                  (held.dest_offset, held.dest_strides), [rank + by]) for held in pieces
        ]
        for rank, pieces in map_.pieces_by_rank.items()
    })


def test_coverage_faults_are_assertion_errors_too():
    assert issubclass(CoverageError, AssertionError) and issubclass(HolderError, AssertionError)


@pytest.mark.parametrize('scale', [0.0, float('inf'), float('nan')])
def test_a_scale_that_cannot_be_undone_is_refused(scale):
    with pytest.raises(ValueError, match='scale'):
        replicated_map((2, ), 1, scale=scale)


def test_bad_arguments_of_builders_are_refused():
    with pytest.raises(ShardSizeError, match=r'segment 0 has 4 elements.*\[1, 2\]'):
        segmented_map((4, ), [(4, False)], 0, 2, [[1, 2]])
    with pytest.raises(OutOfBoundsError, match=r'location 3.*\[2, 5\)'):
        flat_range_map((2, 2), {3: (2, 3)})
    outer = contiguous_split_map((4, ), [2, 2], 0)
    with pytest.raises(RankIdError, match=r'\[0, 1\].*\[0\]'):
        nest_affine_maps(outer, {0: flat_range_map((2, ), {0: (0, 2)})})
    with pytest.raises(RankIdError, match='location 0 already'):
        nest_affine_maps(outer, {rank: flat_range_map((2, ), {0: (0, 2)}) for rank in range(2)})
    with pytest.raises(ShardSizeError, match=r'sub-parameter 1 has 2 elements.*\[1\]'):
        sub_param_map((6, ), [4, 2], [[2, 2], [1]], 0)
    with pytest.raises(ShardSizeError, match='2 sub-parameters, but widths of 3'):
        sub_param_map((6, ), [4, 2], [[2, 2], [1, 1], [9, 9]], 0)
    with pytest.raises(UnreadablePieceError, match='outer rank 0, location 0.*contiguous range'):
        nest_affine_maps(replicated_map((2, 2), 1),
                         {0: ParamAffineMap((4, ), {0: (4, )}, {0: [piece((2, 2), (0, (1, 2)), (0, (2, 1)), [0])]})})
    with pytest.raises(ShardSizeError, match=r'outer rank 1.*\(2,\).*\(3,\)'):
        nest_affine_maps(outer, {rank: flat_range_map((2 + rank, ), {rank: (0, 2 + rank)}) for rank in range(2)})


def test_bad_shards_are_refused_by_rank():
    map_ = contiguous_split_map((4, ), [2, 2], 0)
    with pytest.raises(ShardSizeError, match='rank 1.*3 elements'):
        map_.rebuild({0: torch.zeros(2), 1: torch.zeros(3)})
    with pytest.raises(RankIdError, match='rank 1'):
        map_.rebuild({0: torch.zeros(2)})
    with pytest.raises(RankIdError, match='rank 2'):
        map_.extract(torch.zeros(4), 2)
    with pytest.raises(ShardSizeError, match='5 elements'):
        map_.extract(torch.zeros(5), 0)


def diagonal_map(logical_shape):
    """A shard that is the diagonal of a square parameter and one that is the rest of a 2 x 2: not boxes."""
    size = logical_shape[0]
    return ParamAffineMap(logical_shape, {
        0: (size, ),
        1: (size * size - size, )
    }, {
        0: [piece((size, ), (0, (size + 1, )), (0, (1, )), [0])],
        1: [piece((size - 1, size), (1, (size + 1, 1)), (0, (size, 1)), [1])]
    })


def test_pieces_that_are_no_boxes_are_checked_element_by_element():
    map_ = diagonal_map((3, 3))
    assert_sound(map_)
    assert map_.uncovered_offsets() == []
    partial = ParamAffineMap((3, 3), {0: (3, )}, {0: map_.pieces_by_rank[0]})
    assert partial.uncovered_offsets() == [1, 2, 3, 5, 6, 7]
    with pytest.raises(CoverageError, match='element at flat offset 1'):
        partial.validate_coverage()


def test_pieces_that_are_no_boxes_of_a_huge_parameter_are_refused():
    with pytest.raises(UnreadablePieceError, match='too large'):
        diagonal_map((1 << 13, 1 << 13)).validate_coverage()


@given(st.data())
def test_uncovered_offsets_and_holders_are_the_elementwise_ones(data):
    map_ = data.draw(any_maps(data.draw(shapes)))
    dropped = data.draw(st.sets(st.sampled_from(sorted(map_.shard_shapes))))
    rest = ParamAffineMap(map_.logical_shape, {
        rank: shape
        for rank, shape in map_.shard_shapes.items() if rank not in dropped
    }, {
        rank: pieces
        for rank, pieces in map_.pieces_by_rank.items() if rank not in dropped
    })
    holders = {}
    for rank in rest.shard_shapes:
        for label in shard_labels(rest, rank).tolist():
            holders.setdefault(label, set()).add(rank)
    assert rest.holders() == holders
    assert rest.uncovered_offsets() == [label for label in range(map_.numel) if label not in holders]
