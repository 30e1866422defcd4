# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Device memory that the host cannot reach, how it is reused, and what counts as an allocation."""

import ctypes
import faulthandler
import os
import signal

import pytest
import torch

from deepspeed.accelerator import get_accelerator
from unit.simulated_accelerator.hosts import here
from unit.simulated_accelerator.ranks import RankFailure, run_ranks
from unit.simulated_accelerator.simulation import DeviceRace, Simulation

LAZY, EAGER = 1, 7
DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool
]


def on_device(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device=get_accelerator().current_device_name())


@pytest.fixture
def simulation():
    with Simulation(LAZY) as simulation:
        yield simulation


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('shape', [(), (0, 3), (7, ), (2, 3, 5)], ids=str)
def test_tensors_of_every_dtype_come_back_as_they_were(simulation, dtype, shape):
    values = torch.randint(0, 100, shape).to(dtype)
    tensor = values.to('simulated')
    assert tensor.device == torch.device('simulated:0') and tensor.dtype == dtype and tensor.shape == values.shape
    assert torch.equal(tensor.cpu(), values)


def test_the_host_cannot_read_device_memory(simulation):
    tensor = on_device(8)
    with pytest.raises(TypeError, match='simulated'):
        tensor.numpy()
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        ctypes.string_at(tensor.data_ptr(), 4)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV


def test_views_share_their_storage(simulation):
    tensor = on_device(6, 4)
    views = [
        tensor[1:],
        tensor.narrow(1, 2, 1),
        tensor.view(-1),
        tensor.t(),
        tensor.unbind()[2],
        tensor.as_strided((3, ), (8, ), 2),
        tensor.reshape(2, 12),
        tensor.detach(),
        tensor.view(torch.uint8)
    ]
    offsets = [view.data_ptr() - tensor.data_ptr() for view in views]
    assert offsets == [16, 8, 0, 0, 32, 8, 0, 0, 0]
    assert {view.untyped_storage().data_ptr() for view in views} == {tensor.untyped_storage().data_ptr()}
    assert tensor.untyped_storage().nbytes() == 96 and not tensor.t().is_contiguous()


def test_new_memory_holds_no_number(simulation):
    assert on_device(5).cpu().isnan().all()


def test_freed_memory_is_reused_last_in_first_out_and_overwritten(simulation):
    first, second = torch.ones(100, device='simulated'), torch.ones(100, device='simulated')
    addresses = [first.data_ptr(), second.data_ptr()]
    del first, second
    again = [on_device(100), on_device(100)]
    assert [tensor.data_ptr() for tensor in again] == addresses[::-1]
    assert torch.stack([tensor.cpu() for tensor in again]).isnan().all()


def test_freed_memory_is_reused_by_its_own_stream_only(simulation):
    address = on_device(100).data_ptr()
    with get_accelerator().stream(get_accelerator().Stream()):
        assert on_device(100).data_ptr() != address
    assert on_device(100).data_ptr() == address


def read_late_and_free(records):
    """A tensor freed while another stream has still to read it; what that stream read."""
    target = get_accelerator().pin_empty(100, dtype=torch.float32)
    tensor = torch.ones(100, device='simulated')
    stream = get_accelerator().Stream()
    stream.wait_stream(get_accelerator().current_stream())
    with get_accelerator().stream(stream):
        target.copy_(tensor, non_blocking=True)
    if records:
        tensor.record_stream(stream)
    address = tensor.data_ptr()
    del tensor
    assert (on_device(100).data_ptr() == address) != records
    get_accelerator().current_stream().synchronize()
    stream.synchronize()
    return target


def test_memory_freed_while_another_stream_reads_it_is_overwritten():
    with pytest.raises(DeviceRace, match='reuse of freed memory'):
        with Simulation(LAZY):
            assert read_late_and_free(records=False).isnan().all()


def test_record_stream_keeps_memory_until_the_stream_is_done(simulation):
    assert (read_late_and_free(records=True) == 1).all()


def test_recorded_memory_is_reused_once_the_stream_is_done():
    with Simulation(EAGER):
        stream = get_accelerator().Stream()
        tensor = on_device(100)
        stream.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(stream):
            tensor.fill_(1.)
        tensor.record_stream(stream)
        address = tensor.data_ptr()
        del tensor
        assert on_device(100).data_ptr() == address


def test_usage_counts_what_lives_and_its_peak(simulation):
    first = on_device(100)
    del first
    second, third = on_device(25), on_device(50)
    usage = here().device_usage
    assert (usage.allocations, usage.live_bytes, usage.peak_bytes) == (3, 300, 400)
    assert get_accelerator().memory_allocated() == 300 and get_accelerator().max_memory_allocated() == 400
    usage.reset()
    assert (usage.allocations, usage.live_bytes, usage.peak_bytes) == (0, 300, 300)
    del second, third


def test_usage_counts_pinned_memory_apart(simulation):
    pinned = get_accelerator().pin_memory(torch.ones(10))
    usage = here().pinned_usage
    assert (usage.allocations, usage.live_bytes, usage.peak_bytes) == (1, 40, 40)
    assert here().device_usage.allocations == 0
    del pinned
    assert usage.live_bytes == 0


@pytest.mark.parametrize('make', [
    lambda accelerator: accelerator.pin_memory(torch.ones(3)),
    lambda accelerator: accelerator.pin_memory(torch.ones(3), make_copy=False),
    lambda accelerator: accelerator.pin_empty(3, dtype=torch.float32),
    lambda accelerator: accelerator.pin_empty_like(torch.ones(3)),
])
def test_the_accelerator_pins_memory(simulation, make):
    accelerator = get_accelerator()
    pinned = make(accelerator)
    assert accelerator.is_pinned(pinned) and accelerator.is_pinned(pinned[1:]) and pinned.is_pinned()
    assert not accelerator.is_pinned(torch.ones(3)) and not torch.ones(3).is_pinned()


def test_memory_is_limited(simulation):
    with pytest.raises(RuntimeError, match='out of memory'):
        on_device(get_accelerator().total_memory() + 1, dtype=torch.uint8)


def test_memory_of_another_rank_is_refused():
    tensors = {}

    def body(transport):
        tensors[transport.rank] = on_device(3)
        if transport.rank == 0:
            transport.all_gather([torch.empty(1)] * 2, torch.zeros(1))
            tensors[1].copy_(tensors[0])
        else:
            transport.all_gather([torch.empty(1)] * 2, torch.zeros(1))

    with pytest.raises(RankFailure, match='host of rank 0 used device memory of rank 1'):
        run_ranks(body, 2, LAZY)


def test_tensors_of_an_earlier_simulation_are_refused():
    with Simulation(LAZY):
        tensor = on_device(3)
    with Simulation(LAZY), pytest.raises(RuntimeError, match='another simulation'):
        tensor.cpu()


def test_the_device_is_refused_outside_a_simulation():
    with pytest.raises(RuntimeError, match='outside a simulation'):
        on_device(3)
