# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Transfers between pageable, pinned and device memory, within a process and across, over transports of each kind.

Every execute follows late work of the caller on the same buffers, and is followed at once by other uses of them, on
the host and on other streams. So a copy that does not wait for what it must wait for is a race, whatever arrives.
"""

from unittest import mock

import numpy
import pytest
import torch

from deepspeed.checkpoint.affine_transfer_executor import (AffineTransferExecutionError, AffineTransferExecutor,
                                                           StagingBudget, TransferEndpoints)
from deepspeed.checkpoint.affine_transfer_memory import arena
from deepspeed.checkpoint.affine_transfer_schedule import ALONE_BYTES_BY_BARE_ENDS
from unit.checkpoint.transfer_cases import KINDS, Placed, RandomTransfer, line_plan, put, tensors_of
from unit.simulated_accelerator.hosts import here
from unit.simulated_accelerator import ranks
from unit.simulated_accelerator.synchronizations import observed

TRANSPORTS = {'host only': {'host'}, 'device only': {'device'}, 'both': {'host', 'device'}}


def run_ranks(body, size, seed, memory):
    """Over a group whose devices have not been used together yet."""
    return ranks.run_ranks(body, size, seed, memory=memory, is_new=True)


def move_and_use(transport, transfer, kind_of, steps=2):
    rank = transport.rank
    executor = transfer.executor(rank, transport)
    placed = Placed(transfer, rank, kind_of)
    for step in range(steps):
        placed.write_sources_late(step)
        usages = (here().pinned_usage, here().device_usage)
        before = [usage.live_bytes for usage in usages]
        for usage in usages:
            usage.reset()
        stats = executor.execute(tensors_of(placed.sources), tensors_of(placed.targets))
        if step == 0:
            peaks = [usage.peak_bytes - begin for usage, begin in zip(usages, before)]
            check_bound(stats, peaks, placed, executor._part.schedule, transport.memory)
        else:
            assert [usage.allocations for usage in usages] == [0, 0]
        placed.use_at_once()
        transfer.check(placed.targets, step)
    return stats


def check_bound(stats, peaks, placed, schedule, memory):
    """Staging is what was allocated, no copy needed memory besides, and both are within the documented formula."""
    pinned_bytes, device_bytes = peaks
    on_device = {True: set(), False: set()}
    for side, buffers in (('source', placed.sources), ('target', placed.targets)):
        for key, guarded in buffers.items():
            on_device[not guarded.base.is_cpu].add((side, key))
    uses_device = bool(on_device[True]) or memory == {'device'}
    assert device_bytes == stats.peak_device_staging_bytes
    assert pinned_bytes == (stats.peak_host_staging_bytes if uses_device else 0)
    budget = placed.transfer.budget
    peers = sum(min(len(side), budget.max_active_peers) for side in (schedule.sends, schedule.receives))
    crosses = any(
        (('source', chunk.source.shard) in on_device[True]) != (('target', chunk.target.shard) in on_device[True])
        for chunk in schedule.local)
    bound = budget.bytes_per_peer * (peers + crosses)
    assert stats.peak_host_staging_bytes <= bound
    assert stats.peak_device_staging_bytes <= (bound if uses_device else 0)


def moves(seed, size, memory, kind_of, steps=2):
    """Run one random transfer; ``kind_of(rank, side)`` is called for each buffer."""
    transfer = RandomTransfer(seed, size)

    def body(transport):
        return move_and_use(transport, transfer, lambda side: kind_of(transport.rank, side), steps)

    with mock.patch.dict(ALONE_BYTES_BY_BARE_ENDS, transfer.alone_bytes):
        return run_ranks(body, size, seed, memory=memory)


@pytest.mark.parametrize('target', KINDS)
@pytest.mark.parametrize('source', KINDS)
@pytest.mark.parametrize('memory', TRANSPORTS)
def test_values_arrive_across_processes(source, target, memory, seeds):
    for seed in seeds:
        moves(seed, 2 + seed % 2, TRANSPORTS[memory], lambda rank, side: source if side == 'source' else target)


@pytest.mark.parametrize('target', KINDS)
@pytest.mark.parametrize('source', KINDS)
def test_values_arrive_within_a_process(source, target, seeds):
    for seed in seeds:
        moves(seed, 1, {'host'}, lambda rank, side: source if side == 'source' else target)


@pytest.mark.parametrize('memory', TRANSPORTS)
def test_values_arrive_between_buffers_of_all_kinds(memory, seeds):
    for seed in seeds:
        rng = numpy.random.default_rng(seed)
        moves(seed, 1 + seed % 3, TRANSPORTS[memory], lambda rank, side: rng.choice(KINDS))


@pytest.mark.parametrize('memory', TRANSPORTS)
def test_buffers_may_be_of_another_kind_with_each_call(memory, seeds):
    for seed in seeds:
        transfer, rng = RandomTransfer(seed, 2), numpy.random.default_rng(seed)

        def body(transport):
            executor = transfer.executor(transport.rank, transport)
            for step in range(3):
                placed = Placed(transfer, transport.rank, lambda side: rng.choice(KINDS))
                placed.write_sources_late(step)
                executor.execute(tensors_of(placed.sources), tensors_of(placed.targets))
                placed.use_at_once()
                transfer.check(placed.targets, step)

        with mock.patch.dict(ALONE_BYTES_BY_BARE_ENDS, transfer.alone_bytes):
            run_ranks(body, 2, seed, memory=TRANSPORTS[memory])


# What is not staged, and what does not wait


def line(source_rank, target_rank, numel, **options):
    """An executor's arguments for one run of ``numel`` floats from a rank to a rank."""
    plan = line_plan((0, 0, 0, 0, numel), source_numels={0: numel}, target_numels={0: numel})
    return (plan, TransferEndpoints({0: source_rank}, {0: target_rank})), dict(dtype=torch.float32, **options)


def staging_of_a_run(source, target, memory, target_rank):
    """(host, device) staging bytes of each rank when a run of 1,024 floats goes from rank 0 to ``target_rank``."""

    def body(transport):
        arguments, options = line(0, target_rank, 1024)
        executor = AffineTransferExecutor(*arguments, **options, group=transport)
        sources = {0: put(torch.arange(1024.), source)} if transport.rank == 0 else {}
        targets = {0: put(torch.zeros(1024), target)} if transport.rank == target_rank else {}
        stats = executor.execute(sources, targets)
        assert all(torch.equal(target.cpu(), torch.arange(1024.)) for target in targets.values())
        return stats.peak_host_staging_bytes, stats.peak_device_staging_bytes

    with mock.patch.dict(ALONE_BYTES_BY_BARE_ENDS, {1: 4, 2: 4}):
        return run_ranks(body, 1 + target_rank, 0, memory=memory)


@pytest.mark.parametrize('source, target', [('pinned', 'device'), ('device', 'pinned'), ('device', 'device'),
                                            ('pageable', 'pinned')])
def test_a_run_within_a_process_goes_straight_from_buffer_to_buffer(source, target):
    assert staging_of_a_run(source, target, {'host'}, 0) == [(0, 0)]


@pytest.mark.parametrize('source, target', [('pageable', 'device'), ('device', 'pageable')])
def test_pageable_memory_meets_the_device_through_pinned_slots_alone(source, target):
    assert staging_of_a_run(source, target, {'host'}, 0) == [(4096, 0)]


RUN_BETWEEN_RANKS = {
    ('pageable', 'pinned', 'host only'): [(0, 0), (0, 0)],
    ('device', 'pageable', 'host only'): [(4096, 0), (0, 0)],
    ('pinned', 'device', 'both'): [(0, 0), (4096, 0)],
    ('device', 'device', 'host only'): [(4096, 0), (4096, 0)],
    ('device', 'device', 'both'): [(0, 0), (0, 0)],
    ('device', 'device', 'device only'): [(0, 0), (0, 0)],
    ('pinned', 'pinned', 'device only'): [(0, 4096), (0, 4096)],
    ('pageable', 'pageable', 'device only'): [(4096, 4096), (4096, 4096)],
}


@pytest.mark.parametrize('source, target, memory', RUN_BETWEEN_RANKS)
def test_a_run_between_ranks_is_staged_only_where_memory_and_transport_differ(source, target, memory):
    """Each end sends from or receives into its buffer where the message may lie there, and needs no more than one slot
    in the message's memory, and one for pageable memory that meets a message on the device."""
    assert staging_of_a_run(source, target, TRANSPORTS[memory], 1) == RUN_BETWEEN_RANKS[source, target, memory]


def host_waits_for_many_parts(source, target, memory):
    """How often the hosts of 3 ranks wait for streams and events in one execute that moves 40 converted parts in one
    message from each rank to each other one, all in one window."""
    numels = dict.fromkeys(range(3), 24)
    pairs = [(s, 8 * t, t, 8 * s, 8) for s in range(3) for t in range(3) if s != t]
    plans = {f'p{number:02}': line_plan(*pairs, source_numels=numels, target_numels=numels) for number in range(40)}
    same = {place: place for place in range(3)}

    def body(transport):
        rank = transport.rank
        executor = AffineTransferExecutor(plans,
                                          TransferEndpoints(same, same),
                                          dtype=torch.bfloat16,
                                          source_dtype=torch.float32,
                                          group=transport)
        sources = {name: {rank: put(torch.full((24, ), rank + 1.), source)} for name in plans}
        targets = {name: {rank: put(torch.zeros(24).bfloat16(), target)} for name in plans}
        assert executor.execute(sources, targets).rounds == 1
        expected = [0 if place == rank else place + 1 for place in range(3) for _ in range(8)]
        return all(by_place[rank].tolist() == expected for by_place in targets.values())

    with observed('affine_transfer') as calls:
        assert run_ranks(body, 3, 0, memory=memory) == [True] * 3
    return sum(count for site, count in calls.items() if site[0] in ('Stream.synchronize', 'Event.synchronize'))


@pytest.mark.parametrize('source, target, memory, waits', [('device', 'pageable', 'host only', 1),
                                                           ('pageable', 'device', 'host only', 0),
                                                           ('device', 'device', 'device only', 0),
                                                           ('pageable', 'pageable', 'device only', 1)])
def test_the_host_waits_once_for_all_parts_of_a_window(source, target, memory, waits):
    """Besides, every rank, as all use their devices, waits once for either lane at the end."""
    assert host_waits_for_many_parts(source, target, TRANSPORTS[memory]) == 3 * (waits + 2)


def test_a_rank_whose_buffers_are_in_host_memory_leaves_its_device_alone():
    """Also where its peer's are not, over a transport that takes host memory; its slots are not pinned either."""

    def body(transport):
        arguments, options = line(0, 1, 1024, budget=StagingBudget(64))
        executor = AffineTransferExecutor(*arguments, **options, group=transport)
        here().device_usage.reset(), here().pinned_usage.reset()
        window = torch.zeros(1024, 2)[:, 1]
        executor.execute({0: torch.ones(1024).to('simulated')} if transport.rank == 0 else {},
                         {0: window} if transport.rank else {})
        assert transport.rank == 0 or window.eq(1).all()
        return len(here().streams), here().device_usage.allocations + here().pinned_usage.allocations

    streams_and_allocations = run_ranks(body, 2, 0, memory={'host', 'device'})
    assert streams_and_allocations[0] != streams_and_allocations[1] == (1, 0)


@pytest.mark.parametrize('alone_side', ['source', 'target'])
def test_slots_of_peers_in_different_memory_share_the_bound(alone_side, seeds):
    """Rank 0 has strided device memory, of its two peers in turn one has device memory and one host memory."""
    source_ranks, target_ranks = ({
        0: 0,
        1: 0
    }, {
        0: 1,
        1: 2
    }) if alone_side == 'source' else ({
        0: 1,
        1: 2
    }, {
        0: 0,
        1: 0
    })
    plan = line_plan((0, 0, 0, 0, 64), (1, 0, 1, 0, 64), source_numels={0: 64, 1: 64}, target_numels={0: 64, 1: 64})

    def strided(values, kind):
        return put(torch.stack([values, values], dim=1), kind)[:, 1]

    def body(transport):
        executor = AffineTransferExecutor(plan,
                                          TransferEndpoints(source_ranks, target_ranks),
                                          dtype=torch.float32,
                                          budget=StagingBudget(128, max_active_peers=1),
                                          group=transport)
        kind = 'pageable' if transport.rank == 2 else 'device'
        here().device_usage.reset()
        for step in range(2):
            sources = {
                location: strided(torch.arange(64.) + 100 * location + step, kind)
                for location, rank in source_ranks.items() if rank == transport.rank
            }
            targets = {
                location: strided(torch.zeros(64), kind)
                for location, rank in target_ranks.items() if rank == transport.rank
            }
            stats = executor.execute(sources, targets)
            for location, target in targets.items():
                assert torch.equal(target.cpu(), torch.arange(64.) + 100 * location + step)
        return stats.peak_host_staging_bytes, stats.peak_device_staging_bytes

    for seed in seeds:
        stagings = run_ranks(body, 3, seed, memory={'host', 'device'})
        assert all(host <= 128 and device <= 128 for host, device in stagings) and max(stagings[0]) == 128


def test_ranks_that_send_nothing_help_others_to_connect_their_devices():
    """Over a transport that takes both kinds of memory, and only then; also a rank that has host memory alone."""

    def body(transport):
        connects = []
        transport.connect_devices = lambda connect=transport.connect_devices: (connects.append(1), connect())
        arguments, options = line(0, 1, 1024)
        executor = AffineTransferExecutor(*arguments, **options, group=transport)
        for kinds in (('pageable', 'device'), ('device', 'device'), ('device', 'device')):
            source, target = put(torch.ones(1024), kinds[0]), put(torch.zeros(1024), kinds[1])
            executor.execute({0: source} if transport.rank == 0 else {}, {0: target} if transport.rank == 1 else {})
            assert transport.rank != 1 or target.cpu().eq(1).all()
        return len(connects)

    assert run_ranks(body, 3, 0, memory={'host', 'device'}) == [1, 1, 1]
    assert run_ranks(body, 3, 0, memory={'device'}) == [0, 0, 0]


def test_ranks_with_device_memory_are_sent_all_while_others_of_their_host_share_memory():
    """Ranks 0 and 1 send to rank 2 alone, so they have nothing to share, but they agree on it with all."""

    def body(transport):
        transport.host = 5
        executor = AffineTransferExecutor(line_plan((0, 0, 0, 0, 4), (1, 0, 0, 4, 4)),
                                          TransferEndpoints({
                                              0: 0,
                                              1: 1
                                          }, {0: 2}),
                                          dtype=torch.float32,
                                          group=transport)
        rank = transport.rank
        for step in range(2):
            source, target = torch.full((4, ), rank + 10. * step), put(torch.zeros(8), 'device')
            executor.execute({rank: source} if rank < 2 else {}, {0: target} if rank == 2 else {})
            assert rank < 2 or target.cpu().tolist() == [10. * step] * 4 + [10. * step + 1] * 4

    run_ranks(body, 3, 0, memory={'host', 'device'})


# Refusals and failures


def test_a_buffer_on_another_device_is_refused():

    def body(transport):
        arguments, options = line(0, 0, 4)
        with pytest.raises(AffineTransferExecutionError, match='on device meta, expected host memory or simulated:0$'):
            AffineTransferExecutor(*arguments, **options).execute({0: torch.zeros(4, device='meta')},
                                                                  {0: torch.zeros(4)})

    run_ranks(body, 1, 0, memory={'host'})


def test_a_slot_that_cannot_be_allocated_is_a_refusal_on_every_rank():
    transfer = RandomTransfer(1, 2)

    def body(transport):
        executor = transfer.executor(transport.rank, transport)
        placed = Placed(transfer, transport.rank, lambda side: 'device')
        buffers = (tensors_of(placed.sources), tensors_of(placed.targets))
        with pytest.raises(AffineTransferExecutionError) as caught:
            executor.execute(*buffers)
        is_full.clear()
        executor.execute(*buffers)
        placed.use_at_once()
        transfer.check(placed.targets)
        return str(caught.value)

    def arena_of_a_full_device(*args):
        if here().rank in is_full:
            raise torch.OutOfMemoryError('the device is full')
        return arena(*args)

    is_full = {1}
    with mock.patch('deepspeed.checkpoint.affine_transfer_staging.arena', arena_of_a_full_device):
        texts = run_ranks(body, 2, 0, memory={'device'})
    assert texts == ['transfer refused before it began: rank 1: OutOfMemoryError: the device is full'] * 2


class Failing:
    """A transport whose message number ``number`` fails when it is waited for."""

    def __init__(self, transport, number):
        self.rank, self.size, self.memory = transport.rank, transport.size, transport.memory
        self.host, self.timeout_s = transport.host, transport.timeout_s
        self.all_gather, self.abandon = transport.all_gather, transport.abandon
        self.connect_devices = transport.connect_devices
        self._transport, self._number = transport, number

    def exchange(self, sends, receives):
        return tuple([self._failing(message) for message in side]
                     for side in self._transport.exchange(sends, receives))

    def _failing(self, message):
        self._number -= 1
        return FailingMessage() if self._number < 0 else message


class FailingMessage:

    def wait(self):
        raise RuntimeError('the cable is cut')


@pytest.mark.parametrize('memory', TRANSPORTS)
def test_a_transfer_that_failed_touches_buffers_no_more(memory, seeds):
    for seed in seeds:
        transfer, rng = RandomTransfer(seed, 2), numpy.random.default_rng(seed)

        def body(transport):
            executor = transfer.executor(transport.rank, Failing(transport, 1 + seed % 3))
            placed = Placed(transfer, transport.rank, lambda side: rng.choice(KINDS))
            placed.write_sources_late(0)
            try:
                executor.execute(tensors_of(placed.sources), tensors_of(placed.targets))
            except AffineTransferExecutionError as error:
                assert 'targets are undefined' in str(error)
            placed.use_at_once()

        with mock.patch.dict(ALONE_BYTES_BY_BARE_ENDS, transfer.alone_bytes):
            run_ranks(body, 2, seed, memory=TRANSPORTS[memory])
