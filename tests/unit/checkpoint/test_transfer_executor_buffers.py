# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which buffers an executor takes, how it reads and writes views, and what it moves, all within one process."""

import gc
import itertools
import sys
import threading
import time

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.checkpoint.affine import contiguous_split_map, flat_range_map, replicated_map
from deepspeed.checkpoint.affine_transfer import TransferPlan, TransferSegment, plan_model, plan_transfer
from deepspeed.checkpoint.affine_transfer_buffers import Copy, axes_of, readdress
from deepspeed.checkpoint.affine_transfer_executor import (AffineTransferExecutionError, AffineTransferExecutor,
                                                           StagingBudget, TransferEndpoints, execute_transfer)
from unit.checkpoint.transfer_cases import (LAYOUTS, GuardedBuffer, line_plan, oracle_shard, random_map, random_shape)

HERE = TransferEndpoints({place: 0 for place in range(4)}, {place: 0 for place in range(4)})
NAN = float('nan')


def execute(plan, sources, targets, dtype=torch.float32, endpoints=HERE):
    return execute_transfer(plan, sources, targets, endpoints, dtype)


def refuses(words, plan, sources, targets, **options):
    written = [target for target in targets.values() if isinstance(target, torch.Tensor) and target.is_cpu]
    before = [target.clone() for target in written]
    with pytest.raises(AffineTransferExecutionError, match=f'(?s)transfer refused before it began: rank 0: .*{words}'):
        execute(plan, sources, targets, **options)
    for old, new in zip(before, written):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


# What may be passed

FOUR = line_plan((0, 0, 0, 0, 4), source_numels={0: 4}, target_numels={0: 4})


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


def test_buffers_that_are_no_dict_are_refused():
    refuses('source buffers must be a dict, not a list', FOUR, [torch.zeros(4)], {0: torch.zeros(4)})


def test_without_shard_shapes_a_buffer_must_reach_as_far_as_the_segments_do():
    plan = line_plan((0, 2, 0, 0, 4))
    target = torch.zeros(4)
    execute(plan, {0: torch.arange(9.)}, {0: target})
    assert target.tolist() == [2, 3, 4, 5]
    refuses('6 elements or more', plan, {0: torch.zeros(5)}, {0: target})
    refuses('must be contiguous', plan, {0: torch.zeros(20)[::2]}, {0: target})


def test_a_plan_that_reaches_past_its_own_shard_is_refused():
    plan = line_plan((0, 2, 0, 0, 4), source_numels={0: 5}, target_numels={0: 4})
    with pytest.raises(AffineTransferExecutionError, match=r'addresses 6 elements of location 0, whose shard \(5,\)'):
        AffineTransferExecutor(plan, HERE, dtype=torch.float32)


# Sharing memory

TWO_TO_TWO = line_plan((0, 0, 0, 0, 4), (1, 0, 1, 0, 4), source_numels={0: 4, 1: 4}, target_numels={0: 4, 1: 4})


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


SQUARES = plan_transfer(contiguous_split_map((4, 6), [3, 3], 1), contiguous_split_map((4, 6), [4], 0))


def test_interleaved_windows_of_one_weight_are_accepted():
    fused, full = torch.full((4, 6), NAN), torch.arange(24.).view(4, 6)
    execute(SQUARES, {0: full}, {0: fused[:, :3], 1: fused[:, 3:]})
    assert torch.equal(fused, full)


def test_windows_that_share_a_column_are_refused():
    fused = torch.full((4, 6), NAN)
    refuses('share memory', SQUARES, {0: torch.zeros(4, 6)}, {0: fused[:, :3], 1: fused[:, 2:5]})


# Views: addressed through their strides, never by pointer and count


def test_every_second_element_of_a_tensor_is_read_and_written():
    """x = [0, 1, 2, 3][::2] sends [0, 2], and writing base(2, 4)[:, ::2] changes columns 0 and 2 only."""
    plan = plan_transfer(flat_range_map((2, ), {0: (0, 2)}), flat_range_map((2, ), {0: (0, 2)}))
    target = torch.zeros(2)
    execute(plan, {0: torch.arange(4.)[::2]}, {0: target})
    assert target.tolist() == [0, 2]
    plan = plan_transfer(contiguous_split_map((2, 2), [2], 0), contiguous_split_map((2, 2), [2], 0))
    base = torch.zeros(2, 4)
    execute(plan, {0: torch.arange(1., 5.).view(2, 2)}, {0: base[:, ::2]})
    assert base.tolist() == [[1, 0, 2, 0], [3, 0, 4, 0]]


def test_a_transposed_weight_arrives_as_the_logical_matrix():
    plan = plan_transfer(contiguous_split_map((4, 4), [4], 0), contiguous_split_map((4, 4), [4], 0))
    weight, target = torch.arange(16.).view(4, 4), torch.zeros(4, 4)
    execute(plan, {0: weight.t()}, {0: target})
    assert torch.equal(target, weight.t())


def test_a_diagonal_through_a_transposed_buffer_is_refused():
    """Steps of 3 through rows of 4 run over the row ends out of phase: no strides lead there."""
    segment = TransferSegment(0, 0, (3, ), 0, 0, (1, ), (4, ))
    plan = TransferPlan((segment, ), (12, ), 4, None, source_shard_shapes={0: (3, 4)}, target_shard_shapes={0: (4, )})
    refuses('cannot be addressed', plan, {0: torch.zeros(4, 3).t()}, {0: torch.zeros(4)})


def test_a_run_over_whole_rows_of_a_window_is_one_copy():
    window = torch.zeros(5, 6)[:, :4]
    assert list(readdress(Copy((12, ), 4, (1, ), 0, (1, )), axes_of(window))) == [Copy((3, 4), 6, (6, 1), 0, (4, 1))]


@given(data=st.data())
def test_readdressing_visits_the_same_elements_in_the_same_order(data):
    """Any run or box of a shard, through windows, steps and permutations: compared element by element."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
    order = data.draw(st.permutations(range(len(shape))))
    wide = [shape[dim] + data.draw(st.integers(0, 1)) for dim in order]
    buffer = torch.arange(int(numpy.prod(wide))).view(wide)[tuple(slice(shape[dim]) for dim in order)]
    buffer = buffer.permute([order.index(dim) for dim in range(len(shape))])
    shard = numpy.arange(buffer.numel())
    first = data.draw(st.integers(0, buffer.numel() - 1))
    run = data.draw(st.integers(1, buffer.numel() - first))
    place_of = buffer.reshape(-1).tolist()
    reached = {}
    for copy in readdress(Copy((run, ), first, (1, ), 100, (1, )), axes_of(buffer)):
        for index in itertools.product(*map(range, copy.shape)):
            here, there = (offset + sum(i * s for i, s in zip(index, strides))
                           for offset, strides in ((copy.offset, copy.strides), (copy.other_offset,
                                                                                 copy.other_strides)))
            assert there not in reached
            reached[there] = here
    assert reached == {100 + index: place_of[first + index] for index in range(run)}
    assert shard[first + run - 1] == first + run - 1


# What arrives


@given(seed=st.integers(0, 2**32 - 1))
def test_every_element_of_every_target_arrives_and_nothing_else_changes(seed):
    rng = numpy.random.default_rng(seed)
    source_dtype, dtype = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16),
                           (torch.bfloat16, torch.float32), (torch.int32, torch.int32),
                           (torch.float64, torch.int32)][rng.integers(5)]
    plans, sources, targets, expected = {}, {}, {}, {}
    for name in ('embed', 'w', 'bias')[:rng.integers(1, 4)]:
        shape = random_shape(rng)
        source_map, target_map = (random_map(rng, shape, int(rng.integers(1, 4))) for _ in range(2))
        plans[name] = plan_transfer(target_map, source_map)
        full = rng.integers(0, 200, size=shape) if source_dtype == torch.int32 else rng.standard_normal(shape) * 9
        full = torch.as_tensor(full).to(source_dtype)
        arrives = full.to(dtype).double().numpy()
        sources[name] = {
            place:
            GuardedBuffer(shard, source_dtype, rng.choice(LAYOUTS),
                          torch.from_numpy(oracle_shard(source_map, place,
                                                        full.double().numpy())))
            for place, shard in source_map.shard_shapes.items()
        }
        targets[name] = {
            place: GuardedBuffer(shard, dtype, rng.choice(LAYOUTS))
            for place, shard in target_map.shard_shapes.items()
        }
        expected[name] = {place: oracle_shard(target_map, place, arrives) for place in targets[name]}
    executor = AffineTransferExecutor(plans, HERE, dtype=dtype, source_dtype=source_dtype)
    executor.execute(*({
        name: {
            place: guarded.tensor
            for place, guarded in side[name].items()
        }
        for name in plans
    } for side in (sources, targets)))
    for name in plans:
        for place, guarded in targets[name].items():
            guarded.check(torch.from_numpy(expected[name][place]).to(dtype))


def test_values_become_what_tensor_to_makes_of_them():
    values = torch.tensor([1.00390625, 1.01171875, NAN, float('inf'), 3e38, -0.0, 1e-45])
    plan = line_plan((0, 0, 0, 0, 7))
    target = torch.zeros(7, dtype=torch.bfloat16)
    AffineTransferExecutor(plan, HERE, dtype=torch.bfloat16, source_dtype=torch.float32).execute({0: values},
                                                                                                 {0: target})
    assert target[:2].tolist() == [1.0, 1.015625]
    assert torch.equal(target.view(torch.int16), values.to(torch.bfloat16).view(torch.int16))


def test_parameters_that_require_grad_are_written_in_place():
    target = torch.nn.Parameter(torch.zeros(4))
    address = target.data_ptr()
    execute(FOUR, {0: torch.arange(4.)}, {0: target})
    assert (target.tolist(), target.data_ptr(), target.requires_grad) == ([0, 1, 2, 3], address, True)


def test_inference_tensors_are_written():
    with torch.inference_mode():
        target = torch.zeros(4)
    execute(FOUR, {0: torch.arange(4.)}, {0: target})
    assert target.tolist() == [0, 1, 2, 3]


# The compiled object


class AllocatingCalls(TorchDispatchMode):
    """Names of the operators that made a tensor with storage of its own."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.names.append(str(func))
        return result


def test_later_executes_allocate_no_tensor_and_keep_no_objects():
    executor = AffineTransferExecutor({'w': SQUARES}, HERE, dtype=torch.bfloat16, source_dtype=torch.float32)
    sources, targets = {
        'w': {
            0: torch.ones(4, 6)
        }
    }, {
        'w': {
            0: torch.zeros(4, 3, dtype=torch.bfloat16),
            1: torch.zeros(4, 3, dtype=torch.bfloat16)
        }
    }
    executor.execute(sources, targets)
    with AllocatingCalls() as calls:
        executor.execute(sources, targets)
    assert calls.names == []
    gc.collect()
    objects = len(gc.get_objects())
    for _ in range(50):
        executor.execute(sources, targets)
    gc.collect()
    assert len(gc.get_objects()) <= objects + 2


def test_the_allocation_counter_sees_an_allocation():
    with AllocatingCalls() as calls:
        torch.zeros(3).add_(torch.empty(3))
    assert len(calls.names) == 2


def test_other_buffers_of_the_same_geometry_are_checked_and_used_as_well():
    executor = AffineTransferExecutor(FOUR, HERE, dtype=torch.float32)
    for value in range(3):
        target = torch.zeros(4)
        executor.execute({0: torch.full((4, ), float(value))}, {0: target})
        assert target.tolist() == [value] * 4
    memory = torch.zeros(6)
    with pytest.raises(AffineTransferExecutionError, match='share memory'):
        executor.execute({0: memory[:4]}, {0: memory[2:]})


def test_buffers_may_change_their_strides_between_calls():
    plan = plan_transfer(contiguous_split_map((2, 3), [2], 0), contiguous_split_map((2, 3), [2], 0))
    executor = AffineTransferExecutor(plan, HERE, dtype=torch.float32)
    values = torch.arange(6.).view(2, 3)
    for target in (torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(2, 5)[:, 1:4]):
        executor.execute({0: values}, {0: target})
        assert torch.equal(target, values)


def test_a_refused_call_leaves_the_executor_usable():
    executor = AffineTransferExecutor(FOUR, HERE, dtype=torch.float32)
    with pytest.raises(AffineTransferExecutionError, match='missing'):
        executor.execute({}, {0: torch.zeros(4)})
    target = torch.zeros(4)
    executor.execute({0: torch.ones(4)}, {0: target})
    assert target.tolist() == [1] * 4


def test_the_statistics_of_local_copies():
    stats = execute(TWO_TO_TWO, {0: torch.ones(4), 1: torch.ones(4)}, {0: torch.zeros(4), 1: torch.zeros(4)})
    assert (stats.segments, stats.chunks, stats.rounds, stats.local_copy_bytes) == (2, 2, 0, 32)
    assert (stats.sent_bytes, stats.received_bytes, stats.peak_host_staging_bytes,
            stats.peak_device_staging_bytes) == (0, 0, 0, 0)
    assert stats.seconds > 0


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


def test_a_budget_below_one_element_of_the_wire_is_refused():
    with pytest.raises(AffineTransferExecutionError, match='1 bytes per peer is less than one element of 2 bytes'):
        AffineTransferExecutor(FOUR, HERE, dtype=torch.bfloat16, source_dtype=torch.float32, budget=StagingBudget(1))


def test_a_group_that_is_none_is_told_apart_from_a_process_that_is_no_member():
    with pytest.raises(TypeError, match='not a process group that this process is a member of'):
        AffineTransferExecutor(FOUR, HERE, dtype=torch.float32, group=object())


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


def test_calls_from_several_threads_take_turns():
    # Two geometries in turn: a call that met the other one's layout would write elsewhere.
    plan = plan_transfer(replicated_map((40, 40), 1), replicated_map((40, 40), 1))
    executor = AffineTransferExecutor(plan, HERE, dtype=torch.float32)
    wrong = []

    def run(number):
        for turn in range(100):
            base = torch.full((40, 80), NAN)
            target = base[:, :40] if number else base.view(-1)[:1600].view(40, 40)
            source = torch.full((40, 40), float(turn))
            executor.execute({0: source}, {0: target})
            if not torch.equal(target, source) or int(base.isnan().sum()) != 1600:
                wrong.append((number, turn))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(number, )) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


def test_a_freed_buffer_and_a_location_that_is_no_number_are_refused_by_name():
    plan = plan_transfer(replicated_map((3, ), 1), replicated_map((3, ), 1))
    freed = torch.zeros(3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(AffineTransferExecutionError, match='source buffer of location 0 has no storage'):
        execute(plan, {0: freed}, {0: torch.zeros(3)})
    with pytest.raises(AffineTransferExecutionError, match="target buffer of location '0'"):
        execute(plan, {0: torch.zeros(3)}, {'0': torch.zeros(3)})


def test_parameters_that_are_apart_on_one_side_fill_their_parts_of_a_fused_shard():
    # q, k and v of a trainer, and rank 1 of 2 of an engine that keeps them packed.
    parts = {'q': torch.arange(24.).view(8, 3), 'k': torch.arange(24., 36.).view(4, 3), 'v': -torch.ones(4, 3)}
    fused = torch.full((8, 3), NAN)
    rows = {name: len(part) // 2 for name, part in parts.items()}
    starts = dict(zip(parts, itertools.accumulate(rows.values(), initial=0)))
    plans = plan_model({
        name: contiguous_split_map(part.shape, [rows[name]] * 2, 0)
        for name, part in parts.items()
    }, {
        name: replicated_map(part.shape, 1)
        for name, part in parts.items()
    },
                       source_ranks={},
                       target_ranks={1})
    executor = AffineTransferExecutor(plans, TransferEndpoints({0: 0}, {1: 0}), dtype=torch.float32)
    executor.execute({
        name: {
            0: part
        }
        for name, part in parts.items()
    }, {name: {
        1: fused.narrow(0, starts[name], rows[name])
    }
        for name in parts})
    assert torch.equal(fused, torch.cat([part[len(part) // 2:] for part in parts.values()]))
