# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Device memory, whose bytes the host cannot reach, and pinned host memory.

Device addresses lie in a range without access rights, so whatever reads them directly dies at once. The bytes are in a
shadow in host memory that only the queued work of streams uses. Every simulation has a window of addresses of its own;
a tensor that outlived its simulation is refused.

As in CUDA's caching allocator, memory belongs to the stream that was current when it was allocated: when its tensor
dies it can be reused at once, last in first out, by later work of that stream. Other streams that use it must be made
known by ``record_stream``. What is free is overwritten with 0xFF bytes (NaN as numbers) by its stream.
"""

import ctypes
import itertools
from math import prod
from typing import Dict, List, Sequence, Set, Tuple

import torch

from . import dlpack
from .hosts import Host, here
from .races import Region

DEVICE_BYTES = 1 << 26
_WINDOWS = 1 << 10
_GRAIN_BYTES = 512
_POISON = 0xFF
_NO_ACCESS, _PRIVATE_ANONYMOUS_NORESERVE = 0, 0x4022
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

_windows = itertools.count()
_shadow_by_dtype: Dict[torch.dtype, torch.Tensor] = {}
_first_address = 0


def reserve() -> None:
    """Take the range of device addresses, once per process."""
    global _first_address
    _first_address = _libc.mmap(None, DEVICE_BYTES * _WINDOWS, _NO_ACCESS, _PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
    if _first_address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), 'no address range for the simulated device memory')
    _shadow_by_dtype[torch.uint8] = torch.empty(DEVICE_BYTES, dtype=torch.uint8)


def shadow(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a device tensor, as a host tensor. Only queued work may use it."""
    dtype = tensor.dtype
    if dtype not in _shadow_by_dtype:
        _shadow_by_dtype[dtype] = _shadow_by_dtype[torch.uint8].view(dtype)
    offset_bytes = (tensor.data_ptr() - _first_address) % DEVICE_BYTES
    return _shadow_by_dtype[dtype].as_strided(tensor.shape, tensor.stride(), offset_bytes // dtype.itemsize)


def strides_of(shape: Sequence[int]) -> Tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(prod(max(size, 1) for size in shape[dim + 1:]) for dim in range(len(shape)))


class Block:
    """Memory of one rank, allocated on one of its streams."""

    def __init__(self, address: int, rounded_bytes: int, stream):
        self.address = address
        self.rounded_bytes = rounded_bytes
        self.stream = stream
        self.host: Host = stream.host
        self.nbytes = 0
        self.users: List = []

    @property
    def key(self) -> Tuple[int, int]:
        """What the ledger knows it by."""
        return self.host.rank, self.address

    def add_user(self, stream) -> None:
        """Keep the memory from being reused before what is queued on ``stream`` when it is freed."""
        if stream is not self.stream and stream not in self.users:
            self.users.append(stream)

    def poison(self) -> None:
        start = _shadow_by_dtype[torch.uint8].data_ptr() + (self.address - _first_address) % DEVICE_BYTES
        self.stream.enqueue_work(lambda: ctypes.memset(start, _POISON, self.rounded_bytes),
                                 [(self.key, Region(0, self.rounded_bytes), True)], 'reuse of freed memory')


class DeviceMemory:
    """The device memory of one simulation, shared out among its ranks."""

    def __init__(self):
        self._start = _first_address + next(_windows) % _WINDOWS * DEVICE_BYTES
        self._next = self._start
        self._blocks: Dict[int, Block] = {}
        self._free: Dict[Tuple[object, int], List[Block]] = {}
        self._deferred: List[Tuple[Block, List]] = []
        self.is_open = True

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized device tensor of the calling rank, allocated on its current stream."""
        nbytes = (sum((size - 1) * stride for size, stride in zip(shape, strides)) + 1) * dtype.itemsize
        if 0 in shape:
            return dlpack.tensor_at(None, dlpack.DEVICE, shape, strides, dtype, lambda: None)
        block = self._take(here().stream, nbytes)
        return dlpack.tensor_at(block.address, dlpack.DEVICE, shape, strides, dtype, lambda: self._free_block(block))

    def _take(self, stream, nbytes: int) -> Block:
        self._collect_deferred(stream.host)
        rounded_bytes = -(-nbytes // _GRAIN_BYTES) * _GRAIN_BYTES
        free = self._free.get((stream, rounded_bytes))
        block = free.pop() if free else self._new_block(rounded_bytes, stream)
        block.nbytes = nbytes
        block.users = []
        stream.host.device_usage.take(nbytes)
        return block

    def _new_block(self, rounded_bytes: int, stream) -> Block:
        if self._next + rounded_bytes > self._start + DEVICE_BYTES:
            raise RuntimeError(f'the simulated accelerator is out of memory, it has {DEVICE_BYTES} bytes')
        block = Block(self._next, rounded_bytes, stream)
        self._next += rounded_bytes
        self._blocks[block.address] = block
        block.poison()
        return block

    def _free_block(self, block: Block) -> None:
        if not self.is_open:
            return
        block.host.device_usage.give_back(block.nbytes)
        if block.users:
            self._deferred.append((block, [stream.mark() for stream in block.users]))
        else:
            self._put_back(block)

    def _put_back(self, block: Block) -> None:
        block.poison()
        self._free.setdefault((block.stream, block.rounded_bytes), []).append(block)

    def _collect_deferred(self, host: Host) -> None:
        """Take back the blocks whose recorded streams are done with them."""
        waiting = []
        for block, marks in self._deferred:
            if block.host is host and all(mark.is_done for mark in marks):
                for mark in marks:
                    host.see(mark.clock)
                self._put_back(block)
            else:
                waiting.append((block, marks))
        self._deferred = waiting

    def block_of(self, tensor: torch.Tensor) -> Block:
        """The block of a tensor with elements. RuntimeError for one of another simulation or rank."""
        block = self._blocks.get(tensor.untyped_storage().data_ptr())
        if block is None:
            raise RuntimeError('a device tensor of another simulation was used')
        if block.host is not here():
            raise RuntimeError(f'{here()} used device memory of rank {block.host.rank}')
        return block


_pinned_addresses: Set[int] = set()


def empty_pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized contiguous tensor of the calling rank in pinned host memory."""
    nbytes = prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    memory = torch.full((nbytes, ), _POISON, dtype=torch.uint8)
    host = here()

    def on_free():
        # Queued work keeps it alive, as in CUDA's caching allocator: nothing uses it any more.
        _pinned_addresses.remove(memory.data_ptr())
        host.pinned_usage.give_back(nbytes)
        host.simulation.ledger.forget((host.rank, memory.data_ptr()))

    host.pinned_usage.take(nbytes)
    _pinned_addresses.add(memory.data_ptr())
    return dlpack.tensor_at(memory.data_ptr(), dlpack.HOST, shape, strides_of(shape), dtype, on_free)


def is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.device.type == 'cpu' and tensor.untyped_storage().data_ptr() in _pinned_addresses
