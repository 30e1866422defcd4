# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a transfer between gloo ranks may take: staging, memory, and in later calls nothing but the messages."""

import ctypes
import gc
import os
import sys
from collections import Counter

import pytest
import torch

from deepspeed.checkpoint.affine import contiguous_split_map
from deepspeed.checkpoint.affine_transfer import plan_transfer
from deepspeed.checkpoint.affine_transfer_executor import AffineTransferExecutor, StagingBudget, TransferEndpoints
from unit.checkpoint.transfer_cases import line_plan
from unit.checkpoint.transfer_counts import PLANNING, AllocatingCalls, planning_calls
from unit.checkpoint.transfer_groups import LEARNS, MESSAGES, TELLS, WatchedGroup, run_sending_ranks, world


def peaks_of_one_sender_and_two_receivers(rank):
    """Strided on both ends, so everything is staged: (1000, 64) columns to ranks 1 and 2."""
    shape = (1000, 64)
    plan = plan_transfer(contiguous_split_map(shape, [32, 32], 1), contiguous_split_map(shape, [1000], 0))
    executor = AffineTransferExecutor(plan,
                                      TransferEndpoints({0: 0}, {
                                          0: 1,
                                          1: 2
                                      }),
                                      dtype=torch.float32,
                                      budget=StagingBudget(10_000),
                                      group=world())
    values = torch.arange(64000.).view(shape)
    base = torch.zeros(1000, 40)
    stats = executor.execute({0: values} if rank == 0 else {}, {rank - 1: base[:, :32]} if rank else {})
    assert rank == 0 or torch.equal(base[:, :32], values.split(32, dim=1)[rank - 1])
    return stats.peak_host_staging_bytes, stats.rounds, stats.sent_bytes


@pytest.mark.parametrize('shares_memory', [False, True])
def test_staging_stays_within_bytes_per_peer_times_peers_while_much_more_is_moved(shares_memory):
    """A message holds 39 rows of 128 bytes (half of 10,000 bytes), two messages are staged per peer and direction; in
    shared memory, both ends are the sender's."""
    received = (0 if shares_memory else 2 * 39 * 128, 26, 0)
    assert run_sending_ranks(peaks_of_one_sender_and_two_receivers, 3,
                             shares_memory=shares_memory) == [(4 * 39 * 128, 26, 256_000), received, received]


def growth_while_columns_move(rank):
    """Converted columns, 64 KiB and then 32 MiB of them: the peak growth and the staging, in bytes."""
    for rows in (1 << 6, 1 << 14):
        shape = (rows, 1 << 10)
        plan = plan_transfer(contiguous_split_map(shape, [1 << 9] * 2, 1), contiguous_split_map(shape, [rows], 0))
        full = torch.full(shape, float(rank + 1), dtype=torch.bfloat16 if rank else torch.float32)
        halves = dict(enumerate(full.split(1 << 9, dim=1)))
        before = memory_of_process('VmRSS')
        with open('/proc/self/clear_refs', 'w') as clear_refs:
            clear_refs.write('5')  # the peak starts anew
        executor = AffineTransferExecutor(plan,
                                          TransferEndpoints({0: 0}, {
                                              0: 1,
                                              1: 1
                                          }),
                                          dtype=torch.bfloat16,
                                          source_dtype=torch.float32,
                                          budget=StagingBudget(1 << 20),
                                          group=world())
        stats = executor.execute({0: full} if rank == 0 else {}, halves if rank else {})
        growth = memory_of_process('VmHWM') - before
        assert full.eq(1).all()
    return growth, stats.peak_host_staging_bytes


def memory_of_process(name):
    with open('/proc/self/status') as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name))


@pytest.mark.parametrize('shares_memory, stagings', [(False, [1 << 20, 1 << 20]), (True, [1 << 20, 0])])
def test_a_process_grows_by_its_staging_while_it_moves_32_times_as_much(shares_memory, stagings):
    """What a process reads of another one's shared memory counts as resident in both."""
    for (growth,
         staging), expected in zip(run_sending_ranks(growth_while_columns_move, 2, shares_memory=shares_memory),
                                   stagings):
        assert staging == expected
        assert growth < (3 << 20)


# Later calls


def repeat_and_count_allocations(rank):
    plan = plan_transfer(contiguous_split_map((30, 8), [3, 5], 1), contiguous_split_map((30, 8), [11, 19], 0))
    small = line_plan((0, 0, 1, 0, 3), source_numels={0: 3}, target_numels={1: 3})
    endpoints = TransferEndpoints({0: 0, 1: 1}, {0: 1, 1: 2})
    executor = AffineTransferExecutor({
        'w': plan,
        'bias': small
    },
                                      endpoints,
                                      dtype=torch.bfloat16,
                                      source_dtype=torch.float32,
                                      budget=StagingBudget(64),
                                      group=world())
    allocating = []
    for step in range(4):
        full, bias = torch.arange(240.).view(30, 8) + step, torch.arange(3.) + step
        sources = {'w': {rank: full.split([11, 19])[rank]} if rank < 2 else {}, 'bias': {0: bias} if rank == 0 else {}}
        targets = {'w': {}, 'bias': {}}
        if rank:
            targets['w'][rank - 1] = torch.zeros((30, 3 if rank == 1 else 5), dtype=torch.bfloat16)
        if rank == 2:
            targets['bias'][1] = torch.zeros(3, dtype=torch.bfloat16)
        with AllocatingCalls() as calls:
            executor.execute(sources, targets)
        allocating.append(len(calls.names))
        if rank:
            assert torch.equal(targets['w'][rank - 1], full.split([3, 5], dim=1)[rank - 1].to(torch.bfloat16))
    return allocating[1:]


@pytest.mark.parametrize('shares_memory', [False, True])
def test_later_executes_allocate_no_tensor_and_bring_the_new_values(shares_memory):
    assert run_sending_ranks(repeat_and_count_allocations, 3, shares_memory=shares_memory) == [[0, 0, 0]] * 3


def what_executes_call(rank):
    """By call of one executor, with other buffers each: how often it plans, and what it asks of its group.

    The construction counts as part of the first one, and one object collective of the test's own as a last one.
    """
    asked, calls = Counter(), []

    def ask(name, args):
        asked[(name, args[0][0].nbytes) if name in TELLS + LEARNS else name] += 1

    def tell():
        calls.append((dict(planned), dict(asked)))
        planned.clear()
        asked.clear()

    with planning_calls() as planned:
        executor = AffineTransferExecutor(line_plan((0, 0, 0, 0, 64)),
                                          TransferEndpoints({0: 0}, {0: 1}),
                                          dtype=torch.float32,
                                          budget=StagingBudget(64),
                                          group=WatchedGroup(world(), ask))
        for step in range(4):
            values, target = torch.full((64, ), step + 1.), torch.zeros(64)
            executor.execute({0: values} if rank == 0 else {}, {0: target} if rank else {})
            assert rank == 0 or torch.equal(target, values)
            tell()
        torch.distributed.all_gather_object([None, None], rank)
        tell()
    return calls


@pytest.mark.parametrize('shares_memory', [False, True])
def test_later_executes_plan_nothing_and_exchange_two_small_rows(shares_memory):
    for (first, *later, own), way in zip(run_sending_ranks(what_executes_call, 2, shares_memory=shares_memory),
                                         MESSAGES):
        messages = {} if shares_memory else {way: 8}
        assert later == [({}, {('tell', 72): 2, ('broadcast', 144): 2, **messages})] * 3
        # What is counted does happen, and is seen: the construction exchanges one row more, the layout another, and
        # four steps to share memory.
        assert set(first[0]) == set(PLANNING)
        more = 6 if shares_memory else 2
        assert first[1].items() >= {('tell', 72): 2 + more, ('broadcast', 144): 2 + more, **messages}.items()
        assert own == ({'all_gather_object': 1}, {})


class Mallinfo2(ctypes.Structure):
    """What glibc's mallinfo2 returns; ``uordblks`` and ``hblkhd`` are the bytes in use, on the heaps and mapped."""
    _fields_ = [(name, ctypes.c_size_t) for name in ('arena', 'ordblks', 'smblks', 'hblks', 'hblkhd', 'usmblks',
                                                     'fsmblks', 'uordblks', 'fordblks', 'keepcost')]


def in_use():
    """(open files, threads, Python's blocks, bytes of malloc) of this process.

    Resident memory is no measure here: it moves by more than a leak would, with what malloc keeps for itself.
    """
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    used = mallinfo2()
    return (len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task')), sys.getallocatedblocks(),
            used.uordblks + used.hblkhd)


def ten_thousand_small_transfers(rank):
    """What is in use after 10,000 executes less what was after the first 1,000 of them."""
    plan = line_plan((0, 0, 0, 0, 64), source_numels={0: 64}, target_numels={0: 64})
    executor = AffineTransferExecutor(plan,
                                      TransferEndpoints({0: 0}, {0: 1}),
                                      dtype=torch.bfloat16,
                                      source_dtype=torch.float32,
                                      budget=StagingBudget(64),
                                      group=world())
    source, target = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
    for step in range(10000):
        source.fill_(step % 256)
        executor.execute({0: source} if rank == 0 else {}, {0: target} if rank else {})
        assert rank == 0 or target.eq(step % 256).all()
        if step == 999:
            in_use()
            before = in_use()
    return tuple(after - begin for after, begin in zip(in_use(), before))


@pytest.mark.parametrize('shares_memory', [False, True])
def test_ten_thousand_executes_open_no_files_start_no_threads_and_keep_no_memory(shares_memory):
    """One small object kept by every execute would be 9,000 blocks, or 288,000 bytes where it is not Python's."""
    for files, threads, blocks, nbytes in run_sending_ranks(ten_thousand_small_transfers,
                                                            2,
                                                            timeout=300,
                                                            shares_memory=shares_memory):
        assert files <= 0 and threads <= 0, (files, threads)
        assert blocks < 1000 and nbytes < 1 << 16, (blocks, nbytes)
