# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which tensors may stand for the shards of a transfer, and how a shard's elements are addressed in them.

A plan addresses a shard's row-major storage. The tensor passed for it may be that storage (contiguous, in the shard's
shape or flat), or any view of the shard's shape with strides of its own: a column window of a fused weight, a
transposed weight. Everything is decided from shapes, strides and addresses; no element is read here.
"""

import collections.abc
import itertools
from dataclasses import dataclass
from math import prod
from typing import Dict, Iterator, List, Mapping, NamedTuple, NoReturn, Optional, Sequence, Tuple

import numpy as np
import torch

from .affine_boxes import BoxJoin, lattice_boxes
from .affine_transfer_memory import accelerator_device
from .affine_transfer_schedule import AffineTransferExecutionError, ShardKey, of_parameter

__all__ = [
    'BufferKey', 'Shard', 'shards_of', 'collect', 'signature', 'check_buffers', 'check_disjoint', 'Axis', 'BoxPair',
    'axes_of', 'readdress'
]

# np.shares_memory solves an integer equation. Real views take it a handful of steps; it raises when it needs more.
_OVERLAP_STEPS = 1 << 20

# 'source' or 'target', and a shard of that side.
BufferKey = Tuple[str, ShardKey]


@dataclass(frozen=True)
class Shard:
    """What a buffer stands for: the shard's shape, None where the plan does not tell, and how far segments reach."""
    shape: Optional[Tuple[int, ...]]
    extent: int


def shards_of(side: str, shapes_by_name: Mapping[str, Mapping[int, Sequence[int]]], ranks: Mapping[int, int],
              rank: int, extents: Mapping[ShardKey, int]) -> Dict[BufferKey, Shard]:
    """The shards of one side that ``rank`` may pass buffers for: those that it is bound to and that hold something.

    ``extents`` has the shards that segments of this rank touch. Raises AffineTransferExecutionError when a segment
    reaches past the end of its shard.
    """
    shards = {(side, key): Shard(None, extent) for key, extent in extents.items()}
    for name, shapes in shapes_by_name.items():
        for location, shape in shapes.items():
            if ranks.get(location) != rank or prod(shape) == 0:
                continue
            extent = extents.get((name, location), 0)
            if extent > prod(shape):
                raise AffineTransferExecutionError(
                    f'the plan{of_parameter(name)} addresses {extent} elements of location {location}, whose shard '
                    f'{tuple(shape)} has {prod(shape)}')
            shards[side, (name, location)] = Shard(tuple(shape), extent)
    return shards


def collect(side: str, buffers: Mapping[str, Mapping[int, torch.Tensor]]) -> Dict[BufferKey, torch.Tensor]:
    """The buffers of one side, without those of no elements, which ZeRO leaves where it holds nothing.

    Raises AffineTransferExecutionError for what is no strided tensor with storage of its own.
    """
    tensors: Dict[BufferKey, torch.Tensor] = {}
    for name, by_location in _items(f'the {side} buffers', buffers):
        for location, tensor in _items(f'the {side} buffers{of_parameter(name)}', by_location):
            key = (side, (name, location))
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
                raise AffineTransferExecutionError(f'{_buffer(key)} is no strided tensor but a '
                                                   f'{type(tensor).__name__}')
            if tensor.numel() == 0:
                continue
            # A DTensor or another class that interprets operations itself need not have storage of the shape it shows.
            if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                _refuse_view(_buffer(key), tensor)
            tensors[key] = tensor
    return tensors


def _items(what: str, mapping):
    if not isinstance(mapping, collections.abc.Mapping):
        raise AffineTransferExecutionError(f'{what} must be a dict, not a {type(mapping).__name__}')
    return mapping.items()


def signature(tensors: Mapping[BufferKey, torch.Tensor]) -> Tuple:
    """All that the checks below read of collected buffers: where signatures are equal, so is their answer."""
    return tuple((key, type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.data_ptr(),
                  tensor.storage_offset(), tensor.untyped_storage().nbytes(), tensor.is_conj(), tensor.is_neg(),
                  tensor._is_zerotensor()) for key, tensor in tensors.items())


def check_buffers(tensors: Mapping[BufferKey, torch.Tensor], shards: Mapping[BufferKey, Shard],
                  dtype_by_side: Mapping[str, torch.dtype]) -> None:
    """Refuse the first buffer that is missing, belongs to another rank, or cannot stand for its shard.

    Raises AffineTransferExecutionError.
    """
    for key, tensor in tensors.items():
        what, (side, (name, _)) = _buffer(key), key
        if key not in shards:
            mine = sorted(location for of_side, (of_name, location) in shards if (of_side, of_name) == (side, name))
            where = f"this rank's {side} locations are {mine}" if mine else f'this rank has no {side} of that name'
            raise AffineTransferExecutionError(f'{what} is foreign: {where}')
        _check_storage(what, tensor, dtype_by_side[side])
        _check_shape(what, tensor, shards[key])
    for key, shard in shards.items():
        if shard.extent > 0 and key not in tensors:
            held = f'{shard.extent} elements or more' if shard.shape is None else f'a shard of shape {shard.shape}'
            raise AffineTransferExecutionError(f'{_buffer(key)} is missing or empty: this rank holds {held}')


def _buffer(key: BufferKey) -> str:
    side, (name, location) = key
    return f'the {side} buffer of location {location!r}{of_parameter(name)}'


def _check_storage(what: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise AffineTransferExecutionError(f'{what} has dtype {tensor.dtype}, expected {dtype}')
    if not tensor.is_cpu and tensor.device != accelerator_device():
        usable = f'or {accelerator_device()}' if accelerator_device() else '(there is no accelerator)'
        raise AffineTransferExecutionError(f'{what} is on device {tensor.device}, expected host memory {usable}')
    # A lazy conjugate or negative view and a quantized tensor show other values than they store; a ZeroTensor, which
    # stands for a gradient of zeros, stores none.
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        _refuse_view(what, tensor)
    if tensor.untyped_storage().nbytes() == 0:
        raise AffineTransferExecutionError(f'{what} has no storage: it was freed')
    reach_bytes = (tensor.storage_offset() + _reach(tensor)) * tensor.element_size()
    if reach_bytes > tensor.untyped_storage().nbytes():
        raise AffineTransferExecutionError(f'{what} reaches over {reach_bytes} bytes of a storage of '
                                           f'{tensor.untyped_storage().nbytes()}: it was resized')


def _refuse_view(what: str, tensor: torch.Tensor) -> NoReturn:
    raise AffineTransferExecutionError(f'{what} does not store the values it shows: pass the plain local tensor '
                                       f'instead of this {type(tensor).__name__}')


def _check_shape(what: str, tensor: torch.Tensor, shard: Shard) -> None:
    shape = tuple(tensor.shape)
    if shard.shape is None:
        if tensor.numel() < shard.extent or not tensor.is_contiguous():
            raise AffineTransferExecutionError(f'{what} must be contiguous and have {shard.extent} elements or more, '
                                               f'but has shape {shape} and strides {tensor.stride()}')
    elif shape != shard.shape and shape != (prod(shard.shape), ):
        flat = (prod(shard.shape), )
        expected = f'{flat}' if shard.shape == flat else f'{shard.shape} or {flat}'
        raise AffineTransferExecutionError(f'{what} has shape {shape}, expected {expected}')
    reach = 0
    # Each dimension steps over all that the dimensions of smaller strides reach, so no two elements share an address.
    for stride, size in sorted(zip(tensor.stride(), shape)):
        if size > 1 and stride <= reach:
            raise AffineTransferExecutionError(
                f'{what} is expanded or overlaps itself, as far as strides tell, each of which must step over what '
                f'the smaller ones reach: shape {shape}, strides {tensor.stride()}')
        reach += (size - 1) * stride


class _Addresses:
    """Shows a tensor's addresses to NumPy, whatever its dtype; what is stored there is never read."""

    def __init__(self, tensor: torch.Tensor):
        itemsize = tensor.element_size()
        self.__array_interface__ = {
            'version': 3,
            'data': (tensor.data_ptr(), True),
            'shape': tuple(tensor.shape),
            'strides': tuple(stride * itemsize for stride in tensor.stride()),
            'typestr': f'|V{itemsize}',
        }


def check_disjoint(tensors: Mapping[BufferKey, torch.Tensor]) -> None:
    """Refuse a target that shares elements with another target or with a source of this process.

    Views may interleave, as column windows of one weight do, as long as no byte belongs to both.
    """
    spans = [
        _Span(tensor.data_ptr(),
              tensor.data_ptr() + _reach(tensor) * tensor.element_size(), key, tensor)
        for key, tensor in tensors.items()
    ]
    # The accelerator's addresses may be equal to the host's.
    for is_cpu in (True, False):
        group: List[_Span] = []
        group_end = 0
        for span in sorted((span for span in spans if span.tensor.is_cpu == is_cpu), key=lambda span: span.begin):
            if span.begin >= group_end:
                _check_apart(group)
                group = []
            group.append(span)
            group_end = max(group_end, span.end)
        _check_apart(group)


class _Span(NamedTuple):
    """A buffer, and the addresses in bytes [begin, end) that it reaches over."""
    begin: int
    end: int
    key: BufferKey
    tensor: torch.Tensor

    @property
    def is_target(self) -> bool:
        return self.key[0] == 'target'


def _reach(tensor: torch.Tensor) -> int:
    """The elements of memory from a tensor's first one to its last one."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1


def _check_apart(group: List[_Span]) -> None:
    """Refuse two buffers of a group that share a byte, one of them a target."""
    if len(group) < 2 or not any(span.is_target for span in group):
        return
    for first, second in _meeting_spans(group):
        if first.is_target or second.is_target:
            raise AffineTransferExecutionError(f'{_buffer(first.key)} and {_buffer(second.key)} share memory')


def _meeting_spans(group: List[_Span]) -> Iterator[Tuple[_Span, _Span]]:
    """The pairs that share a byte: all at once where the buffers are boxes of one grid of addresses."""
    itemsizes = {span.tensor.element_size() for span in group}
    offsets = [span.begin - group[0].begin for span in group]
    if len(itemsizes) == 1 and not any(offset % max(itemsizes) for offset in offsets):
        boxes = lattice_boxes([offset // max(itemsizes) for offset in offsets],
                              [tuple(span.tensor.shape) for span in group], [span.tensor.stride() for span in group])
        if boxes is not None:
            for i, j in BoxJoin(boxes, boxes).blocks():
                yield from ((group[first], group[second]) for first, second in zip(i.tolist(), j.tolist())
                            if first < second)
            return
    for index, first in enumerate(group):
        for second in itertools.islice(group, index + 1, None):
            if second.begin >= first.end:
                break
            if _share_bytes(first.tensor, second.tensor):
                yield first, second


def _share_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.is_contiguous() and second.is_contiguous():
        return True
    return np.shares_memory(np.asarray(_Addresses(first)), np.asarray(_Addresses(second)), _OVERLAP_STEPS)


@dataclass(frozen=True)
class Axis:
    """``size`` elements of a shard that are ``shard_stride`` apart in it and ``stride`` apart in its buffer."""
    size: int
    shard_stride: int
    stride: int


def axes_of(tensor: torch.Tensor) -> Tuple[Axis, ...]:
    """The fewest axes, outermost first, that lead from an element's place in its shard to its place in the buffer.

    A contiguous or flat buffer has one; a column window of a matrix has two.
    """
    axes: List[Axis] = []
    shard_stride = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
        if size > 1 and axes and stride == axes[-1].size * axes[-1].stride:
            axes[-1] = Axis(axes[-1].size * size, axes[-1].shard_stride, axes[-1].stride)
        elif size > 1:
            axes.append(Axis(size, shard_stride, stride))
        shard_stride *= size
    return tuple(reversed(axes))


@dataclass(frozen=True)
class BoxPair:
    """A box of elements at two places, each an offset and strides in elements."""
    shape: Tuple[int, ...]
    offset: int
    strides: Tuple[int, ...]
    other_offset: int
    other_strides: Tuple[int, ...]

    def turned(self) -> 'BoxPair':
        return BoxPair(self.shape, self.other_offset, self.other_strides, self.offset, self.strides)

    def folded(self, dim: int, begin: int, rows: int, row: int) -> 'BoxPair':
        """``rows * row`` elements of a dimension from ``begin`` on, as ``rows`` rows of ``row`` elements."""
        shape = (rows, row) if rows > 1 else (row, )

        def fold(strides):
            return (*strides[:dim], *(strides[dim] * step for step in (row, 1)[-len(shape):]), *strides[dim + 1:])

        return BoxPair((*self.shape[:dim], *shape, *self.shape[dim + 1:]), self.offset + begin * self.strides[dim],
                       fold(self.strides), self.other_offset + begin * self.other_strides[dim],
                       fold(self.other_strides))


def readdress(copy: BoxPair, axes: Sequence[Axis]) -> Iterator[BoxPair]:
    """The copies that equal ``copy`` when its first place is no longer a shard but the buffer that ``axes`` lead to.

    A box stays one box while its elements keep within the axes; a run that continues on the next row of a buffer
    whose rows are apart is folded or cut into rows. What none of this holds for is halved until it does.
    """
    start = _coordinates(copy.offset, axes)
    steps = [_coordinates(stride, axes) for stride in copy.strides]
    last = [
        first + sum((size - 1) * step[index] for size, step in zip(copy.shape, steps))
        for index, first in enumerate(start)
    ]
    if all(coordinate < axis.size for coordinate, axis in zip(last, axes)):
        yield BoxPair(copy.shape, _address(start, axes), tuple(_address(step, axes) for step in steps),
                      copy.other_offset, copy.other_strides)
        return
    for part in _cut_at_row_ends(copy, start, steps, axes) or _halves(copy):
        yield from readdress(part, axes)


def _coordinates(distance: int, axes: Sequence[Axis]) -> List[int]:
    coordinates = []
    for axis in axes:
        coordinate, distance = divmod(distance, axis.shard_stride)
        coordinates.append(coordinate)
    return coordinates


def _address(coordinates: Sequence[int], axes: Sequence[Axis]) -> int:
    return sum(coordinate * axis.stride for coordinate, axis in zip(coordinates, axes))


def _cut_at_row_ends(copy: BoxPair, start, steps, axes: Sequence[Axis]) -> List[BoxPair]:
    """The copy in up to three parts: up to the end of the row that it starts in, whole rows, and the rest.

    Where rows do not all begin at the same place of its run, two parts, apart at the end of a row in its middle. No
    parts where none of its dimensions runs along one axis past the end of a row.
    """
    for dim, (size, step) in enumerate(zip(copy.shape, steps)):
        along = [index for index, distance in enumerate(step) if distance]
        if size == 1 or len(along) != 1:
            continue
        first, stride, row_size = start[along[0]], step[along[0]], axes[along[0]].size
        if first + (size - 1) * stride < row_size:
            continue
        if row_size % stride:
            middle_row = max(1, (first + size // 2 * stride) // row_size)
            return _cut(copy, dim, -((first - middle_row * row_size) // stride))
        row = row_size // stride
        # Rows begin where the first one would if it were whole: stride divides the row, so all rows are in phase.
        head = 0 if first < stride else row - first // stride
        rows, tail = divmod(size - head, row)
        parts = [(0, 1, head), (head, rows, row), (size - tail, 1, tail)]
        return [copy.folded(dim, *part) for part in parts if part[1] * part[2] > 0]
    return []


def _halves(copy: BoxPair) -> List[BoxPair]:
    dim = next(dim for dim, size in enumerate(copy.shape) if size > 1)
    return _cut(copy, dim, copy.shape[dim] // 2)


def _cut(copy: BoxPair, dim: int, at: int) -> List[BoxPair]:
    return [copy.folded(dim, 0, 1, at), copy.folded(dim, at, 1, copy.shape[dim] - at)]
