# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""torch's operators on device tensors: views, copies, and anything else as queued work on the shadow.

Copies follow CUDA. Between host and device, bytes are moved asynchronously only by ``non_blocking`` copies with
pinned memory; pageable memory is read before a copy to the device returns, and a copy to pageable memory returns when
it is done. Only tensors of one dtype and one dense layout can be moved so; for others, contiguous temporaries are
made on the device and on the host, and those on the device count as allocations.
"""

from typing import List, Tuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import memory
from .host_accesses import block_key, touch
from .hosts import caller, here
from .races import Region
from .synchronizations import synchronization

_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_PRIVATE_USE = 'PrivateUse1'
# These look at shapes and strides only, so those of the CPU serve.
_VIEWS = ('as_strided', 'view', '_reshape_alias', 'unfold', 'view.dtype')
_libraries: List[torch.library.Library] = []


def register() -> None:
    """Install the operators, once per process."""
    library = torch.library.Library('aten', 'IMPL')
    for name in _VIEWS:
        library.impl(name, _on_cpu(name), _PRIVATE_USE)
    library.impl('_copy_from', _copy_from, _PRIVATE_USE)
    library.impl('empty.memory_format', _empty, _PRIVATE_USE)
    library.impl('empty_strided', _empty_strided, _PRIVATE_USE)
    library.impl('record_stream', _record_stream, _PRIVATE_USE)
    library.impl('_local_scalar_dense', lambda tensor: to_host(tensor).item(), _PRIVATE_USE)
    library.impl('equal', lambda one, other: torch.equal(to_host(one), to_host(other)), _PRIVATE_USE)
    library.impl('is_pinned', _is_pinned, 'CPU')
    others = torch.library.Library('_', 'IMPL')
    others.fallback(_anything, _PRIVATE_USE)
    # They hold as long as these objects live.
    _libraries.extend((library, others))


def _on_cpu(name: str):
    packet, _, overload = name.partition('.')
    operator = getattr(getattr(torch.ops.aten, packet), overload or 'default')
    return lambda *args, **kwargs: operator.redispatch(_CPU_KEYS, *args, **kwargs)


def _is_pinned(tensor, device=None) -> bool:
    return memory.is_pinned(tensor)


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    simulation = here().simulation
    simulation.enter()
    return simulation.device_memory.empty(size, memory.strides_of(size), dtype or torch.get_default_dtype())


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    simulation = here().simulation
    simulation.enter()
    return simulation.device_memory.empty(size, stride, dtype or torch.get_default_dtype())


@synchronization
def _record_stream(tensor, stream) -> None:
    if tensor.numel():
        simulation = here().simulation
        simulation.device_memory.block_of(tensor).add_user(simulation.stream(stream.stream_id))


def _copy_from(source, target, non_blocking=False):
    here().simulation.enter()
    if target.numel():
        _copy(source.expand(target.shape), target, non_blocking)
    return target


def _copy(source, target, non_blocking: bool) -> None:
    if is_on_device(source) and is_on_device(target):
        _enqueue(memory.shadow(target).copy_, memory.shadow(source), [source], [target], 'copy within the device')
    elif source.dtype == target.dtype and _is_one_piece(source, target):
        _move(source, target, non_blocking)
    else:
        _copy_through_temporaries(source, target, non_blocking)


def is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != 'cpu'


def _is_one_piece(source, target) -> bool:
    """Whether both tensors fill one stretch of memory, with their elements in the same order."""
    expected = 1
    for size, stride, other in sorted(zip(target.shape, target.stride(), source.stride()), key=lambda dim: dim[1]):
        if size > 1:
            if stride != expected or other != expected:
                return False
            expected *= size
    return True


def _move(source, target, non_blocking: bool) -> None:
    """Copy between host and device, in one piece and one dtype."""
    stream = here().stream
    if is_on_device(target):
        is_late = non_blocking and memory.is_pinned(source)
        if not is_late:
            touch(source, False, 'copy to the device')
        held = source if is_late else source.clone()
        _enqueue(memory.shadow(target).copy_, held, [source] if is_late else [], [target], 'copy to the device')
        is_done = non_blocking
    else:
        _enqueue(target.copy_, memory.shadow(source), [source], [target], 'copy to the host')
        is_done = non_blocking and memory.is_pinned(target)
    if not is_done:
        here().wait_for_mark(stream.mark(), 'copy')


def _copy_through_temporaries(source, target, non_blocking: bool) -> None:
    """A copy between host and device of which a side is converted or gathered first.

    non_blocking copies convert on the device, others on the host.
    """
    if is_on_device(source) == non_blocking:
        moved = _dense(source, target.dtype)
        landing = target if target.is_contiguous() else _empty_like(target, target.dtype)
    else:
        moved = _dense(source, source.dtype)
        fits = target.is_contiguous() and source.dtype == target.dtype
        landing = target if fits else _empty_like(target, source.dtype)
    _move(moved, landing, non_blocking)
    if landing is not target:
        _copy_on_one_side(landing, target)


def _dense(tensor, dtype):
    """The tensor itself when it is contiguous and of this dtype, else a copy on the same side."""
    if tensor.is_contiguous() and tensor.dtype == dtype:
        return tensor
    copy = _empty_like(tensor, dtype)
    _copy_on_one_side(tensor, copy)
    return copy


def _empty_like(tensor, dtype):
    if is_on_device(tensor):
        return here().simulation.device_memory.empty(tensor.shape, memory.strides_of(tensor.shape), dtype)
    return torch.empty(tensor.shape, dtype=dtype)


def _copy_on_one_side(source, target) -> None:
    if is_on_device(source):
        _copy(source, target, True)
        return
    touch(source, False, 'copy on the host')
    touch(target, True, 'copy on the host')
    target.copy_(source)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pageable host memory, waited for; a host tensor is returned as it is."""
    if not is_on_device(tensor):
        return tensor
    here().simulation.enter()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    if copy.numel():
        _copy(tensor, copy, False)
    return copy


def _enqueue(function, argument, reads, writes, text: str) -> None:
    """Queue ``function(argument)`` on the current stream. Holds no device tensor, whose memory may be reused."""
    touches = [region_of(tensor) + (False, ) for tensor in reads] + [region_of(tensor) + (True, ) for tensor in writes]
    here().stream.enqueue_work(lambda: function(argument), touches, f'{text} at {caller()}')


def region_of(tensor: torch.Tensor) -> Tuple[object, Region]:
    """The block and the bytes of a tensor with elements, as the ledger knows them."""
    if is_on_device(tensor):
        key = here().simulation.device_memory.block_of(tensor).key
    else:
        key = block_key(tensor)
    return key, Region.of(tensor, tensor.data_ptr() - key[1])


def _anything(operator, *args, **kwargs):
    """Queue an operator that writes some of its arguments or returns one new tensor, to run on the shadows.

    Arguments in host memory are read at the call. What an operator returns gets its shape from the meta device.
    """
    here().simulation.enter()
    flat, spec = tree_flatten((args, kwargs))
    written = _written_tensors(operator, args, kwargs)
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    _check_written(operator, tensors, written)
    result = written[0] if written else _result_of(operator, flat, spec)
    on_host = [_late(value) if isinstance(value, torch.Tensor) else value for value in flat]
    late_args, late_kwargs = tree_unflatten(on_host, spec)
    late_result = None if written else memory.shadow(result)

    def run(_):
        value = operator(*late_args, **late_kwargs)
        if late_result is not None:
            late_result.copy_(value)

    reads = [tensor for tensor in tensors if is_on_device(tensor) and tensor.numel()]
    _enqueue(run, None, reads, [tensor for tensor in written or [result] if tensor.numel()], str(operator))
    return result


def _check_written(operator, tensors, written) -> None:
    """Refuse what would write host memory, or resize an output, as operators do with empty ones."""
    resizes = any(tensor.numel() for tensor in tensors) and not all(tensor.numel() for tensor in written)
    if resizes or not all(is_on_device(tensor) for tensor in written):
        raise NotImplementedError(f'{operator} on the simulated accelerator')


def _late(tensor):
    return memory.shadow(tensor) if is_on_device(tensor) else tensor.clone()


def _written_tensors(operator, args, kwargs) -> List[torch.Tensor]:
    written = []
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += value if isinstance(value, (list, tuple)) else [value]
    return written


def _result_of(operator, flat, spec):
    """An uninitialized device tensor for what the operator returns."""
    if [str(returned.type) for returned in operator._schema.returns] != ['Tensor']:
        raise NotImplementedError(f'{operator} on the simulated accelerator')
    metas = [
        value.to('meta') if isinstance(value, torch.Tensor) and not is_on_device(value) else
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device='meta') if isinstance(
            value, torch.Tensor) else value for value in flat
    ]
    args, kwargs = tree_unflatten(metas, spec)
    if 'device' in kwargs:
        kwargs['device'] = 'meta'
    like = operator(*args, **kwargs)
    return here().simulation.device_memory.empty(like.shape, memory.strides_of(like.shape), like.dtype)
