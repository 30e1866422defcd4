# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What counts as a race, whatever the bytes hold and whichever schedule runs."""

import pytest
import torch

from deepspeed.accelerator import get_accelerator
from unit.simulated_accelerator.host_accesses import touch
from unit.simulated_accelerator.races import Region
from unit.simulated_accelerator.ranks import run_ranks
from unit.simulated_accelerator.simulation import DeviceRace, Simulation

ALL_MODES = (0, 1, 3, 5, 7)


def regions_meet(one, other):
    return Region.of(one, one.data_ptr()).meets(Region.of(other, other.data_ptr()))


def test_regions_meet_where_they_share_a_byte():
    whole = torch.zeros(6, 8)
    columns = [whole[:, :3], whole[:, 3:5], whole[:, 4:]]
    assert [regions_meet(columns[a], columns[b]) for a, b in ((0, 1), (0, 2), (1, 2))] == [False, False, True]
    assert regions_meet(whole.t(), columns[1]) and regions_meet(whole[2], columns[0])
    assert not regions_meet(whole[:2], whole[2:]) and not regions_meet(whole[::2], whole[1::2])
    halves = whole.view(torch.bfloat16)
    assert regions_meet(halves[:, 5:6], columns[0]) and not regions_meet(halves[:, 6:7], columns[0])


def two_streams(first, second, ordered=False):
    """Call ``first`` and ``second`` with one device tensor, each on a stream of its own."""
    tensor = torch.zeros(8, 8, device='simulated')
    streams = [get_accelerator().Stream() for _ in range(2)]
    for stream in streams:
        stream.wait_stream(get_accelerator().current_stream())
    with get_accelerator().stream(streams[0]):
        first(tensor)
    if ordered:
        streams[1].wait_stream(streams[0])
    with get_accelerator().stream(streams[1]):
        second(tensor)
    for stream in streams:
        get_accelerator().current_stream().wait_stream(stream)


def write(tensor):
    tensor.fill_(1.)


def read(tensor):
    tensor.clone().fill_(0.)


def in_part(function, *index):
    return lambda tensor: function(tensor[index])


COLUMNS = [slice(None), slice(0, 4)], [slice(None), slice(4, 8)], [slice(None), slice(3, 6)]
RACING = [(write, write), (write, read), (read, write), (in_part(write, *COLUMNS[0]), in_part(read, *COLUMNS[2]))]
DISJOINT = [(read, read), (in_part(write, 0), in_part(write, 1)),
            (in_part(write, *COLUMNS[0]), in_part(write, *COLUMNS[1]))]


@pytest.mark.parametrize('seed', ALL_MODES)
@pytest.mark.parametrize('pair', RACING)
def test_streams_that_nothing_orders_race(seed, pair):
    with pytest.raises(DeviceRace, match=r'at test_races.py:\d+ on stream .* at test_races.py:\d+ on stream'):
        with Simulation(seed):
            two_streams(*pair)


@pytest.mark.parametrize('seed', ALL_MODES)
@pytest.mark.parametrize('pair', RACING)
def test_ordered_streams_do_not_race(seed, pair):
    with Simulation(seed):
        two_streams(*pair, ordered=True)


@pytest.mark.parametrize('seed', ALL_MODES)
@pytest.mark.parametrize('pair', DISJOINT)
def test_reads_and_disjoint_writes_do_not_race(seed, pair):
    with Simulation(seed):
        two_streams(*pair)


@pytest.mark.parametrize('seed', ALL_MODES)
def test_order_goes_through_third_streams_and_the_host(seed):
    with Simulation(seed):
        tensor = torch.zeros(8, device='simulated')
        # As long as something is queued anywhere, all that was done is remembered.
        with get_accelerator().stream(get_accelerator().Stream()):
            torch.ones(8, device='simulated')
        first, second, third = (get_accelerator().Stream() for _ in range(3))
        first.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(first):
            tensor.fill_(1.)
        second.wait_stream(first)
        second.synchronize()
        with get_accelerator().stream(third):
            tensor.fill_(2.)
        get_accelerator().synchronize()


def test_memory_used_on_another_stream_than_it_was_allocated_on_races():
    with pytest.raises(DeviceRace, match='reuse of freed memory'):
        with Simulation(7):
            tensor = torch.empty(8, device='simulated')
            with get_accelerator().stream(get_accelerator().Stream()):
                tensor.fill_(1.)


HOST_USES = {
    'reads': lambda host: host.sum(),
    'packs': lambda host: torch.empty(4).copy_(host[:4]),
    'writes': lambda host: host.fill_(1.),
    'copies a list': lambda host: torch._foreach_copy_([host[4:]], [torch.ones(4)]),
    'says that it reads': lambda host: touch(host, False),
}


@pytest.mark.parametrize('seed', ALL_MODES)
@pytest.mark.parametrize('use', HOST_USES)
def test_the_host_races_with_copies_to_pinned_memory(seed, use):
    with pytest.raises(DeviceRace, match='on host of rank 0 and write by copy to the host'):
        with Simulation(seed):
            host, device = get_accelerator().pin_memory(torch.zeros(8)), torch.ones(8, device='simulated')
            host.copy_(device, non_blocking=True)
            HOST_USES[use](host)


@pytest.mark.parametrize('seed', ALL_MODES)
@pytest.mark.parametrize('use', ['reads', 'writes'])
def test_the_host_races_with_copies_from_pinned_memory_where_it_writes(seed, use):
    with Simulation(seed) as simulation:
        host, device = get_accelerator().pin_memory(torch.zeros(8)), torch.ones(8, device='simulated')
        device.copy_(host, non_blocking=True)
        HOST_USES[use](host)
        assert bool(simulation.ledger.races) == (use == 'writes')
        simulation.ledger.races.clear()


@pytest.mark.parametrize('seed', ALL_MODES)
@pytest.mark.parametrize('use', HOST_USES)
def test_the_host_does_not_race_with_what_it_waited_for_or_looks_at(seed, use):
    with Simulation(seed):
        host, device = get_accelerator().pin_memory(torch.zeros(8)), torch.ones(8, device='simulated')
        host[:4].copy_(device[:4], non_blocking=True)
        assert host.view(2, 4).shape == torch.empty_like(host).view(2, 4).shape and host.is_pinned()
        get_accelerator().current_stream().synchronize()
        HOST_USES[use](host)


def test_the_host_does_not_race_with_work_on_other_pinned_memory():
    with Simulation(1):
        host, device = get_accelerator().pin_memory(torch.zeros(8)), torch.ones(8, device='simulated')
        host[:4].copy_(device[:4], non_blocking=True)
        host[4:].fill_(1.)
        get_accelerator().pin_memory(torch.zeros(8)).fill_(1.)


def test_pinned_memory_that_a_copy_kept_alive_is_new_when_it_comes_back():
    with Simulation(7):
        device = torch.ones(1 << 16, device='simulated')
        for _ in range(20):
            get_accelerator().pin_memory(torch.zeros(1 << 16)).fill_(2.).copy_(device, non_blocking=True)


def exchange_and_use(use, waits):
    """A body in which rank 0 sends and rank 1 receives a host tensor, and both then use it."""

    def body(transport):
        peer, tensor = 1 - transport.rank, torch.zeros(8)
        message = [(tensor, peer)]
        sends, receives = transport.exchange(*((message, []) if transport.rank == 0 else ([], message)))
        pending = (sends + receives)[0]
        if waits:
            pending.wait()
        if use.get(transport.rank):
            use[transport.rank](tensor)
        pending.wait()

    return body


@pytest.mark.parametrize('seed', ALL_MODES)
@pytest.mark.parametrize('use', [{0: write}, {1: write}, {1: lambda tensor: tensor.sum()}])
def test_messages_race_with_the_host_until_they_were_waited_for(seed, use):
    run_ranks(exchange_and_use(use, waits=True), 2, seed)
    with pytest.raises(DeviceRace, match='on host of rank . and .* on link from rank 0 to rank 1'):
        run_ranks(exchange_and_use(use, waits=False), 2, seed)


@pytest.mark.parametrize('seed', ALL_MODES)
def test_copying_what_arrives_to_the_device_races_until_it_was_waited_for(seed):
    use = {1: lambda tensor: torch.empty(8, device='simulated').copy_(tensor, non_blocking=True)}
    with pytest.raises(DeviceRace, match='read by copy to the device .* and write by receiving'):
        run_ranks(exchange_and_use(use, waits=False), 2, seed)


def acknowledge_by_message(transport):
    tensor = torch.zeros(1)
    messages = transport.exchange([(tensor, 0)], []) if transport.rank else transport.exchange([], [(tensor, 1)])
    sum(messages, [])[0].wait()


def acknowledge_by_gathering(transport):
    transport.all_gather([torch.empty(1) for _ in range(2)], torch.zeros(1))


@pytest.mark.parametrize('seed', ALL_MODES)
@pytest.mark.parametrize('acknowledge', [acknowledge_by_message, acknowledge_by_gathering, lambda transport: None])
def test_order_goes_through_other_ranks(seed, acknowledge):
    """Rank 0 overwrites what it sent once rank 1 has told it that it is there, without a wait of its own."""

    def body(transport):
        tensor = torch.zeros(8, device='simulated')
        message = [(tensor, 1 - transport.rank)]
        pending = sum(transport.exchange(*((message, []) if transport.rank == 0 else ([], message))), [])
        if transport.rank == 1:
            pending[0].wait()
            get_accelerator().current_stream().synchronize()
        acknowledge(transport)
        if transport.rank == 0:
            tensor.fill_(1.)
            pending[0].wait()

    if acknowledge in (acknowledge_by_message, acknowledge_by_gathering):
        run_ranks(body, 2, seed, memory={'host', 'device'})
    else:
        with pytest.raises(DeviceRace, match='a window of 1 sends'):
            run_ranks(body, 2, seed, memory={'host', 'device'})


def test_what_is_sent_may_be_read_meanwhile():
    run_ranks(exchange_and_use({0: lambda tensor: tensor.sum()}, waits=False), 2, 1)


@pytest.mark.parametrize('seed', ALL_MODES)
def test_sending_pinned_memory_races_with_the_copy_that_fills_it(seed):

    def body(transport):
        host, device = get_accelerator().pin_memory(torch.zeros(8)), torch.ones(8, device='simulated')
        if transport.rank == 0:
            host.copy_(device, non_blocking=True)
            transport.exchange([(host, 1)], [])[0][0].wait()
        else:
            transport.exchange([], [(host, 0)])[1][0].wait()
            device.copy_(host, non_blocking=True)

    with pytest.raises(DeviceRace, match='read by sending at .* and write by copy to the host'):
        run_ranks(body, 2, seed)


def test_two_messages_into_one_place_race():

    def body(transport):
        tensors = [torch.zeros(8)] * 2
        for tensor in tensors if transport.rank == 0 else []:
            transport.exchange([(tensor, 1)], [])[0][0].wait()
        pending = [transport.exchange([], [(tensor, 0)])[1][0] for tensor in tensors if transport.rank == 1]
        for message in pending:
            message.wait()

    with pytest.raises(DeviceRace, match='write by receiving .* and write by receiving'):
        run_ranks(body, 2, 1)


def test_a_message_must_be_waited_for():

    def body(transport):
        message = [(torch.zeros(8), 1 - transport.rank)]
        transport.exchange(message, [])
        transport.exchange([], message)[1][0].wait()

    with pytest.raises(DeviceRace, match='sending at test_races.py.* was never waited for'):
        run_ranks(body, 2, 1)
