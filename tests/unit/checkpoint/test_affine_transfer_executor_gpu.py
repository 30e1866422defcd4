# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Transfers on a real accelerator: every pair of kinds of memory within one process, two processes that share a device
over gloo, and one device per process over NCCL. Skipped without an accelerator, the last ones below two devices.

The tests under the simulated accelerator find races that these can only meet by chance.
"""

import os
from datetime import timedelta

import numpy
import pytest
import torch
import torch.distributed as torch_dist

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import affine_transfer_schedule
from deepspeed.checkpoint.affine_transfer_executor import AffineTransferExecutor, StagingBudget, TransferEndpoints
from unit.checkpoint.transfer_cases import KINDS, Placed, RandomTransfer, line_plan, put, tensors_of
from unit.ranks import rank_folder, run_ranks

if get_accelerator().Stream is None:
    pytest.skip('there is no accelerator with streams', allow_module_level=True)

needs_two_devices = pytest.mark.skipif(get_accelerator().device_count() < 2, reason='NCCL needs a device per process')
SEEDS = range(25)


def keep_the_device_busy():
    """Queue some milliseconds of work, so that what is queued behind it runs well after the host went on."""
    matrix = torch.ones((2048, 2048), device=get_accelerator().current_device_name())
    for _ in range(30):
        matrix = matrix @ matrix * 1e-4


def move_random_parameters(seed, rank, size, group, kind_of):
    """One random transfer, executed twice, amid other work on the same buffers."""
    transfer = RandomTransfer(seed, size)
    affine_transfer_schedule.ALONE_BYTES_BY_BARE_ENDS = transfer.alone_bytes
    executor = transfer.executor(rank, group)
    placed = Placed(transfer, rank, kind_of)
    for step in range(2):
        keep_the_device_busy()
        placed.write_sources_late(step)
        executor.execute(tensors_of(placed.sources), tensors_of(placed.targets))
        placed.use_at_once()
        transfer.check(placed.targets, step)


@pytest.fixture(autouse=True)
def same_rules_as_ever(monkeypatch):
    monkeypatch.setattr(affine_transfer_schedule, 'ALONE_BYTES_BY_BARE_ENDS',
                        affine_transfer_schedule.ALONE_BYTES_BY_BARE_ENDS)


# Within one process


@pytest.mark.parametrize('target', KINDS)
@pytest.mark.parametrize('source', KINDS)
def test_values_arrive_within_a_process(source, target):
    for seed in SEEDS:
        move_random_parameters(seed, 0, 1, None, lambda side: source if side == 'source' else target)


def test_values_arrive_between_buffers_of_all_kinds():
    rng = numpy.random.default_rng(7)
    for seed in SEEDS:
        move_random_parameters(seed, 0, 1, None, lambda side: rng.choice(KINDS))


def long_run(source, target, dtype, numel=1 << 24):
    """An executor for ``numel`` floats within this process, with their buffers."""
    plan = line_plan((0, 0, 0, 0, numel), source_numels={0: numel}, target_numels={0: numel})
    executor = AffineTransferExecutor(plan, TransferEndpoints({0: 0}, {0: 0}), dtype=dtype, source_dtype=torch.float32)
    sources = {0: put(torch.arange(float(numel)), source)}
    return executor, sources, {0: put(torch.zeros(numel, dtype=dtype), target)}


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('target', KINDS)
@pytest.mark.parametrize('source', KINDS)
def test_a_long_run_arrives_and_takes_the_device_memory_that_its_statistics_tell(source, target, dtype):
    executor, sources, targets = long_run(source, target, dtype)
    accelerator = get_accelerator()
    before = accelerator.memory_allocated()
    accelerator.reset_peak_memory_stats()
    stats = executor.execute(sources, targets)
    # The allocator rounds each slot up to 512 bytes.
    assert 0 <= accelerator.max_memory_allocated() - before - stats.peak_device_staging_bytes <= 4 * 512
    assert max(stats.peak_device_staging_bytes, stats.peak_host_staging_bytes) <= StagingBudget().bytes_per_peer
    assert torch.equal(targets[0].cpu(), torch.arange(float(1 << 24)).to(dtype))


@pytest.mark.parametrize('source, target', [('pinned', 'device'), ('device', 'pinned'), ('pageable', 'device'),
                                            ('device', 'pageable'), ('device', 'device')])
def test_later_executes_allocate_no_device_memory(source, target):
    executor, sources, targets = long_run(source, target, torch.bfloat16)
    allocations = []
    for _ in range(3):
        executor.execute(sources, targets)
        allocations.append(get_accelerator().memory_stats()['allocation.all.allocated'])
    assert allocations[0] == allocations[-1]


# Two processes on one device, over gloo: messages lie in pinned host memory


def random_transfers_between_ranks(rank, memory):
    """25 random transfers between buffers of all kinds; the transport must take messages in these kinds of memory."""
    group = torch_dist.distributed_c10d._get_default_group()
    rng = numpy.random.default_rng(rank)
    for seed in SEEDS:
        move_random_parameters(seed, rank, group.size(), group, lambda side: rng.choice(KINDS))
    executor = RandomTransfer(0, group.size()).executor(rank, group)
    return executor._transport.memory == memory


def test_values_arrive_between_two_processes_on_one_device():
    assert run_ranks(random_transfers_between_ranks, 2, {'host'}) == [True, True]


# One device per process, over NCCL


def with_nccl(rank, backend, memory):
    get_accelerator().set_device(rank)
    store = torch_dist.FileStore(os.path.join(rank_folder(), 'nccl'), 2)
    torch_dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    return random_transfers_between_ranks(rank, memory)


@needs_two_devices
@pytest.mark.parametrize('backend, memory', [('nccl', {'device'}), ('cpu:gloo,cuda:nccl', {'host', 'device'})])
def test_values_arrive_between_two_devices(backend, memory):
    assert run_ranks(with_nccl, 2, backend, memory, init_world=False) == [True, True]


def run_between_devices(rank):
    get_accelerator().set_device(rank)
    store = torch_dist.FileStore(os.path.join(rank_folder(), 'nccl'), 2)
    torch_dist.init_process_group('nccl', store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    numel = 1 << 24
    plan = line_plan((0, 0, 0, 0, numel), source_numels={0: numel}, target_numels={0: numel})
    executor = AffineTransferExecutor(plan,
                                      TransferEndpoints({0: 0}, {0: 1}),
                                      dtype=torch.float32,
                                      group=torch_dist.distributed_c10d._get_default_group())
    buffer = {0: put(torch.arange(float(numel)) if rank == 0 else torch.zeros(numel), 'device')}
    stats = executor.execute(buffer if rank == 0 else {}, buffer if rank else {})
    return torch.equal(buffer[0].cpu(), torch.arange(float(numel))), stats.peak_device_staging_bytes


@needs_two_devices
def test_a_run_from_device_to_device_is_not_staged():
    assert run_ranks(run_between_devices, 2, init_world=False) == [(True, 0)] * 2
