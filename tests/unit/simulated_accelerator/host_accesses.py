# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the host does to memory that streams or messages may still be using."""

import functools
from typing import Iterator, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .hosts import caller, here
from .races import Access, Region

_LOOKS_ONLY = {
    f'aten::{name}'
    for name in ('alias', 'detach', 'empty_like', 'full_like', 'is_pinned', 'is_same_size', 'new_empty',
                 'new_empty_strided', 'new_full', 'new_ones', 'new_zeros', 'ones_like', 'record_stream', 'zeros_like')
}


def touch(tensor: torch.Tensor, is_write: bool, text: str = 'the host') -> None:
    """Say that the host reads or writes a host tensor now; for what does not go through torch's operators."""
    host = here()
    ledger = host.simulation.ledger
    key = block_key(tensor)
    if ledger.knows(key) and tensor.numel():
        region = Region.of(tensor, tensor.data_ptr() - key[1])
        ledger.check(key, Access(region, is_write, host, 0, True, f'{text} at {caller()}'), host.clock, True)


def block_key(tensor: torch.Tensor) -> Tuple[int, int]:
    """What the ledger knows the memory of a host tensor by."""
    return here().rank, tensor.untyped_storage().data_ptr()


class HostAccesses(TorchDispatchMode):
    """Sees all operators on host tensors of the calling thread, and has the ledger check them."""

    @classmethod
    def _should_skip_dynamo(cls):
        # Nothing is compiled here, and torch's guard against it costs more than all of this.
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if here().simulation.ledger.is_busy and not _is_view(function):
            touched = list(_host_tensors(function, args, kwargs))
            if touched:
                here().simulation.enter()
            for tensor, is_write in touched:
                touch(tensor, is_write, str(function))
        return function(*args, **kwargs)


@functools.lru_cache(maxsize=None)
def _is_view(function) -> bool:
    """Whether an operator looks at shapes and strides only."""
    return function.is_view or function._schema.name in _LOOKS_ONLY


@functools.lru_cache(maxsize=None)
def _written(function) -> Tuple[Tuple[str, bool], ...]:
    """Name of each argument, and whether the operator writes it."""
    return tuple((argument.name, argument.alias_info is not None and argument.alias_info.is_write)
                 for argument in function._schema.arguments)


def _host_tensors(function, args, kwargs) -> Iterator[Tuple[torch.Tensor, bool]]:
    """The host tensors that an operator reads or writes; none where a device tensor is among the arguments, since the
    device's own operators then say what happens."""
    found = []
    for position, (name, is_write) in enumerate(_written(function)):
        value = args[position] if position < len(args) else kwargs.get(name)
        for tensor in value if isinstance(value, (list, tuple)) else (value, ):
            if isinstance(tensor, torch.Tensor):
                if tensor.device.type != 'cpu':
                    return
                found.append((tensor, is_write))
    yield from found
