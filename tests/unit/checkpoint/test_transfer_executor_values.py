# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What arrives, and what later calls of one executor do, all within one process."""

import gc
import sys
import threading

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.affine import replicated_map
from deepspeed.checkpoint.affine_transfer import plan_transfer
from deepspeed.checkpoint.affine_transfer_executor import AffineTransferExecutionError, AffineTransferExecutor
from unit.checkpoint.transfer_cases import (LAYOUTS, GuardedBuffer, line_plan, oracle_shard, random_map, random_shape)
from unit.checkpoint.transfer_counts import AllocatingCalls
from unit.checkpoint.transfer_in_process import FOUR, HERE, NAN, SQUARES, TWO_TO_TWO, execute


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


def test_the_statistics_of_local_copies():
    stats = execute(TWO_TO_TWO, {0: torch.ones(4), 1: torch.ones(4)}, {0: torch.zeros(4), 1: torch.zeros(4)})
    assert (stats.segments, stats.chunks, stats.rounds, stats.local_copy_bytes) == (2, 2, 0, 32)
    assert (stats.sent_bytes, stats.received_bytes, stats.peak_host_staging_bytes,
            stats.peak_device_staging_bytes) == (0, 0, 0, 0)
    assert stats.seconds > 0


# Later calls


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


def test_a_refused_call_leaves_the_executor_usable():
    executor = AffineTransferExecutor(FOUR, HERE, dtype=torch.float32)
    with pytest.raises(AffineTransferExecutionError, match='missing'):
        executor.execute({}, {0: torch.zeros(4)})
    target = torch.zeros(4)
    executor.execute({0: torch.ones(4)}, {0: target})
    assert target.tolist() == [1] * 4


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
