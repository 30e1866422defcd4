# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the transport asks of a process group with a backend for the accelerator, and of bare backend objects.

The groups here only note what they are asked: no backend for the simulated device exists.
"""

import pytest
import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.affine_transfer_transport import ProcessGroupTransport
from unit.simulated_accelerator.simulation import Simulation


class NotedWork:

    def __init__(self, notes, text):
        self._notes, self._text = notes, text

    def wait(self, timeout=None):
        self._notes.append(f'wait for {self._text}')


class NotingBackend:
    """Notes calls as short texts. Messages to rank 3 cannot be posted."""

    def __init__(self, name, notes):
        self._name, self._notes = name, notes

    @property
    def supports_coalescing(self):
        return self._name == 'xccl'

    def rank(self):
        return 0

    def size(self):
        return 4

    def name(self):
        return self._name

    def _post(self, what, tensors, peer):
        if peer == 3:
            raise RuntimeError('connection closed')
        text = f'{what} {tensors[0].nbytes} {str(tensors[0].dtype)[6:]} {peer} {tensors[0].device.type}'
        self._notes.append(text)
        return NotedWork(self._notes, text)

    def send(self, tensors, peer, tag):
        return self._post('send', tensors, peer)

    def recv(self, tensors, peer, tag):
        return self._post('recv', tensors, peer)

    def _start_coalescing(self, *device):
        self._notes.append(f'begin {len(device)}')

    def _end_coalescing(self, *device):
        self._notes.append(f'end {len(device)}')
        return NotedWork(self._notes, 'group')

    def _allgather_base(self, table, row):
        self._notes.append(f'gather {row.device.type}')
        table.view(4, -1).copy_(row)
        return NotedWork(self._notes, 'gather')

    def allreduce(self, tensors):
        self._notes.append(f'reduce {tensors[0].device.type}')
        return NotedWork(self._notes, 'reduce')

    def abort(self):
        self._notes.append(f'abort {self._name}')


class NotingGroup(NotingBackend):
    """A ProcessGroup with these backends, by type of device."""

    def __init__(self, backends, notes):
        super().__init__('group', notes)
        self._backends = backends
        self._device_types = [torch.device(type_) for type_ in backends]

    def _get_backend(self, device):
        return NotingBackend(self._backends[device.type], self._notes)


GROUPS = {
    'gloo alone': (dict(cpu='gloo'), {'host'}),
    'gloo, as torch makes it': (dict(cpu='gloo', cuda='gloo', simulated='gloo'), {'host'}),
    'the device alone': (dict(simulated='xccl'), {'device'}),
    'both': (dict(cpu='gloo', simulated='xccl'), {'host', 'device'}),
    'another accelerator': (dict(cpu='gloo', cuda='nccl'), {'host'}),
    'a backend that cannot coalesce': (dict(cpu='gloo', simulated='mpi'), {'host'}),
}


@pytest.mark.parametrize('backends, memory', GROUPS.values(), ids=GROUPS)
def test_messages_lie_where_the_group_has_a_backend_of_its_own(backends, memory):
    assert ProcessGroupTransport(NotingGroup(backends, [])).memory == memory


@pytest.mark.parametrize('name, memory', [('gloo', {'host'}), ('xccl', {'device'})])
def test_a_bare_backend_takes_host_or_device_memory(name, memory):
    assert ProcessGroupTransport(NotingBackend(name, [])).memory == memory


@pytest.mark.parametrize(
    'group', [NotingBackend('mpi', []),
              NotingGroup(dict(simulated='mpi'), []),
              NotingGroup(dict(cuda='nccl'), [])],
    ids=['bare', 'simulated', 'cuda'])
def test_a_group_that_cannot_carry_messages_is_refused(group):
    with pytest.raises(TypeError, match='takes neither messages in host memory nor coalesced ones .*simulated'):
        ProcessGroupTransport(group)


def test_devices_are_connected_by_an_operation_of_all_ranks():
    notes = []
    with Simulation(0):
        ProcessGroupTransport(NotingGroup(dict(cpu='gloo', simulated='xccl'), notes)).connect_devices()
    assert notes == ['reduce simulated', 'wait for reduce']


def test_device_messages_of_a_window_are_one_group_and_host_messages_are_received_first():
    notes = []
    transport = ProcessGroupTransport(NotingGroup(dict(cpu='gloo', simulated='xccl'), notes))
    with Simulation(0):
        here, there = torch.zeros(3, dtype=torch.int16), torch.zeros(5, dtype=torch.int16).to('simulated')
        sends, receives = transport.exchange([(here, 1), (there, 2)], [(there, 1), (here, 2)])
        for message in (*sends, *receives):
            message.wait()
    assert notes == [
        'begin 1', 'recv 10 uint8 1 simulated', 'send 10 uint8 2 simulated', 'end 1', 'recv 6 int16 2 cpu',
        'send 6 int16 1 cpu', 'wait for send 6 int16 1 cpu', 'wait for group', 'wait for group',
        'wait for recv 6 int16 2 cpu'
    ]


def test_a_bare_backend_groups_without_being_told_the_device():
    notes = []
    with Simulation(0):
        ProcessGroupTransport(NotingBackend('xccl', notes)).exchange([(torch.zeros(1).to('simulated'), 1)], [])
    assert notes == ['begin 0', 'send 4 uint8 1 simulated', 'end 0']


def test_a_failure_names_the_peer():
    transport = ProcessGroupTransport(NotingGroup(dict(cpu='gloo'), []))
    with pytest.raises(RuntimeError, match='^sending to rank 3: connection closed$'):
        transport.exchange([(torch.zeros(1), 3)], [])
    with pytest.raises(RuntimeError, match='^receiving from rank 3: connection closed$'):
        transport.exchange([], [(torch.zeros(1), 3)])


def test_rows_are_gathered_through_device_memory_that_is_kept_where_a_group_takes_no_other():
    notes = []
    transport = ProcessGroupTransport(NotingGroup(dict(simulated='xccl'), notes))
    with Simulation(0) as simulation:
        usage = simulation.hosts[0].device_usage
        for value in range(3):
            table, row = torch.zeros((4, 2), dtype=torch.int64), torch.full((2, ), value)
            transport.all_gather(table, row)
            assert table.eq(value).all()
            assert usage.allocations == 2
        assert get_accelerator().memory_allocated() == usage.live_bytes > 0
    assert notes == ['gather simulated', 'wait for gather'] * 3


def test_giving_up_aborts_the_backend_of_the_device_and_tells_who_is_gone():
    notes = []
    transport = ProcessGroupTransport(NotingGroup(dict(cpu='gloo', simulated='xccl'), notes))
    assert transport.abandon() == [3]
    assert notes[-1] == 'abort xccl'
    notes.clear()
    assert ProcessGroupTransport(NotingBackend('xccl', notes)).abandon() == []
    assert notes == ['abort xccl']
