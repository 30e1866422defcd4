# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Schedules are values: who sends what to whom, in which messages. No tensors, no processes."""

import itertools
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint import affine_transfer_schedule
from deepspeed.checkpoint.affine_transfer import TransferPlan, TransferSegment
from deepspeed.checkpoint.affine_transfer_schedule import ALONE_BYTES_BY_BARE_ENDS as ALONE_BYTES
from deepspeed.checkpoint.affine_transfer_schedule import (AffineTransferExecutionError, Box, Chunk, PairDigest,
                                                           Schedule, Wire)
from unit.checkpoint.transfer_cases import line_plan

FLOATS = Wire.between(4, 4, False)


def schedule_of(plans, rank, bytes_per_peer=1 << 20, wire=FLOATS, source_ranks=None, target_ranks=None):
    return Schedule.build(plans, source_ranks or {
        0: 0,
        1: 1
    }, target_ranks or {
        0: 0,
        1: 1
    }, rank, wire, bytes_per_peer)


def sizes_to(schedule, peer):
    return [message.numel for message in schedule.sends[peer]]


def addresses(shape, box):
    return [
        box.offset + sum(i * stride for i, stride in zip(index, box.strides))
        for index in itertools.product(*map(range, shape))
    ]


def moved(messages):
    """Every (source address, target address) that the messages move, in the order in which they travel."""
    return [
        pair for message in messages for chunk in message.chunks
        for pair in zip(addresses(chunk.shape, chunk.source), addresses(chunk.shape, chunk.target))
    ]


def matrix_plan(shape, source_strides, target_strides):
    segment = TransferSegment(0, 3, source_strides, 1, 2, target_strides, shape)
    return TransferPlan((segment, ), shape, segment.numel, None)


def test_a_message_takes_half_of_the_budget_so_that_two_fit():
    schedule = schedule_of({'w': line_plan((0, 0, 1, 0, 10))}, rank=0, bytes_per_peer=8 * 4)
    assert (schedule.depth, sizes_to(schedule, 1)) == (2, [4, 4, 2])


def test_a_budget_of_one_element_moves_one_element_at_a_time():
    schedule = schedule_of({'w': line_plan((0, 0, 1, 0, 3))}, rank=0, bytes_per_peer=7)
    assert (schedule.depth, sizes_to(schedule, 1)) == (1, [1, 1, 1])


def test_a_budget_below_one_element_is_refused():
    with pytest.raises(AffineTransferExecutionError, match='3 bytes per peer is less than one element of 4'):
        schedule_of({}, rank=0, bytes_per_peer=3)


def test_a_tensor_larger_than_a_message_is_cut_between_rows():
    """[10, 4] of 4-byte elements in 64-byte messages: 4, 4 and 2 rows."""
    schedule = schedule_of({'w': matrix_plan((10, 4), (5, 1), (6, 1))}, rank=0, bytes_per_peer=128)
    assert [chunk.shape for message in schedule.sends[1] for chunk in message.chunks] == [(4, 4), (4, 4), (2, 4)]


def test_a_row_larger_than_a_message_is_cut_inside_the_row():
    schedule = schedule_of({'w': matrix_plan((2, 10), (11, 1), (12, 1))}, rank=0, bytes_per_peer=32)
    assert sizes_to(schedule, 1) == [4, 4, 4, 4, 4]
    assert moved(schedule.sends[1]) == [(3 + 11 * i + j, 2 + 12 * i + j) for i in range(2) for j in range(10)]


def test_small_parameters_travel_in_one_message():
    plans = {f'p{number}': line_plan((0, 0, 1, 0, 5)) for number in range(20)}
    assert sizes_to(schedule_of(plans, rank=0), 1) == [100]


def test_long_runs_travel_alone_and_do_not_cut_up_what_is_packed():
    long_numel = ALONE_BYTES[2] // 4
    plans = {
        'a': line_plan((0, 0, 1, 0, 3)),
        'b': line_plan((0, 0, 1, 0, long_numel)),
        'c': line_plan((0, 0, 1, 0, 4))
    }
    assert sizes_to(schedule_of(plans, rank=0, bytes_per_peer=1 << 22), 1) == [long_numel, 7]


def test_a_run_at_one_end_travels_alone_only_when_it_is_longer():
    rows = ALONE_BYTES[2] // 4
    plans = {'a': matrix_plan((rows, 2), (2, 1), (3, 1)), 'b': line_plan((0, 0, 1, 0, 4))}
    assert sizes_to(schedule_of(plans, rank=0, bytes_per_peer=1 << 24), 1) == [2 * rows + 4]
    rows = ALONE_BYTES[1] // 8
    plans = {'a': matrix_plan((rows, 2), (2, 1), (3, 1)), 'b': line_plan((0, 0, 1, 0, 4))}
    assert sizes_to(schedule_of(plans, rank=0, bytes_per_peer=1 << 24), 1) == [2 * rows, 4]


def test_what_must_be_packed_and_unpacked_anyway_does_not_travel_alone():
    rows = ALONE_BYTES[1] // 8
    plans = {'a': matrix_plan((rows, 2), (3, 1), (4, 1)), 'b': line_plan((0, 0, 1, 0, 4))}
    assert sizes_to(schedule_of(plans, rank=0, bytes_per_peer=1 << 24), 1) == [2 * rows + 4]


def test_a_run_that_is_converted_does_not_travel_alone_from_its_source():
    rows = ALONE_BYTES[1] // 4
    plans = {'a': matrix_plan((rows, 2), (2, 1), (3, 1)), 'b': line_plan((0, 0, 1, 0, 4))}
    wire = Wire.between(4, 2, True)
    assert sizes_to(schedule_of(plans, rank=0, bytes_per_peer=1 << 24, wire=wire), 1) == [2 * rows + 4]


@pytest.mark.parametrize('plan, expected', [(line_plan((0, 0, 1, 0, 150)), [100, 50]),
                                            (matrix_plan((10, 4), (4, 1), (6, 1)), [16, 16, 8]),
                                            (matrix_plan((10, 4), (5, 1), (6, 1)), [16, 16, 8])])
def test_only_what_is_bare_at_both_ends_is_longer_than_what_is_packed(plan, expected):
    """A budget for two messages of 100 elements, of which 16 may be packed; bare at two, one and no ends."""
    with mock.patch.object(affine_transfer_schedule, 'MAX_PACKED_BYTES', 16 * 4):
        with mock.patch.dict(ALONE_BYTES, {1: 8 * 4, 2: 8 * 4}):
            assert sizes_to(schedule_of({'w': plan}, rank=0, bytes_per_peer=2 * 100 * 4), 1) == expected


@pytest.mark.parametrize('sizes, expected',
                         [((4, 2, True), Wire(2, False, True)), ((2, 4, True), Wire(2, True, False)),
                          ((2, 2, True), Wire(2, False, True)), ((4, 4, False), Wire(4, True, True))])
def test_the_end_that_converts_is_the_one_that_saves_bytes_on_the_wire(sizes, expected):
    assert Wire.between(*sizes) == expected


def test_dimensions_that_both_ends_run_through_become_one():
    chunk = Chunk.of('w', TransferSegment(0, 7, (12, 4, 9, 1), 1, 0, (24, 8, 5, 1), (2, 3, 1, 4)))
    assert (chunk.shape, chunk.source.strides, chunk.target.strides) == ((6, 4), (4, 1), (8, 1))


def test_what_stays_on_a_rank_is_in_no_message():
    schedule = schedule_of({'w': line_plan((0, 0, 0, 0, 4), (0, 4, 1, 0, 4))}, rank=0)
    assert [chunk.numel for chunk in schedule.local] == [4]
    assert (sizes_to(schedule, 1), schedule.receives) == ([4], {})


def test_a_rank_that_holds_neither_end_has_an_empty_schedule():
    schedule = schedule_of({'w': line_plan((0, 0, 1, 0, 4))}, rank=2)
    assert (schedule.local, schedule.sends, schedule.receives) == ((), {}, {})


def test_a_location_without_a_rank_is_refused():
    with pytest.raises(AffineTransferExecutionError, match='target location 5 of w is not bound to any rank'):
        schedule_of({'w': line_plan((0, 0, 5, 0, 4))}, rank=0)


def test_a_negative_address_is_refused():
    with pytest.raises(AffineTransferExecutionError, match='negative source offset or stride'):
        schedule_of({'w': line_plan((0, -1, 1, 0, 4))}, rank=0)


def test_an_empty_segment_is_no_message():
    assert schedule_of({'w': line_plan((0, 0, 1, 0, 0))}, rank=0).sends == {}


def test_the_order_in_which_a_rank_met_the_parameters_does_not_matter():
    plans = {'a': line_plan((0, 0, 1, 0, 4)), 'b': line_plan((0, 0, 1, 4, 4))}
    assert schedule_of(plans, rank=0) == schedule_of(dict(reversed(plans.items())), rank=0)


@pytest.mark.parametrize('change', [dict(name='v'), dict(source=1), dict(order=-1), dict(shape=(6, 2))])
def test_a_pair_digest_tells_apart(change):
    """Another name, another address, another order, another shape of as many elements."""

    def digest(name='w', source=0, order=1, shape=(3, 4)):
        pair = [(name, TransferSegment(0, offset, (9, 1), 1, 0, (4, 1), shape)) for offset in (source, source + 40)]
        return PairDigest.of(0, 1, pair[::order])

    assert digest() == digest()
    assert digest().value != digest(**change).value


@given(shape=st.lists(st.integers(1, 6), max_size=4).map(tuple),
       itemsize=st.sampled_from([1, 2, 4, 8]),
       budget_elements=st.integers(1, 40),
       alone_elements=st.integers(1, 30),
       gaps=st.tuples(st.integers(0, 2), st.integers(0, 2)))
def test_both_ends_cut_a_segment_into_the_same_messages_that_move_it_once(shape, itemsize, budget_elements,
                                                                          alone_elements, gaps):
    source_strides, target_strides = [], []
    for strides, gap in zip((source_strides, target_strides), gaps):
        step = 1
        for size in reversed(shape):
            strides.insert(0, step)
            step = step * size + gap
    plan = matrix_plan(shape, tuple(source_strides), tuple(target_strides))
    wire = Wire.between(itemsize, itemsize, False)
    with mock.patch.dict(ALONE_BYTES, {1: 2 * alone_elements * itemsize, 2: alone_elements * itemsize}):
        sender, receiver = (schedule_of({'w': plan}, rank, budget_elements * itemsize, wire) for rank in (0, 1))
    assert sender.sends[1] == receiver.receives[0]
    assert sorted(moved(sender.sends[1])) == sorted(
        zip(addresses(shape, Box('', 3, source_strides)), addresses(shape, Box('', 2, target_strides))))
    assert all(message.numel == sum(chunk.numel for chunk in message.chunks) for message in sender.sends[1])
    assert sender.depth * max(message.numel for message in sender.sends[1]) <= budget_elements
