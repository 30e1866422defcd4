# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Transfers between gloo ranks of one host through memory that they share: what arrives, what is sent all the same,
and what becomes of it when a rank cannot share, is lost, or is done."""

import contextlib
import errno
import functools
import gc
import itertools
import logging
import os
import signal
import socket
import time
import warnings
from unittest import mock

import pytest
import torch

from deepspeed.checkpoint import affine_transfer_mover, affine_transfer_schedule, affine_transfer_shared
from deepspeed.checkpoint.affine_transfer import plan_model
from deepspeed.checkpoint.affine_transfer_executor import AffineTransferExecutor, StagingBudget, TransferEndpoints
from deepspeed.checkpoint.affine_transfer_shared import Line, SharedSlots, host_identity
from deepspeed.utils import logger
from unit.checkpoint.transfer_cases import RandomTransfer, line_plan, tensors_of
from unit.checkpoint.transfer_faults import UNDEFINED, UNTOUCHED, die, failure_of, told_of_ranks, was_waiting_for
from unit.checkpoint.transfer_four_ranks import assert_moved, buffers_of, executor_of
from unit.checkpoint.transfer_groups import MESSAGES, WatchedGroup, gloo_outside_any_world, world
from unit.ranks import run_ranks

STEPS = ('_make', '_connect', '_accept', '_take_over')


def on_host(number):
    """Let this process's transports be on a host of this number; 0 for one that shares with nobody."""
    return mock.patch('deepspeed.checkpoint.affine_transfer_transport.host_identity', lambda: number)


def used_for_sharing():
    """Connections, files and maps of this process that are there to share memory."""
    with open('/proc/net/unix') as sockets, open('/proc/self/maps') as maps:
        local = {f'socket:[{line.split()[6]}]' for line in sockets}
        mapped = sum('deepspeed-affine-transfer' in line for line in maps)
    links = []
    for number in os.listdir('/proc/self/fd'):
        with contextlib.suppress(FileNotFoundError):  # others close theirs meanwhile
            links.append(os.readlink(f'/proc/self/fd/{number}'))
    return sum(link in local for link in links), sum('deepspeed-affine-transfer' in link for link in links), mapped


# Values


def random_transfers(rank, hosts, seeds):
    """Two calls of each transfer. Returns the ranks that messages were sent to, and received from."""
    partners = set()
    for seed in seeds:
        transfer = RandomTransfer(seed, len(hosts))
        affine_transfer_schedule.ALONE_BYTES_BY_BARE_ENDS = transfer.alone_bytes
        affine_transfer_schedule.MAX_SHARED_BYTES = (8, 1 << 20)[seed % 2]
        calls = []
        with on_host(hosts[rank]):
            executor = transfer.executor(rank, WatchedGroup(world(), lambda *call: calls.append(call)))
        bound = transfer.budget.bytes_per_peer * active_peers(transfer, rank, hosts)
        for step in range(2):
            sources, targets = transfer.buffers(rank, step)
            stats = executor.execute(tensors_of(sources), tensors_of(targets))
            try:
                transfer.check(targets, step)
                assert stats.peak_host_staging_bytes <= bound
            except Exception as error:
                raise AssertionError(f'seed {seed}: {error}') from error
        partners |= {args[1] for name, args in calls if name in MESSAGES}
    return partners


def active_peers(transfer, rank, hosts):
    """The peers whose staging the executor's bound counts on ``rank``."""
    segments = [segment for plan in plan_model(*reversed(transfer.maps)).values() for segment in plan.segments]
    pairs = {(transfer.ranks[0][segment.source_rank], transfer.ranks[1][segment.target_rank]) for segment in segments}
    receivers = {target for source, target in pairs if source == rank != target}
    senders = {source for source, target in pairs if target == rank != source}
    neighbours = {peer for peer, host in enumerate(hosts) if host == hosts[rank] != 0}
    most = transfer.budget.max_active_peers
    return sum(
        min(len(peers), most) for peers in (receivers & neighbours, receivers - neighbours, senders - neighbours))


@pytest.mark.parametrize('hosts, partners', [((7, 7, 7), [set()] * 3),
                                             ((5, 9, 5, 0), [{1, 3}, {0, 2, 3}, {1, 3}, {0, 1, 2}])],
                         ids=['one host', 'two hosts and one unknown'])
def test_random_transfers_bring_every_element_and_send_nothing_within_a_host(hosts, partners):
    assert run_ranks(random_transfers, len(hosts), hosts, range(60)) == partners


def alternating_strides(rank):
    """Contiguous and strided buffers in turn, from two executors in turn; returns how many areas were made."""
    numel = 5000
    plan = line_plan((0, 0, 0, 0, numel), source_numels={0: numel}, target_numels={0: numel})
    with mock.patch('os.posix_fallocate', wraps=os.posix_fallocate) as made:
        executors = [
            AffineTransferExecutor(plan,
                                   TransferEndpoints({0: 0}, {0: 1}),
                                   dtype=torch.float32,
                                   budget=StagingBudget(1 << 12),
                                   group=world()) for _ in range(2)
        ]
        for step, executor in zip(range(8), itertools.cycle(executors)):
            stride = 1 + step // 2 % 2
            values, target = torch.arange(float(numel)) + step, torch.zeros(numel, stride)[:, 0]
            executor.execute({0: values} if rank == 0 else {}, {0: target} if rank else {})
            assert rank == 0 or torch.equal(target, values)
    return made.call_count


def test_shared_memory_serves_buffers_of_other_strides_and_is_each_executors_own():
    assert run_ranks(alternating_strides, 2) == [2, 0]


# The two waits


def hasty(rank, hasty_rank, wait):
    """64 one-element messages from rank 0 to rank 1, each of which is slow where the other rank does not wait."""
    numel = 64
    executor = AffineTransferExecutor(line_plan((0, 0, 0, 0, numel)),
                                      TransferEndpoints({0: 0}, {0: 1}),
                                      dtype=torch.float32,
                                      budget=StagingBudget(8),
                                      group=world())
    target = torch.zeros(numel)
    copy = affine_transfer_mover.copy

    def slow_copy(copies):
        time.sleep(0.002 * bool(copies.targets))
        copy(copies)

    with mock.patch.object(affine_transfer_mover, 'copy', copy if rank == hasty_rank else slow_copy):
        with mock.patch.object(Line, wait, (lambda line: None) if rank == hasty_rank else getattr(Line, wait)):
            executor.execute({0: torch.arange(1., 65)} if rank == 0 else {}, {0: target} if rank else {})
    return target.tolist() == list(range(1, 65))


@pytest.mark.parametrize('hasty_rank, wait', [(0, 'until_read'), (1, 'until_written')])
def test_without_either_wait_values_are_lost(hasty_rank, wait):
    assert run_ranks(hasty, 2, hasty_rank, wait)[1] is False
    assert run_ranks(hasty, 2, None, wait)[1] is True


# Who shares

OBSTACLES = {
    'no room': lambda: mock.patch('os.posix_fallocate', side_effect=OSError(errno.ENOSPC, 'no room')),
    'out of reach':
    lambda: mock.patch.object(affine_transfer_shared, '_mapped', side_effect=RuntimeError('no such file')),
    **{
        step: functools.partial(mock.patch.object, SharedSlots, step, side_effect=OSError('no such step'))
        for step in STEPS
    }, 'no host': lambda: on_host(0),
    'not asked to': contextlib.nullcontext
}


def move_where_one_cannot_share(rank, obstacle):
    """Rank 1 cannot. Returns with whom each rank exchanges messages in two calls, and what it warns of."""
    calls, warnings = [], []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logger.addHandler(handler)
    group = WatchedGroup(world(), lambda *call: calls.append(call))
    with OBSTACLES[obstacle]() if rank == 1 else contextlib.nullcontext():
        executor = executor_of(group, share_memory=rank != 1 or obstacle != 'not asked to')
        for base in (0, 100):
            sources, targets = buffers_of(rank, base)
            executor.execute(sources, targets)
            assert_moved(rank, targets, base)
    return {args[1] for name, args in calls if name in MESSAGES}, warnings


@pytest.mark.parametrize('obstacle', OBSTACLES)
def test_messages_to_and_from_a_rank_that_cannot_share_are_sent_and_others_share(obstacle):
    partners, warned = zip(*run_ranks(move_where_one_cannot_share, 4, obstacle))
    assert partners == ({1}, {0, 2}, {1}, set())
    assert warned[0] == warned[2] == warned[3] == []
    cause = {
        'no room': 'no room',
        'out of reach': 'no such file',
        **dict.fromkeys(STEPS, 'no such step')
    }.get(obstacle)
    assert len(warned[1]) == (cause is not None) and all(cause in warning for warning in warned[1])


def test_processes_share_a_host_only_where_they_can_reach_one_another(monkeypatch):
    here = host_identity()
    assert here == host_identity() and 0 < here < 1 << 63
    with monkeypatch.context() as patches:
        patches.setattr(os, 'geteuid', lambda: 12345)
        assert host_identity() not in (0, here)
    for name, other in (('_NETWORK', '/proc/self/ns/mnt'), ('_BOOT_ID', '/proc/version')):
        with monkeypatch.context() as patches:
            patches.setattr(affine_transfer_shared, name, other)
            assert host_identity() not in (0, here)
            patches.setattr(affine_transfer_shared, name, '/nowhere')
            assert host_identity() == 0


def meet_strangers(rank, greeting):
    """Somebody else connects to rank 0 first, and says this."""
    group = WatchedGroup(world(), lambda name, _: sent.append(name) if name in MESSAGES else None)
    sent, connect = [], SharedSlots._connect
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def connect_after_a_stranger(slots):
        stranger.connect(slots._address(0))
        stranger.send(greeting)
        connect(slots)

    executor = executor_of(group)
    sources, targets = buffers_of(rank)
    with stranger, mock.patch.object(SharedSlots, '_connect', connect_after_a_stranger if rank == 0 else connect):
        executor.execute(sources, targets)
    assert_moved(rank, targets)
    return sent


@pytest.mark.parametrize('greeting', [b'', b'hello', (7).to_bytes(8, 'little')], ids=['silent', 'short', 'rank 7'])
def test_somebody_else_who_connects_is_ignored(greeting):
    """Its connection waits until all have connected, and is gone through before or after theirs."""
    assert run_ranks(meet_strangers, 4, greeting) == [[]] * 4


def share_on_and_off(rank):
    """Rank 1 is on another host for some calls. Returns what is used for sharing after each."""
    executor, used = executor_of(), []
    here = executor._host
    for step, is_away in enumerate((False, True, True, False)):
        executor._host = here + 2 * (is_away and rank == 1)
        sources, targets = buffers_of(rank, 100 * step)
        # All lay out anew, as they do where the kind of a rank's buffers changes.
        executor._ready = None
        executor.execute(sources, targets)
        assert_moved(rank, targets, 100 * step)
        used.append(used_for_sharing())
    return used


def test_what_is_shared_follows_the_hosts_that_ranks_tell():
    """Rank 0 sends to 1 and 2, rank 1 to 2; rank 3 has no messages."""
    for used, (together, apart) in zip(run_ranks(share_on_and_off, 4), ((2, 1), (2, 0), (2, 1), (0, 0))):
        assert used == [(count, 0, count) for count in (together, apart, apart, together)]


# What is left


def make_and_drop(rank):
    """What is used for sharing before a call, in its last step to share, after it, and without the executor."""
    used = [used_for_sharing()]
    executor = executor_of()
    take_over = SharedSlots._take_over

    def take_over_and_look(slots):
        take_over(slots)
        used.append(used_for_sharing())

    with mock.patch.object(SharedSlots, '_take_over', take_over_and_look):
        executor.execute(*buffers_of(rank))
    used.append(used_for_sharing())
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        del executor
        gc.collect()
    used.append(used_for_sharing())
    return used


def test_nothing_but_connections_and_maps_is_kept_and_these_no_longer_than_the_executor():
    """Rank 0 has 2 areas of its own, rank 1 has one, and maps one of rank 0, rank 2 maps one of each."""
    for rank, (before, sharing, after, dropped) in enumerate(run_ranks(make_and_drop, 4)):
        connected = (2, 2, 2, 0)[rank]
        assert before == dropped == (0, 0, 0)
        assert sharing == (connected + (rank in (0, 1)), (2, 1, 0, 0)[rank], connected)
        assert after == (connected, 0, connected)


# Lost ranks


def fail():
    raise RuntimeError('the bus is broken')


def lose_rank_1(rank, owner, name, number, fault, told, timeout_s=60):
    """Rank 1 has a fault instead of its ``number``-th call, from 0 on, of a method.

    In each execute it sends 4 messages, and receives 4. Returns what each rank says, and after how many seconds.
    """
    numbers, method = itertools.count(), getattr(owner, name)

    def with_fault(*args):
        if next(numbers) == number:
            fault()
        return method(*args)

    executor = executor_of(gloo_outside_any_world('fragile', rank, 4, timeout_s=timeout_s), budget=8)
    started = time.monotonic()
    with mock.patch.object(owner, name, with_fault if rank == 1 else method):
        text = failure_of(rank, executor)
    seconds = time.monotonic() - started
    assert text.startswith(told), text
    gc.collect()
    assert used_for_sharing() == (0, 0, 0)
    return text, seconds


@pytest.mark.parametrize('name, number', [('tell_written', 0), ('tell_written', 5), ('tell_read', 2),
                                          ('until_read', 3), ('until_written', 7)])
def test_others_say_that_targets_are_undefined_when_a_rank_is_killed_among_shared_messages(name, number):
    told = told_of_ranks(lose_rank_1, 4, Line, name, number, die, UNDEFINED, init_world=False)
    assert told == 'rank 1: exited with code -9 (SIGKILL)'


@pytest.mark.parametrize('name', [*STEPS, '_release'])
def test_others_say_that_targets_are_untouched_when_a_rank_is_killed_while_memory_is_shared_out(name):
    told = told_of_ranks(lose_rank_1, 4, SharedSlots, name, 0, die, UNTOUCHED, init_world=False)
    assert told == 'rank 1: exited with code -9 (SIGKILL)'


def test_a_failure_among_shared_messages_reaches_every_rank():
    texts, _ = zip(*run_ranks(lose_rank_1, 4, Line, 'tell_read', 5, fail, UNDEFINED, init_world=False))
    assert texts[1] == UNDEFINED + 'the bus is broken'
    assert any('rank 1 through shared memory: it ended or gave up' in texts[rank] for rank in (0, 2))


@pytest.fixture
def line():
    """This process's line to rank 1, and the other end."""
    here, there = socket.socketpair()
    here.settimeout(0.5)
    with here, there:
        yield Line(1, here), there


@contextlib.contextmanager
def handling(number, handler):
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_who_gives_up_is_noticed_at_once_even_where_a_forked_process_keeps_the_connection_open(line):
    line, there = line
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        Line(0, there).abandon()
        with pytest.raises(RuntimeError, match='receiving from rank 1 through shared memory: it ended or gave up'):
            line.until_written()
        # A process that has not set it otherwise is ended by this signal.
        with handling(signal.SIGPIPE, signal.SIG_DFL):
            with pytest.raises(RuntimeError, match='sending to rank 1 through shared memory: it ended or gave up'):
                line.tell_written()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_wait_times_out_however_many_signals_interrupt_it(line):
    line, _ = line
    started = time.monotonic()
    with handling(signal.SIGALRM, lambda *_: None):
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        try:
            with pytest.raises(RuntimeError, match='sending to rank 1 through shared memory: timed out'):
                line.until_read()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    assert 0.4 < time.monotonic() - started < 5


TIMEOUT_S, MARGIN_S = 2, 1


def test_a_stalled_rank_is_given_up_after_the_timeout_of_the_group():
    fault = functools.partial(time.sleep, 2 * TIMEOUT_S)
    texts, seconds = zip(
        *run_ranks(lose_rank_1, 4, Line, 'tell_written', 1, fault, UNDEFINED, TIMEOUT_S, init_world=False))
    assert all(TIMEOUT_S - MARGIN_S < seconds[rank] < TIMEOUT_S + MARGIN_S for rank in (0, 2, 3)), seconds
    assert was_waiting_for(1, texts[0]) and was_waiting_for(1, texts[2]), texts
    assert not any(was_waiting_for(healthy, texts[rank]) for rank in (0, 2, 3) for healthy in (2, 3)), texts
