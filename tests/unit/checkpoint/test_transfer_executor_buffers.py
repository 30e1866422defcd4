# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which buffers and arguments an executor takes, and which it refuses, all within one process."""

import re
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch

from deepspeed.checkpoint.affine import contiguous_split_map, replicated_map
from deepspeed.checkpoint.affine_transfer import TransferPlan, TransferSegment, plan_transfer
from deepspeed.checkpoint.affine_transfer_executor import (AffineTransferExecutionError, AffineTransferExecutor,
                                                           StagingBudget, TransferEndpoints)
from unit.checkpoint.transfer_cases import line_plan
from unit.checkpoint.transfer_in_process import FOUR, HERE, NAN, SQUARES, TWO_TO_TWO, execute, refuses


def test_a_missing_source_is_refused():
    refuses('source buffer of location 0 is missing', FOUR, {}, {0: torch.zeros(4)})


def test_a_missing_target_is_refused():
    refuses('target buffer of location 0 is missing', FOUR, {0: torch.zeros(4)}, {})


def test_an_empty_placeholder_counts_as_missing():
    refuses('source buffer of location 0 is missing or empty: this rank holds a shard of', FOUR, {0: torch.zeros(0)},
            {0: torch.zeros(4)})


def test_a_foreign_buffer_is_refused():
    refuses('source buffer of location 3 is foreign', FOUR, {
        0: torch.zeros(4),
        3: torch.zeros(4)
    }, {0: torch.zeros(4)})


def test_a_buffer_of_an_unknown_parameter_is_refused():
    executor = AffineTransferExecutor({'w': FOUR}, HERE, dtype=torch.float32)
    with pytest.raises(AffineTransferExecutionError, match='source buffer of location 0 of v is foreign'):
        executor.execute({'w': {0: torch.zeros(4)}, 'v': {0: torch.zeros(4)}}, {'w': {0: torch.zeros(4)}})


def test_empty_buffers_of_any_location_and_name_are_ignored():
    executor = AffineTransferExecutor({'w': FOUR}, HERE, dtype=torch.float32)
    target = torch.full((4, ), NAN)
    executor.execute({
        'w': {
            0: torch.arange(4.),
            9: torch.zeros(0, dtype=torch.int8)
        },
        'v': {
            0: torch.zeros(0)
        }
    }, {'w': {
        0: target
    }})
    assert target.tolist() == [0, 1, 2, 3]


def test_a_replica_that_no_segment_reads_may_be_passed_or_left_out():
    plan = line_plan((0, 0, 0, 0, 4), source_numels={0: 4, 1: 4}, target_numels={0: 4})
    for sources in ({0: torch.ones(4)}, {0: torch.ones(4), 1: torch.zeros(4)}):
        target = torch.zeros(4)
        execute(plan, sources, {0: target})
        assert target.tolist() == [1, 1, 1, 1]
    refuses('has shape', plan, {0: torch.ones(4), 1: torch.ones(3)}, {0: torch.zeros(4)})


@pytest.mark.parametrize('source, words', [
    (torch.zeros(4, dtype=torch.float64), 'dtype torch.float64, expected torch.float32'),
    (torch.zeros(3), r'shape \(3,\), expected \(4,\)'),
    (torch.zeros(5), r'shape \(5,\), expected \(4,\)'),
    (torch.zeros(2, 2), r'shape \(2, 2\), expected \(4,\)'),
    (torch.zeros(1).expand(4), 'expanded or overlaps itself'),
    (torch.zeros(4, device='meta'), 'on device meta'),
    (torch.zeros(4).to_sparse(), 'no strided tensor'),
    ([0., 0., 0., 0.], 'no strided tensor but a list'),
])
def test_a_buffer_that_cannot_stand_for_its_shard_is_refused(source, words):
    refuses(words, FOUR, {0: source}, {0: torch.zeros(4)})
    refuses(words, FOUR, {0: torch.zeros(4)}, {0: source})


def test_a_window_that_overlaps_itself_is_refused():
    plan = plan_transfer(contiguous_split_map((3, 4), [3], 0), contiguous_split_map((3, 4), [3], 0))
    refuses('overlaps itself', plan, {0: torch.zeros(8).as_strided((3, 4), (2, 1))}, {0: torch.zeros(3, 4)})


def test_a_lazy_conjugate_is_refused():
    conjugate = torch.zeros(4, dtype=torch.complex64).conj()
    refuses('does not store the values it shows',
            FOUR, {0: conjugate}, {0: torch.zeros(4, dtype=torch.complex64)},
            dtype=torch.complex64)


def test_a_tensor_of_zeros_that_has_no_memory_is_refused():
    zeros = torch._efficientzerotensor(4)
    refuses('source buffer of location 0 does not store the values it shows', FOUR, {0: zeros}, {0: torch.ones(4)})
    with pytest.raises(AffineTransferExecutionError, match='before it began: .*target buffer of location 0 does not '):
        execute(FOUR, {0: torch.ones(4)}, {0: zeros})


def test_buffers_that_are_no_dict_are_refused():
    refuses('source buffers must be a dict, not a list', FOUR, [torch.zeros(4)], {0: torch.zeros(4)})


def test_without_shard_shapes_a_buffer_must_reach_as_far_as_the_segments_do():
    plan = line_plan((0, 2, 0, 0, 4))
    target = torch.zeros(4)
    execute(plan, {0: torch.arange(9.)}, {0: target})
    assert target.tolist() == [2, 3, 4, 5]
    refuses('6 elements or more', plan, {0: torch.zeros(5)}, {0: target})
    refuses('must be contiguous', plan, {0: torch.zeros(20)[::2]}, {0: target})


def test_a_freed_buffer_and_a_location_that_is_no_number_are_refused_by_name():
    plan = plan_transfer(replicated_map((3, ), 1), replicated_map((3, ), 1))
    freed = torch.zeros(3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(AffineTransferExecutionError, match='source buffer of location 0 has no storage'):
        execute(plan, {0: freed}, {0: torch.zeros(3)})
    with pytest.raises(AffineTransferExecutionError, match="target buffer of location '0'"):
        execute(plan, {0: torch.zeros(3)}, {'0': torch.zeros(3)})


# Buffers like those of the call before, in all but one thing

REALS, PAIRS = torch.zeros(4), torch.zeros(4, dtype=torch.complex64)
NOT_STORED = 'does not store the values it shows'


@pytest.mark.parametrize('accepted, refused, words',
                         [(REALS, REALS.view(torch.int32), 'has dtype torch.int32, expected torch.float32'),
                          (PAIRS, PAIRS.conj(), NOT_STORED), (PAIRS.imag, PAIRS.conj().imag, NOT_STORED)],
                         ids=['dtype', 'conjugate', 'negative'])
def test_another_view_of_memory_that_was_accepted_is_checked_again(accepted, refused, words):
    assert refused.data_ptr() == accepted.data_ptr() and refused.stride() == accepted.stride()
    executor = AffineTransferExecutor(FOUR, HERE, dtype=accepted.dtype)
    other = torch.zeros(4, dtype=accepted.dtype)
    for buffers_with in (lambda tensor: ({0: tensor}, {0: other}), lambda tensor: ({0: other}, {0: tensor})):
        executor.execute(*buffers_with(accepted))
        with pytest.raises(AffineTransferExecutionError, match=f'before it began: .* buffer of location 0 {words}'):
            executor.execute(*buffers_with(refused))


def test_a_storage_that_shrank_where_it_lies_is_checked_again():
    executor = AffineTransferExecutor(FOUR, HERE, dtype=torch.float32)
    source, target = torch.ones(4), torch.zeros(4)
    executor.execute({0: source}, {0: target})
    address_of, address = torch.Tensor.data_ptr, source.data_ptr()
    source.untyped_storage().resize_(12)

    # The allocator gives the old address back at times; here it seems to each time.
    def unmoved(tensor):
        return address if tensor is source else address_of(tensor)

    with mock.patch.object(torch.Tensor, 'data_ptr', unmoved):
        with pytest.raises(AffineTransferExecutionError, match='reaches over 16 bytes of a storage of 12'):
            executor.execute({0: source}, {0: target})


# Sharing memory


def test_targets_that_overlap_one_another_are_refused():
    memory = torch.zeros(7)
    refuses('target buffer of location 0 and the target buffer of location 1 share memory', TWO_TO_TWO, {
        0: torch.ones(4),
        1: torch.ones(4)
    }, {
        0: memory[:4],
        1: memory[3:]
    })


def test_a_target_that_overlaps_a_source_is_refused():
    memory = torch.zeros(8)
    refuses('share memory', TWO_TO_TWO, {0: torch.ones(4), 1: memory[2:6]}, {0: torch.zeros(4), 1: memory[4:]})


def test_a_target_that_overlaps_a_source_of_another_dtype_is_refused():
    memory = torch.zeros(4)
    executor = AffineTransferExecutor(FOUR, HERE, dtype=torch.bfloat16, source_dtype=torch.float32)
    with pytest.raises(AffineTransferExecutionError, match='share memory'):
        executor.execute({0: memory}, {0: memory.view(torch.bfloat16)[3:7]})


def test_neighbours_in_one_storage_are_accepted():
    memory = torch.arange(16.)
    execute(TWO_TO_TWO, {0: memory[:4], 1: memory[4:8]}, {0: memory[8:12], 1: memory[12:]})
    assert memory.tolist() == [*range(8), *range(8)]


def test_sources_may_share_memory_as_tied_weights_do():
    weight, target = torch.arange(4.), torch.zeros(2, 4)
    execute(TWO_TO_TWO, {0: weight, 1: weight}, {0: target[0], 1: target[1]})
    assert target.tolist() == [[0, 1, 2, 3]] * 2


def test_interleaved_windows_of_one_weight_are_accepted():
    fused, full = torch.full((4, 6), NAN), torch.arange(24.).view(4, 6)
    execute(SQUARES, {0: full}, {0: fused[:, :3], 1: fused[:, 3:]})
    assert torch.equal(fused, full)


def test_windows_that_share_a_column_are_refused():
    fused = torch.full((4, 6), NAN)
    refuses('share memory', SQUARES, {0: torch.zeros(4, 6)}, {0: fused[:, :3], 1: fused[:, 2:5]})


def test_a_thousand_column_windows_of_one_weight_are_told_apart_at_once():
    columns = 1500
    weight = torch.full((4, columns + 1), NAN)
    plan = plan_transfer(contiguous_split_map((4, columns), [1] * columns, 1), replicated_map((4, columns), 1))
    endpoints = TransferEndpoints({0: 0}, dict.fromkeys(range(columns), 0))
    source = torch.arange(4. * columns).view(4, columns)
    windows = {column: weight[:, column:column + 1] for column in range(columns)}
    began = time.process_time()
    execute(plan, {0: source}, windows, endpoints=endpoints)
    # Pair by pair it took a minute; a machine may be slow, but not that slow.
    assert time.process_time() - began < 15
    assert torch.equal(weight[:, :columns], source) and weight[:, columns].isnan().all()
    with pytest.raises(AffineTransferExecutionError, match='location 7 and .* location 8 share memory'):
        execute(plan, {0: source}, {**windows, 8: weight[:, 7:8]}, endpoints=endpoints)


# What may be constructed


@pytest.mark.parametrize('endpoints', [([0], {0: 0}), ({0: 'a'}, {0: 0}), ({'x': 0}, {0: 0}), ({0: 0.5}, {0: 0})])
def test_endpoints_map_integers_to_integers(endpoints):
    with pytest.raises(AffineTransferExecutionError, match='must map locations to ranks'):
        TransferEndpoints(*endpoints)


@pytest.mark.parametrize('rank', [-1, 1])
def test_a_location_bound_outside_the_group_is_refused(rank):
    with pytest.raises(AffineTransferExecutionError, match=f'target location 2 is bound to rank {rank}, outside the '):
        AffineTransferExecutor(FOUR, TransferEndpoints({0: 0}, {0: 0, 2: rank}), dtype=torch.float32)


def test_a_plan_of_another_type_is_refused():
    with pytest.raises(AffineTransferExecutionError, match="'w' has a dict"):
        AffineTransferExecutor({'w': {}}, HERE, dtype=torch.float32)


@pytest.mark.parametrize('options, words', [
    (dict(endpoints={0: 0}), 'endpoints must be of type TransferEndpoints, not dict'),
    (dict(endpoints=HERE, budget=64), 'budget must be of type StagingBudget, not int'),
])
def test_arguments_of_another_type_are_refused_by_name(options, words):
    with pytest.raises(AffineTransferExecutionError, match=f'transfer refused before it began: rank 0: {words}'):
        AffineTransferExecutor(FOUR, dtype=torch.float32, **options)


def test_a_budget_below_one_element_of_the_wire_is_refused():
    with pytest.raises(AffineTransferExecutionError, match='1 bytes per peer is less than one element of 2 bytes'):
        AffineTransferExecutor(FOUR, HERE, dtype=torch.bfloat16, source_dtype=torch.float32, budget=StagingBudget(1))


def test_a_group_that_is_none_is_told_apart_from_a_process_that_is_no_member():
    with pytest.raises(TypeError, match='not a process group that this process is a member of'):
        AffineTransferExecutor(FOUR, HERE, dtype=torch.float32, group=object())


def test_a_plan_that_reaches_past_its_own_shard_is_refused():
    plan = line_plan((0, 2, 0, 0, 4), source_numels={0: 5}, target_numels={0: 4})
    with pytest.raises(AffineTransferExecutionError, match=r'addresses 6 elements of location 0, whose shard \(5,\)'):
        AffineTransferExecutor(plan, HERE, dtype=torch.float32)


@pytest.mark.parametrize('change', [
    dict(source_strides=(1, )),
    dict(target_strides=(1, )),
    dict(source_strides=(3, 1, 1)),
    dict(shape=(6, )),
    dict(shape=(2, -3)),
    dict(shape=(-2, -3)),
    dict(shape=(0, -3))
])
def test_a_segment_that_is_no_box_is_refused_by_name(change):
    good = TransferSegment(0, 0, (3, 1), 0, 0, (3, 1), (2, 3))
    segment = replace(good, **change)
    described = (
        f'a segment of w from location 0 to location 0 has shape {segment.shape}, source strides '
        f'{segment.source_strides} and target strides {segment.target_strides}, which must be of equal length, '
        'with sizes of 0 or more')
    plans = {'v': TransferPlan((good, ), (2, 3), 6, None), 'w': TransferPlan((segment, ), (2, 3), 6, None)}
    with pytest.raises(AffineTransferExecutionError, match=f'before it began: rank 0: {re.escape(described)}$'):
        AffineTransferExecutor(plans, HERE, dtype=torch.float32)
