# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The simulated transports: what arrives, in which order, and what they refuse."""

import pytest
import torch

from deepspeed.accelerator import get_accelerator
from unit.simulated_accelerator.hosts import here
from unit.simulated_accelerator.ranks import RankFailure, run_ranks
from unit.simulated_accelerator.scheduler import Deadlock

ALL_MODES = (0, 1, 3, 5, 7)
PLACES = {'host': {'host'}, 'device': {'device'}, 'both': {'host', 'device'}}


def tensor_in(place, value, numel=4):
    return torch.full((numel, ), float(value), device='simulated' if place == 'device' else 'cpu')


def around(place):
    """A body that sends its rank to the next rank, several times, and returns what came from the one before."""

    def body(transport):
        got = []
        after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
        for number in range(3):
            sent, received = tensor_in(place, 10 * number + transport.rank), tensor_in(place, -1)
            for pending in sum(transport.exchange([(sent, after)], [(received, before)]), []):
                pending.wait()
            got.append(received.cpu()[0].item())
        return got

    return body


@pytest.mark.parametrize('size', [2, 3])
@pytest.mark.parametrize('memory', PLACES)
def test_messages_arrive_in_order(memory, size, seeds):
    for place in PLACES[memory]:
        for seed in seeds:
            got = run_ranks(around(place), size, seed, memory=PLACES[memory])
            assert got == [[10. * number + (rank - 1) % size for number in range(3)] for rank in range(size)]


def test_a_window_needs_devices_that_all_ranks_have_connected():

    def body(transport, connects):
        if connects:
            transport.connect_devices()
        messages = [(tensor_in('device', 1), 1 - transport.rank)] if transport.rank < 2 else []
        for message in transport.exchange(messages, [])[0] if transport.rank == 0 else transport.exchange([],
                                                                                                          messages)[1]:
            message.wait()

    run_ranks(lambda transport: body(transport, True), 3, 0, memory={'host', 'device'}, is_new=True)
    with pytest.raises(RankFailure, match='before all ranks had connected their devices'):
        run_ranks(lambda transport: body(transport, False), 3, 0, memory={'host', 'device'}, is_new=True)


def test_rows_are_gathered_in_rank_order(seeds):

    def body(transport):
        gathered = []
        for number in range(3):
            rows = [torch.empty(2, dtype=torch.int64) for _ in range(3)]
            transport.all_gather(rows, torch.tensor([number, transport.rank]))
            gathered.append(torch.stack(rows).tolist())
        return gathered

    for seed in seeds:
        expected = [[[number, rank] for rank in range(3)] for number in range(3)]
        assert run_ranks(body, 3, seed, memory={'device'}) == [expected] * 3


def test_waiting_for_a_device_message_does_not_hold_the_host_up():

    def body(transport):
        if transport.rank == 1:
            transport.all_gather([torch.empty(1)] * 2, torch.zeros(1))
            transport.exchange([(tensor_in('device', 7), 0)], [])[0][0].wait()
            return None
        received = tensor_in('device', -1)
        transport.exchange([], [(received, 1)])[1][0].wait()
        transport.all_gather([torch.empty(1)] * 2, torch.zeros(1))
        return received.cpu().tolist()

    for seed in ALL_MODES:
        assert run_ranks(body, 2, seed, memory={'device'}) == [[7.] * 4, None]


def test_a_device_message_starts_after_the_current_stream_only():

    def body(transport):
        stream, late = get_accelerator().Stream(), get_accelerator().Stream()
        received = torch.zeros(4, device='simulated')
        for other in (stream, late):
            other.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(late):
            received.fill_(3.)
        with get_accelerator().stream(stream):
            sent = torch.ones(4, device='simulated')
            pending = sum(transport.exchange([(sent, 1 - transport.rank)], [(received, 1 - transport.rank)]), [])
            for message in pending:
                message.wait()
        return received

    with pytest.raises(AssertionError,
                       match='a window of 1 sends and 1 receives .* are not ordered|are not ordered, '):
        run_ranks(body, 2, 1, memory={'device'})


def test_a_window_is_entered_once_all_its_peers_have_reached_it():
    """Each rank waits in its first window for a rank that comes to it in its second."""

    def body(transport):
        for peer in ((transport.rank + 1) % 3, (transport.rank - 1) % 3):
            tensor = tensor_in('device', transport.rank)
            transport.exchange([(tensor, peer)], [(tensor_in('device', 0), peer)])
        get_accelerator().synchronize()

    with pytest.raises(Deadlock, match='a window of 1 sends and 1 receives'):
        run_ranks(body, 3, 1, memory={'device'})


def exchange(transport, sends=(), receives=()):
    for pending in sum(transport.exchange(list(sends), list(receives)), []):
        pending.wait()
    get_accelerator().synchronize()


def refused(body, size, memory, seed=1, **options):
    """The text of the refusal with which a rank failed."""
    with pytest.raises(RankFailure) as error:
        run_ranks(body, size, seed, memory=memory, **options)
    assert isinstance(error.value.__cause__, RuntimeError)
    return str(error.value.__cause__)


@pytest.mark.parametrize('seed', ALL_MODES)
def test_a_message_with_one_end_in_host_memory_is_refused(seed):

    def body(transport):
        if transport.rank == 0:
            exchange(transport, sends=[(tensor_in('device', 1), 1)])
        else:
            exchange(transport, receives=[(tensor_in('host', 1), 0)])

    text = refused(body, 2, PLACES['both'], seed)
    assert '16 bytes in host memory' in text and '16 bytes in device memory' in text


@pytest.mark.parametrize('place,memory', [('host', 'device'), ('device', 'host')])
def test_memory_that_a_transport_cannot_take_is_refused(place, memory):
    text = refused(lambda transport: exchange(transport, sends=[(tensor_in(place, 1), 1 - transport.rank)]), 2,
                   PLACES[memory])
    assert f'a message in {place} memory' in text


@pytest.mark.parametrize('place', ['host', 'device'])
def test_ends_of_different_sizes_are_refused(place):

    def body(transport):
        if transport.rank == 0:
            exchange(transport, sends=[(tensor_in(place, 1, numel=4), 1)])
        else:
            exchange(transport, receives=[(tensor_in(place, 1, numel=3), 0)])

    assert '16 bytes' in refused(body, 2, PLACES[place])


def test_windows_that_differ_at_their_ends_are_refused():

    def body(transport):
        tensors = [tensor_in('device', 1) for _ in range(2)]
        peer = 1 - transport.rank
        if transport.rank == 0:
            exchange(transport, sends=[(tensors[0], peer)], receives=[(tensors[1], peer)])
        else:
            exchange(transport, sends=[(tensors[0], peer)])
            exchange(transport, receives=[(tensors[1], peer)])

    assert 'different messages for one another in their window number 0' in refused(body, 2, PLACES['device'])


def test_more_messages_at_once_than_the_cap_are_refused():
    text = refused(around('device'), 2, PLACES['device'], max_operations=1)
    assert '1 sends and 1 receives were handed in at once' in text


def test_two_messages_for_one_peer_in_a_window_are_refused():
    text = refused(lambda transport: exchange(transport, sends=[(tensor_in('host', 1), 1 - transport.rank)] * 2), 2,
                   PLACES['host'])
    assert 'two messages of one direction for one peer' in text


def test_a_tensor_that_is_not_contiguous_is_refused():
    text = refused(lambda transport: exchange(transport, sends=[(torch.ones(4)[::2], 1 - transport.rank)]), 2,
                   PLACES['host'])
    assert 'must be contiguous' in text


@pytest.mark.parametrize('place', ['host', 'device'])
@pytest.mark.parametrize('seed', ALL_MODES)
def test_abandoning_fails_what_peers_have_pending(place, seed):

    def body(transport):
        if transport.rank == 0:
            assert transport.abandon() == [] and transport.abandon() == []
            return None
        tensor = tensor_in(place, 1)
        with pytest.raises(RuntimeError, match='rank 0 has abandoned the group'):
            exchange(transport, sends=[(tensor, 0)])
            transport.all_gather([torch.empty(1)] * 2, torch.zeros(1))
        get_accelerator().synchronize()
        return transport.abandon()

    assert run_ranks(body, 2, seed, memory=PLACES[place]) == [None, [0]]


def test_messages_hold_device_memory_until_they_were_waited_for():

    def body(transport):
        live = []
        for _ in range(3):
            pending = sum(transport.exchange(*([(tensor_in('device', 1), 1 - transport.rank)] for _ in range(2))), [])
            live.append(here().device_usage.live_bytes)
            for message in pending:
                message.wait()
                live.append(here().device_usage.live_bytes)
        return live

    assert run_ranks(body, 2, 0, memory=PLACES['device']) == [[32, 16, 0] * 3] * 2
