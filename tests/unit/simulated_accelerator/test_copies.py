# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""When copies move their bytes, what the host may see by then, and what they allocate."""

import itertools

import pytest
import torch

from deepspeed.accelerator import get_accelerator
from unit.simulated_accelerator.hosts import here
from unit.simulated_accelerator.simulation import DeviceRace, Simulation

LAZY = 1


def pinned(values):
    return get_accelerator().pin_memory(values)


@pytest.fixture
def simulation():
    with Simulation(LAZY) as simulation:
        yield simulation


@pytest.fixture
def racing():
    """A simulation whose races are not looked for."""
    with Simulation(LAZY, finds_races=False) as simulation:
        yield simulation


def test_a_non_blocking_copy_to_pinned_memory_runs_late(racing):
    device, host = torch.ones(4, device='simulated'), pinned(torch.zeros(4))
    host.copy_(device, non_blocking=True)
    assert (host == 0).all()
    get_accelerator().current_stream().synchronize()
    assert (host == 1).all()


def test_a_non_blocking_copy_from_pinned_memory_reads_it_late(racing):
    device, host = torch.zeros(4, device='simulated'), pinned(torch.ones(4))
    device.copy_(host, non_blocking=True)
    host.fill_(2)
    assert (device.cpu() == 2).all()


def test_pageable_memory_is_read_before_a_copy_returns(simulation):
    device, host = torch.zeros(4, device='simulated'), torch.ones(4)
    device.copy_(host, non_blocking=True)
    host.fill_(2)
    assert simulation.hosts[0].stream.queue
    assert (device.cpu() == 1).all()


@pytest.mark.parametrize('is_pinned,non_blocking', [(False, True), (False, False), (True, False)])
def test_other_copies_to_the_host_are_waited_for(simulation, is_pinned, non_blocking):
    device, host = torch.ones(4, device='simulated'), torch.zeros(4)
    host = pinned(host) if is_pinned else host
    host.copy_(device, non_blocking=non_blocking)
    assert (host == 1).all()


@pytest.mark.parametrize('is_pinned', [True, False])
def test_a_blocking_copy_to_the_device_waits_for_its_stream(simulation, is_pinned):
    device, host = torch.zeros(4, device='simulated'), torch.ones(4)
    device.copy_(pinned(host) if is_pinned else host)
    assert not simulation.hosts[0].stream.queue


def test_copies_within_the_device_never_hold_the_host_up(simulation):
    one, other = torch.ones(4, device='simulated'), torch.zeros(4, device='simulated')
    before = len(simulation.hosts[0].stream.queue)
    other.copy_(one)
    assert len(simulation.hosts[0].stream.queue) == before + 1


LAYOUTS = {
    'contiguous': lambda: torch.arange(24.).view(4, 6),
    'window': lambda: torch.arange(40.).view(4, 10)[:, 2:8],
    'transposed': lambda: torch.arange(24.).view(6, 4).t(),
    'row': lambda: torch.arange(6.),
}
PLACES = {
    'device':
    lambda values: torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device='simulated'),
    'pinned':
    lambda values: pinned(torch.empty(values.untyped_storage().nbytes() // values.element_size(), dtype=values.dtype)).
    as_strided(values.shape, values.stride()),
    'pageable':
    lambda values: torch.empty_strided(values.shape, values.stride(), dtype=values.dtype),
}


@pytest.mark.parametrize('non_blocking', [True, False])
@pytest.mark.parametrize('places', list(itertools.product(PLACES, repeat=2)), ids='-'.join)
def test_copies_convert_and_stride_as_the_cpus_do(simulation, places, non_blocking):
    cases = itertools.product(LAYOUTS, LAYOUTS, (torch.float32, torch.bfloat16), (torch.float32, torch.int64))
    for source_layout, target_layout, source_dtype, target_dtype in cases:
        if target_layout == 'row' and source_layout != 'row':
            continue
        values = LAYOUTS[source_layout]().to(source_dtype)
        source, target = PLACES[places[0]](values), PLACES[places[1]](LAYOUTS[target_layout]().to(target_dtype))
        source.copy_(values)
        target.copy_(source, non_blocking=non_blocking)
        get_accelerator().synchronize()
        expected = torch.empty(target.shape, dtype=target_dtype).copy_(values)
        assert torch.equal(target.cpu(), expected)


# What CUDA's copies between host and device allocate on the device, in bytes, for 24 elements of fp32 or bf16.
TEMPORARIES = [
    # source, target, source dtype, target dtype, bytes when non_blocking, bytes when not
    (('pinned', 'contiguous'), ('device', 'contiguous'), 'fp32', 'fp32', 0, 0),
    (('pinned', 'transposed'), ('device', 'transposed'), 'fp32', 'fp32', 0, 0),
    (('pinned', 'contiguous'), ('device', 'window'), 'fp32', 'fp32', 96, 96),
    (('pinned', 'window'), ('device', 'contiguous'), 'fp32', 'fp32', 0, 0),
    (('pinned', 'contiguous'), ('device', 'contiguous'), 'fp32', 'bf16', 96, 0),
    (('pinned', 'contiguous'), ('device', 'contiguous'), 'bf16', 'fp32', 48, 0),
    (('pinned', 'contiguous'), ('device', 'window'), 'bf16', 'fp32', 48, 96),
    (('device', 'contiguous'), ('pinned', 'contiguous'), 'fp32', 'fp32', 0, 0),
    (('device', 'window'), ('pinned', 'contiguous'), 'fp32', 'fp32', 96, 96),
    (('device', 'contiguous'), ('pinned', 'window'), 'fp32', 'fp32', 0, 0),
    (('device', 'contiguous'), ('pinned', 'contiguous'), 'fp32', 'bf16', 48, 0),
    (('device', 'contiguous'), ('pinned', 'contiguous'), 'bf16', 'fp32', 96, 0),
    (('device', 'window'), ('pinned', 'contiguous'), 'fp32', 'bf16', 48, 96),
    (('device', 'window'), ('device', 'transposed'), 'fp32', 'bf16', 0, 0),
]


@pytest.mark.parametrize('case', TEMPORARIES, ids=str)
@pytest.mark.parametrize('non_blocking', [True, False])
def test_copies_allocate_what_cudas_do(simulation, case, non_blocking):
    dtypes = {'fp32': torch.float32, 'bf16': torch.bfloat16}
    (source_place, source_layout), (target_place, target_layout), source_dtype, target_dtype, *expected = case
    source = PLACES[source_place](LAYOUTS[source_layout]().to(dtypes[source_dtype]))
    target = PLACES[target_place](LAYOUTS[target_layout]().to(dtypes[target_dtype]))
    usage = here().device_usage
    usage.reset()
    before = usage.live_bytes
    target.copy_(source, non_blocking=non_blocking)
    assert usage.peak_bytes - before == expected[not non_blocking]
    assert usage.live_bytes == before


def test_copies_of_lists_are_copies(racing):
    devices, hosts = [torch.ones(4, device='simulated') for _ in range(2)], [pinned(torch.zeros(4)) for _ in range(2)]
    torch._foreach_copy_(hosts, devices, non_blocking=True)
    assert all((host == 0).all() for host in hosts)
    get_accelerator().synchronize()
    assert all((host == 1).all() for host in hosts)


def test_inference_tensors_can_be_written_late(simulation):
    with torch.inference_mode():
        host = pinned(torch.zeros(4))
        host.copy_(torch.ones(4, device='simulated'), non_blocking=True)
    get_accelerator().synchronize()
    assert host.is_inference() and (host == 1).all()


def test_other_operators_run_late_on_the_device(simulation):
    tensor = torch.full((3, ), 2., device='simulated')
    tensor.add_(1).mul_(torch.tensor([1., 2., 3.], device='simulated'))
    assert simulation.hosts[0].stream.queue
    assert tensor.tolist() == [3., 6., 9.] and (tensor + 1)[2].item() == 10.


def test_operators_that_would_resize_their_output_are_refused(simulation):
    tensor = torch.ones(3, device='simulated')
    with pytest.raises(NotImplementedError, match='aten.abs.out'):
        tensor.abs()


def test_a_host_that_reads_too_early_is_a_race():
    with pytest.raises(DeviceRace, match=r'read by aten.clone.* at test_copies.py.* write by copy to the host'):
        with Simulation(seed=7):  # in whose mode the bytes are there at once
            host = pinned(torch.zeros(4))
            host.copy_(torch.ones(4, device='simulated'), non_blocking=True)
            assert (host.clone() == 1).all()
