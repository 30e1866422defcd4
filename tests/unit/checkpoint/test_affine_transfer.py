# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The planner against the label oracle, and its refusals."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.affine import (AffinePiece, ParamAffineMap, contiguous_split_map, flat_range_map,
                                         nest_affine_maps, replicated_map)
from deepspeed.checkpoint.affine_transfer import (AffineTransferError, InvalidMapError, InvalidReplicaPolicyError,
                                                  PlanBudget, TransferSegment, UnsupportedLayoutError, plan_model,
                                                  plan_transfer)
from unit.checkpoint.affine_cases import any_maps, run_plan, shapes, shard_labels


@given(st.data())
def test_every_target_element_comes_from_a_shard_that_holds_it(data):
    shape = data.draw(shapes)
    source_map, target_map = data.draw(any_maps(shape)), data.draw(any_maps(shape))
    plan = plan_transfer(target_map, source_map)
    for rank, received in run_plan(plan, source_map, target_map).items():
        assert received.tolist() == shard_labels(target_map, rank).tolist()
    assert plan.moved_elements == sum(math.prod(shape) for shape in target_map.shard_shapes.values())
    assert plan.source_shard_shapes == source_map.shard_shapes
    assert plan.target_shard_shapes == target_map.shard_shapes
    assert plan.statistics.segments == len(plan.segments)
    assert plan.statistics.plan_bytes == len(json.dumps(plan.to_dict(), separators=(',', ':')))


@given(st.data())
def test_a_plan_depends_on_the_maps_and_not_on_the_order_of_their_pieces(data):
    shape = data.draw(shapes)
    source_map, target_map = data.draw(any_maps(shape)), data.draw(any_maps(shape))

    def shuffled(map_):
        ranks = data.draw(st.permutations(sorted(map_.shard_shapes)))
        return ParamAffineMap(map_.logical_shape, {rank: map_.shard_shapes[rank]
                                                   for rank in ranks},
                              {rank: data.draw(st.permutations(map_.pieces_by_rank[rank]))
                               for rank in ranks})

    assert plan_transfer(shuffled(target_map), shuffled(source_map)) == plan_transfer(target_map, source_map)


@given(st.data())
def test_a_partial_plan_is_the_whole_plan_restricted_to_its_ranks(data):
    shape = data.draw(shapes)
    source_map, target_map = data.draw(any_maps(shape)), data.draw(any_maps(shape))
    spread = data.draw(st.booleans())

    def selector(request):
        return request.candidates[request.target_rank % len(request.candidates)].source_rank

    policy = {'replica_selector': selector if spread else None}
    source_ranks = data.draw(st.sets(st.sampled_from(sorted(source_map.shard_shapes))))
    target_ranks = data.draw(st.sets(st.sampled_from(sorted(target_map.shard_shapes))))
    whole = plan_transfer(target_map, source_map, **policy)
    part = plan_model({'w': target_map}, {'w': source_map},
                      source_ranks=source_ranks,
                      target_ranks=target_ranks,
                      **policy)['w']
    assert list(part.segments) == [
        segment for segment in whole.segments
        if segment.source_rank in source_ranks or segment.target_rank in target_ranks
    ]
    assert part.source_shard_shapes.keys() == source_ranks and part.target_shard_shapes.keys() == target_ranks


def test_rows_to_columns_is_the_docstrings_example():
    plan = plan_transfer(contiguous_split_map((2, 2), [1, 1], 1), contiguous_split_map((2, 2), [1, 1], 0))
    assert [(segment.source_rank, segment.source_offset, segment.target_rank, segment.target_offset)
            for segment in plan.segments] == [(0, 0, 0, 0), (1, 0, 0, 1), (0, 1, 1, 0), (1, 1, 1, 1)]


def test_storage_partitions_contiguous_on_both_sides_make_one_segment_per_pair():
    # Each range is cut into up to five boxes of the 3-d parameter; source and target run on together all the same.
    shape = (3, 4, 5)
    source = flat_range_map(shape, {0: (0, 23), 1: (23, 37)})
    target = flat_range_map(shape, {0: (0, 31), 1: (31, 29)})
    plan = plan_transfer(target, source)
    assert [(segment.source_rank, segment.target_rank, segment.shape) for segment in plan.segments] == [
        (0, 0, (23, )),
        (1, 0, (8, )),
        (1, 1, (29, )),
    ]


def test_blocks_adjacent_in_both_shards_join_although_the_parameter_has_something_between():
    pieces = {
        0: [
            AffinePiece((2, ), 0, (1, ), 0, (1, ), [0]),
            AffinePiece((2, ), 4, (1, ), 2, (1, ), [0]),
        ],
        1: [AffinePiece((2, ), 2, (1, ), 0, (1, ), [1])]
    }
    map_ = ParamAffineMap((6, ), {0: (4, ), 1: (2, )}, pieces)
    assert [segment.shape for segment in plan_transfer(map_, map_).segments] == [(4, ), (2, )]


def test_interleaved_columns_join_along_their_rows():
    # Columns 0, 1 and 3, 4 come from rank 0, cut after row 2. In the order of their addresses the four copies
    # alternate between the two column blocks, whose source and target addresses keep the same proportion.
    strides = (6, 1)
    pieces = {
        0: [
            AffinePiece((2, 2), row * 6 + column, strides, row * 4 + held, (4, 1), [0]) for row in (0, 2)
            for column, held in ((0, 0), (3, 2))
        ],
        1: [AffinePiece((4, 1), column, strides, held, (2, 1), [1]) for column, held in ((2, 0), (5, 1))]
    }
    source = ParamAffineMap((4, 6), {0: (4, 4), 1: (4, 2)}, pieces)
    plan = plan_transfer(replicated_map((4, 6), 1), source)
    assert sorted((segment.source_rank, segment.shape) for segment in plan.segments) == [(0, (4, 2)), (0, (4, 2)),
                                                                                         (1, (4, )), (1, (4, ))]


def test_zero_partitions_nested_in_tensor_parallel_shards_reach_other_tensor_parallel_shards():
    columns = contiguous_split_map((4, 6), [3, 3], 1)
    source = nest_affine_maps(
        columns, {rank: flat_range_map((12, ), {
            2 * rank: (0, 6),
            2 * rank + 1: (6, 6)
        })
                  for rank in range(2)})
    target = contiguous_split_map((4, 6), [2, 2], 0)
    received = run_plan(plan_transfer(target, source), source, target)
    assert received == {rank: pytest.approx(shard_labels(target, rank)) for rank in range(2)}


def test_a_scalar_and_a_parameter_without_elements_plan():
    scalar = plan_transfer(replicated_map((), 2), flat_range_map((), {0: (0, 1)}))
    assert [(segment.target_rank, segment.numel) for segment in scalar.segments] == [(0, 1), (1, 1)]
    empty = plan_transfer(contiguous_split_map((0, 4), [0, 0], 0), contiguous_split_map((0, 4), [2, 2], 1))
    assert empty.segments == () and empty.moved_elements == 0


def test_the_lowest_holder_sends_unless_a_selector_says_otherwise():
    source, target = replicated_map((2, 2), 3), contiguous_split_map((2, 2), [1, 1], 1)
    assert {segment.source_rank for segment in plan_transfer(target, source).segments} == {0}
    requests = []

    def selector(request):
        requests.append(request)
        return request.candidates[-1].source_rank

    plan = plan_transfer(target, source, replica_selector=selector)
    assert {segment.source_rank for segment in plan.segments} == {2}
    assert [(request.target_rank, request.logical_origin, request.shape) for request in requests] == [
        (0, (0, 0), (2, 1)),
        (1, (0, 1), (2, 1)),
    ]
    assert [candidate.source_offset for candidate in requests[1].candidates] == [1, 1, 1]


@pytest.mark.parametrize('answer', [5, True, '0', None])
def test_a_selectors_wrong_answer_is_refused(answer):
    with pytest.raises(InvalidReplicaPolicyError, match=r'target rank 0.*expected one of \[0, 1\]'):
        plan_transfer(replicated_map((2, ), 1), replicated_map((2, ), 2), replica_selector=lambda request: answer)


def test_replicas_cut_at_different_places_plan():
    source = flat_range_map((6, ), {0: (0, 4), 1: (4, 2), 2: (0, 2), 3: (2, 4)})
    target = flat_range_map((6, ), {0: (0, 6)})
    assert run_plan(plan_transfer(target, source), source, target)[0].tolist() == list(range(6))


def whole(shape, **changes):
    strides = (3, 1)
    fields = dict(shape=shape, source_offset=0, source_strides=strides, dest_offset=0, dest_strides=strides)
    fields.update(locations=[0], **changes)
    return ParamAffineMap((2, 3), {0: (2, 3)}, {0: [AffinePiece(**fields)]})


GOOD = replicated_map((2, 3), 1)
HALF = ParamAffineMap((2, 3), {0: (1, 3)}, {0: [AffinePiece((1, 3), 0, (3, 1), 0, (3, 1), [0])]})
TWICE = ParamAffineMap(
    (2, 3), {0: (3, 3)},
    {0: [
        AffinePiece((2, 3), 0, (3, 1), 0, (3, 1), [0]),
        AffinePiece((1, 3), 3, (3, 1), 6, (3, 1), [0]),
    ]})
DIAGONAL = ParamAffineMap(
    (2, 2), {0: (4, )},
    {0: [
        AffinePiece((2, 1), 0, (3, 1), 0, (1, 1), [0]),
        AffinePiece((2, 1), 1, (1, 1), 2, (1, 1), [0]),
    ]})
REFUSALS = [
    ('other shape', InvalidMapError, r'\(2, 3\).*\(3, 2\)', replicated_map((3, 2), 1), GOOD),
    ('source with a hole', InvalidMapError, 'source.*cover 3 of the 6', GOOD, HALF),
    ('target with a hole', InvalidMapError, 'target.*cover 3 of the 6', HALF, GOOD),
    ('an element held twice by one rank', InvalidMapError, 'source: rank 0.*hold the same elements', GOOD, TWICE),
    ('no location', InvalidMapError, 'source rank 0.*names no location', GOOD,
     ParamAffineMap((2, 3), {0: (2, 3)}, {0: [AffinePiece((2, 3), 0, (3, 1), 0, (3, 1), [])]})),
    ('piece of another rank', InvalidMapError, 'source rank 0.*1 dimensions, the parameter 2', GOOD,
     ParamAffineMap((2, 3), {0: (6, )}, {0: [AffinePiece((6, ), 0, (1, ), 0, (1, ), [0])]})),
    ('short strides', InvalidMapError, 'other numbers of strides', GOOD,
     ParamAffineMap((2, 3), {0: (2, 3)}, {0: [AffinePiece((2, 3), 0, (3, 1), 0, (1, ), [0])]})),
    ('negative size', InvalidMapError, 'negative', GOOD,
     ParamAffineMap((2, 3), {0: (2, 3)}, {0: [AffinePiece((-2, -3), 0, (3, 1), 0, (3, 1), [0])]})),
    ('wrong holders', InvalidMapError, 'source.*names the holders', GOOD,
     ParamAffineMap((2, 3), {0: (2, 3)}, {0: [AffinePiece((2, 3), 0, (3, 1), 0, (3, 1), [0, 1])]})),
    ('shard not filled', InvalidMapError, 'target: rank 0.*12 elements.*its pieces have 6',
     ParamAffineMap((2, 3), {0: (4, 3)}, GOOD.pieces_by_rank), GOOD),
    ('broadcast target', InvalidMapError, 'target: rank 0.*write the same',
     ParamAffineMap((2, 3), {0: (2, 3)}, {0: [AffinePiece((2, 3), 0, (3, 1), 0, (0, 1), [0])]}), GOOD),
    ('scaled source', UnsupportedLayoutError, 'source rank 0.*scaled', GOOD, replicated_map((2, 3), 1, scale=0.5)),
    ('scaled target', UnsupportedLayoutError, 'target rank 0.*scaled', replicated_map((2, 3), 1, scale=0.5), GOOD),
    ('no box', UnsupportedLayoutError, 'source: rank 0.*not a box', replicated_map((2, 2), 1), DIAGONAL),
]  # yapf: disable


@pytest.mark.parametrize('error, message, target, source', [case[1:] for case in REFUSALS],
                         ids=[case[0] for case in REFUSALS])
def test_maps_without_a_plan_are_refused(error, message, target, source):
    with pytest.raises(error, match=message) as caught:
        plan_transfer(target, source)
    assert type(caught.value) is error
    with pytest.raises(error, match="parameter 'layer.weight'.*" + message):
        plan_model({'layer.weight': target}, {'layer.weight': source})


@pytest.mark.parametrize('limit', [
    dict(max_pieces_per_map=1),
    dict(max_pair_checks=3),
    dict(max_segments=3),
    dict(max_plan_bytes=100),
    dict(max_merge_checks=3)
])
def test_a_budget_that_is_reached_is_an_error_and_never_a_shorter_plan(limit):
    source, target = contiguous_split_map((2, 2), [1, 1], 0), contiguous_split_map((2, 2), [1, 1], 1)
    assert len(plan_transfer(target, source).segments) == 4
    with pytest.raises(AffineTransferError, match=next(iter(limit))) as caught:
        plan_transfer(target, source, PlanBudget(**limit))
    assert type(caught.value) is AffineTransferError


def test_more_dimensions_than_the_budget_has_are_an_unsupported_layout():
    with pytest.raises(UnsupportedLayoutError, match='9 dimensions, more than max_ndim = 8'):
        plan_transfer(replicated_map((1, ) * 9, 1), replicated_map((1, ) * 9, 1))


def test_an_empty_shard_is_planned_whatever_its_pieces_say():
    source = replicated_map((0, 4), 2, scale=0.5)
    assert plan_transfer(replicated_map((0, 4), 1), source).segments == ()


def test_moved_elements_are_counted_beyond_64_bits():
    shape = (1 << 30, 1 << 31)
    plan = plan_transfer(replicated_map(shape, 8), contiguous_split_map(shape, [1 << 29] * 2, 0))
    assert plan.moved_elements == 8 << 61


def test_columns_of_a_shard_join_along_its_rows_before_the_ends_of_rows_join():
    # Columns 0 to 3 and 5 come from rank 0, column 4 from rank 1: the end of a row and the start of the next one are
    # neighbours in both shards.
    shape = (2, 6, 2)
    source = ParamAffineMap(shape, {
        0: (2, 5, 2),
        1: (2, 1, 2)
    }, {
        0: [
            AffinePiece((2, 4, 2), 0, (12, 2, 1), 0, (10, 2, 1), [0]),
            AffinePiece((2, 1, 2), 10, (12, 2, 1), 8, (10, 2, 1), [0])
        ],
        1: [AffinePiece((2, 1, 2), 8, (12, 2, 1), 0, (2, 2, 1), [1])]
    })
    target = ParamAffineMap(
        shape, {1: shape},
        {1: [AffinePiece((1, 6, 2), row * 12, (12, 2, 1), row * 12, (12, 2, 1), [1]) for row in range(2)]})
    assert len(plan_transfer(target, source).segments) == 3


def test_pieces_around_a_dimension_of_one_index_join():
    strides = (6, 3, 3, 1)
    pieces = [((5, 1, 1, 2), 0), ((5, 1, 1, 2), 3), ((5, 2, 1, 1), 2)]
    target = ParamAffineMap(
        (5, 2, 1, 3), {0: (5, 2, 1, 3)},
        {0: [AffinePiece(shape, offset, strides, offset, strides, [0]) for shape, offset in pieces]})
    assert len(plan_transfer(target, contiguous_split_map((5, 2, 1, 3), [2, 3], 0)).segments) == 2


def test_a_layout_of_16384_ranks_stays_within_the_default_budget():
    world, shape = 16384, (16384, 640)
    part = math.prod(shape) // world + 7
    ranges = {
        rank: (min(rank * part, math.prod(shape)), min(part, max(0,
                                                                 math.prod(shape) - rank * part)))
        for rank in range(world)
    }
    plan = plan_transfer(contiguous_split_map(shape, [80] * 8, 1), flat_range_map(shape, ranges))
    assert plan.moved_elements == math.prod(shape)


def test_a_model_plans_equal_geometry_once_and_names_what_is_missing():
    rows, columns = contiguous_split_map((4, 4), [2, 2], 0), contiguous_split_map((4, 4), [2, 2], 1)
    again = ParamAffineMap.from_dict(rows.to_dict())
    plans = plan_model({'a': columns, 'b': columns, 'c': rows}, {'a': rows, 'b': again, 'c': rows})
    assert list(plans) == ['a', 'b', 'c']
    assert plans['a'] is plans['b'] and plans['a'] is not plans['c']
    with pytest.raises(InvalidMapError, match=r"without a source map: \['b'\].*without a target map: \['z'\]"):
        plan_model({'a': rows, 'b': rows}, {'a': rows, 'z': rows})


def test_ranks_stand_for_both_sides_and_exclude_the_sides_own():
    rows, columns = contiguous_split_map((2, 2), [1, 1], 0), contiguous_split_map((2, 2), [1, 1], 1)
    plan = plan_model({'w': columns}, {'w': rows}, ranks={1})['w']
    assert [(segment.source_rank, segment.target_rank) for segment in plan.segments] == [(1, 0), (0, 1), (1, 1)]
    with pytest.raises(TypeError, match='either ranks'):
        plan_model({'w': columns}, {'w': rows}, ranks={1}, source_ranks={0})


@given(st.data())
def test_a_segment_survives_its_dictionary_form_and_json(data):
    shape = data.draw(shapes)
    for segment in plan_transfer(data.draw(any_maps(shape)), data.draw(any_maps(shape))).segments:
        assert TransferSegment.from_dict(json.loads(json.dumps(segment.to_dict()))) == segment
