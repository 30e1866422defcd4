# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Host and accelerator memory: where a tensor lies, arenas in either, and copies that run late on a stream.

All that a transfer asks of the accelerator is in this file. Nothing here touches it for tensors in host memory alone.
"""

from contextlib import nullcontext
from typing import Dict, FrozenSet, Iterable, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from deepspeed.accelerator import get_accelerator

__all__ = [
    'HOST', 'DEVICE', 'PAGEABLE', 'PINNED', 'Copies', 'Lane', 'Mark', 'accelerator_device', 'accelerator_type',
    'arena', 'copy', 'may_send_device_memory', 'memory_of', 'residency_of', 'wire_memory_by_peer'
]

# What a message lies in: host or device memory. What a buffer lies in: host memory of two kinds, or device memory.
HOST, DEVICE = 'host', 'device'
PAGEABLE, PINNED = 'pageable', 'pinned'

_BIT_BY_SIDE = {'source': 1, 'target': 2}


def accelerator_type() -> Optional[str]:
    """The type of the accelerator's devices, 'cuda' say; None where it has no streams, as the CPU has none."""
    accelerator = get_accelerator()
    return None if accelerator.Stream is None else accelerator.device_name()


def accelerator_device() -> Optional[torch.device]:
    """The accelerator's device that is current in this thread; asking for it may set the device up."""
    return None if accelerator_type() is None else torch.device(get_accelerator().current_device_name())


def memory_of(tensor: torch.Tensor, asks_pinned: bool) -> str:
    """DEVICE, PINNED or PAGEABLE. Without ``asks_pinned`` host memory counts as pageable, unasked."""
    if not tensor.is_cpu:
        return DEVICE
    return PINNED if asks_pinned and get_accelerator().is_pinned(tensor) else PAGEABLE


def arena(numel: int, dtype: torch.dtype, memory: str) -> torch.Tensor:
    """``numel`` elements of PAGEABLE, PINNED or DEVICE memory, of any values."""
    # As bytes on a named device: zero.Init changes the dtype of new floats, and others the default device.
    nbytes = numel * dtype.itemsize
    if memory == PINNED:
        slot = get_accelerator().pin_empty(nbytes, dtype=torch.uint8)
    else:
        slot = torch.empty(nbytes, dtype=torch.uint8, device=accelerator_device() if memory == DEVICE else 'cpu')
    return slot.view(dtype)


def residency_of(memory_by_buffer: Mapping[Tuple[str, object], str]) -> int:
    """What a rank tells the others of its buffers, keyed by ('source' or 'target', shard), as an integer: whether it
    has sources and all are in device memory, and the same of its targets."""
    kinds_by_side = {
        side: {memory
               for key, memory in memory_by_buffer.items() if key[0] == side}
        for side in _BIT_BY_SIDE
    }
    return sum(bit for side, bit in _BIT_BY_SIDE.items() if kinds_by_side[side] == {DEVICE})


def _wire_memory_of(transport_memory: FrozenSet[str], sender: int, receiver: int) -> str:
    """The memory that messages between ranks of these residencies lie in, of those that the transport takes."""
    if len(transport_memory) == 1:
        return next(iter(transport_memory))
    return DEVICE if sender & _BIT_BY_SIDE['source'] and receiver & _BIT_BY_SIDE['target'] else HOST


def wire_memory_by_peer(transport_memory: FrozenSet[str], residencies: Sequence[int], rank: int, sends: Iterable[int],
                        receives: Iterable[int]) -> Dict[str, Dict[int, str]]:
    """The memory that this rank's messages lie in: by peer sent to ('source') and by peer received from ('target')."""
    return {
        'source': {
            peer: _wire_memory_of(transport_memory, residencies[rank], residencies[peer])
            for peer in sends
        },
        'target': {
            peer: _wire_memory_of(transport_memory, residencies[peer], residencies[rank])
            for peer in receives
        }
    }


def may_send_device_memory(residencies: Sequence[int]) -> bool:
    """Whether messages between ranks of these residencies may lie in device memory, if the transport takes both."""
    return all(any(residency & bit for residency in residencies) for bit in _BIT_BY_SIDE.values())


class Copies(NamedTuple):
    """Tensors, or places that stand for them until buffers are known, and what each is to become; of equal shapes."""
    targets: Sequence = ()
    sources: Sequence = ()


def copy(copies: Copies) -> None:
    """Copy and convert within one memory."""
    if copies.targets:
        torch._foreach_copy_(*copies)


class Lane:
    """Copies of one direction, done in order on a stream of their own; without a stream, none may be asked for."""

    def __init__(self, stream=None):
        self._stream = stream

    @classmethod
    def on_new_stream(cls) -> 'Lane':
        return cls(get_accelerator().Stream())

    def as_current(self):
        """A context in which the lane's stream is the current one."""
        return get_accelerator().stream(self._stream) if self._stream is not None else nullcontext()

    def copy(self, copies: Copies) -> None:
        """Copy and convert within device memory."""
        if copies.targets:
            with self.as_current():
                copy(copies)

    def cross(self, copies: Copies) -> None:
        """Copy between pinned and device memory: contiguous tensors of one dtype, without holding up the host."""
        if copies.targets:
            with self.as_current():
                for target, source in zip(*copies):
                    target.copy_(source, non_blocking=True)

    def follow_current_stream(self) -> None:
        """Do what is asked for from now on after what is queued on the caller's stream."""
        self._stream.wait_stream(get_accelerator().current_stream())

    def follow(self, mark: 'Mark') -> None:
        """Do what is asked for from now on after what was asked of another lane before ``mark`` was set."""
        if mark.event is not None:
            self._stream.wait_event(mark.event)

    def set(self, mark: 'Mark') -> None:
        """Let ``mark`` stand for all that was asked for so far, and no longer for what it stood for before."""
        if mark.event is None:
            mark.event = get_accelerator().Event()
        mark.event.record(self._stream)

    def until_done(self) -> None:
        """Hold the host up until the lane has done all that it was asked for."""
        if self._stream is not None:
            self._stream.synchronize()


class Mark:
    """A point in what a lane was asked for; before it is set for the first time, nobody needs to wait for it."""

    def __init__(self):
        self.event = None

    def until_done(self) -> None:
        """Hold the host up until the lane has come to this point."""
        if self.event is not None:
            self.event.synchronize()
