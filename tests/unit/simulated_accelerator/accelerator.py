# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The DeepSpeed accelerator in front of the simulation, and its device in torch."""

from contextlib import contextmanager

import torch
from torch.utils import backend_registration

from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from . import memory, operators
from .hosts import here
from .streams import Event, Stream
from .synchronizations import synchronization

DEVICE_NAME = 'simulated'


def install() -> None:
    """Register the device with torch and make it DeepSpeed's accelerator, once per process and for good."""
    backend_registration._setup_privateuseone_for_python_backend(rename=DEVICE_NAME)
    memory.reserve()
    operators.register()
    set_accelerator(SimulatedAccelerator())


def missing_in_torch() -> str:
    """What of torch's private API the simulation needs and this torch lacks; '' when it has all of it."""
    needed = [(backend_registration, '_setup_privateuseone_for_python_backend'), (torch._C, '_from_dlpack'),
              (torch._C, '_ExcludeDispatchKeyGuard'), (torch._C, '_InferenceMode')]
    return ', '.join(f'{owner.__name__}.{name}' for owner, name in needed if not hasattr(owner, name))


class SimulatedAccelerator(CPU_Accelerator):
    """Device 0 of the calling thread's rank. What has no device in it is the CPU's."""
    # The CPU's accelerator pins nothing, so that every copy would be synchronous and tests prove nothing.
    _torch_pins_host_memory = True
    pin_memory = DeepSpeedAccelerator.pin_memory

    def __init__(self):
        super().__init__()
        self._name = DEVICE_NAME
        self._communication_backend_name = DEVICE_NAME

    def _torch_pin_memory(self, tensor):
        pinned = memory.empty_pinned(tensor.shape, tensor.dtype)
        return pinned.copy_(tensor)

    def _torch_empty_pinned(self, tensor, shape):
        return memory.empty_pinned(shape, tensor.dtype)

    def _torch_is_pinned(self, tensor):
        return memory.is_pinned(tensor)

    def is_synchronized_device(self):
        return False

    def device_name(self, device_index=None):
        return DEVICE_NAME if device_index is None else f'{DEVICE_NAME}:{device_index}'

    def device(self, device_index=None):
        return torch.device(DEVICE_NAME, device_index or 0)

    def current_device(self):
        return 0

    def current_device_name(self):
        return f'{DEVICE_NAME}:0'

    def device_count(self):
        return 1

    def on_accelerator(self, tensor):
        return operators.is_on_device(tensor)

    @property
    def Stream(self):
        return Stream

    @property
    def Event(self):
        return Event

    @contextmanager
    def stream(self, stream):
        host = here()
        before = host.stream
        host.stream = stream or before
        try:
            yield
        finally:
            host.stream = before

    def current_stream(self, device_index=None):
        return here().stream

    def default_stream(self, device_index=None):
        return here().default_stream

    @synchronization
    def synchronize(self, device_index=None):
        host = here()
        host.simulation.enter()
        for stream in host.streams:
            host.wait_for_mark(stream.mark(), 'synchronize the device')

    def memory_allocated(self, device_index=None):
        return here().device_usage.live_bytes

    def max_memory_allocated(self, device_index=None):
        return here().device_usage.peak_bytes

    def reset_peak_memory_stats(self, device_index=None):
        here().device_usage.reset()

    reset_max_memory_allocated = reset_peak_memory_stats

    def total_memory(self, device_index=None):
        return memory.DEVICE_BYTES

    def available_memory(self, device_index=None):
        return memory.DEVICE_BYTES - self.memory_allocated()
