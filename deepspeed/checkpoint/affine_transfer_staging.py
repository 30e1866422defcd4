# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where a schedule's messages lie: in windows of the buffers themselves, or in the slots of an arena.

A ``Layout`` is made for buffers of one geometry (shapes and strides) and holds the arenas; ``bind`` then turns it into
the tensors of one call's buffers. It keeps no buffer alive between calls. Arenas are host memory.
"""

import itertools
from dataclasses import dataclass
from math import prod
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from .affine_transfer_buffers import Copy, axes_of, readdress
from .affine_transfer_schedule import Chunk, Message, Schedule, ShardKey, is_contiguous

__all__ = ['Tensors', 'Load', 'Bound', 'Layout', 'geometry_of', 'lay_out']

Tensors = Mapping[ShardKey, torch.Tensor]


class Load(NamedTuple):
    """A message's contiguous tensor, and (part of it, view of a buffer) pairs: packed before or unpacked after."""
    tensor: torch.Tensor
    copies: List[Tuple[torch.Tensor, torch.Tensor]]


class Bound(NamedTuple):
    """What one call copies itself, as (target, source) pairs, and what it sends and receives, by peer in order."""
    local: List[Tuple[torch.Tensor, torch.Tensor]]
    sends: Dict[int, List[Load]]
    receives: Dict[int, List[Load]]


@dataclass(frozen=True)
class _Window:
    """A box of one shard's buffer, ``offset`` elements from the buffer's first."""
    shard: ShardKey
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]
    offset: int

    def of(self, buffers: Tensors) -> torch.Tensor:
        buffer = buffers[self.shard]
        return buffer.as_strided(self.shape, self.strides, buffer.storage_offset() + self.offset)


@dataclass(frozen=True)
class _Parcel:
    """A message before a call's buffers are known: a window of one of them, or a slot with windows for its parts."""
    slot: Optional[torch.Tensor]
    window: Optional[_Window]
    parts: Tuple[Tuple[torch.Tensor, _Window], ...] = ()

    def of(self, buffers: Tensors) -> Load:
        tensor = self.slot if self.window is None else self.window.of(buffers)
        return Load(tensor, [(part, window.of(buffers)) for part, window in self.parts])


@dataclass(frozen=True)
class _Lane:
    """The messages to or from one peer, and the arena that they share."""
    parcels: List[_Parcel]
    arena: torch.Tensor

    def of(self, buffers: Tensors) -> List[Load]:
        return [parcel.of(buffers) for parcel in self.parcels]


@dataclass(frozen=True)
class Layout:
    """A schedule laid out for buffers of one geometry."""
    geometry: Tuple
    local: List[Tuple[_Window, _Window]]
    sends: Dict[int, _Lane]
    receives: Dict[int, _Lane]

    @property
    def arena_bytes(self) -> int:
        return sum(lane.arena.nbytes for side in (self.sends, self.receives) for lane in side.values())

    def bind(self, sources: Tensors, targets: Tensors) -> Bound:
        return Bound(local=[(target.of(targets), source.of(sources)) for target, source in self.local],
                     sends={
                         peer: lane.of(sources)
                         for peer, lane in self.sends.items()
                     },
                     receives={
                         peer: lane.of(targets)
                         for peer, lane in self.receives.items()
                     })


def geometry_of(sources: Tensors, targets: Tensors) -> Tuple:
    """What a layout depends on: it serves all buffers whose geometry is equal to the one it was made for."""
    return tuple({key: (tensor.shape, tensor.stride()) for key, tensor in side.items()} for side in (sources, targets))


def lay_out(schedule: Schedule, source_dtype: torch.dtype, target_dtype: torch.dtype, sources: Tensors,
            targets: Tensors) -> Layout:
    """Address every chunk in the buffers' own strides, and take the arenas.

    Raises AffineTransferExecutionError for a chunk that cannot be addressed so.
    """
    wire_dtype = source_dtype if schedule.wire.source_is_wire else target_dtype

    def lane(queue, side, is_wire, buffers):
        return _lane([_packed_copies(message, side, buffers) for message in queue], queue, is_wire, wire_dtype,
                     schedule.depth)

    return Layout(geometry_of(sources, targets),
                  local=[windows for chunk in schedule.local for windows in _local_windows(chunk, sources, targets)],
                  sends={
                      peer: lane(queue, 'source', schedule.wire.source_is_wire, sources)
                      for peer, queue in schedule.sends.items()
                  },
                  receives={
                      peer: lane(queue, 'target', schedule.wire.target_is_wire, targets)
                      for peer, queue in schedule.receives.items()
                  })


def _local_windows(chunk: Chunk, sources: Tensors, targets: Tensors) -> Iterator[Tuple[_Window, _Window]]:
    """The (target, source) windows of a chunk that stays in this process."""
    source, target = chunk.source, chunk.target
    whole = Copy(chunk.shape, source.offset, source.strides, target.offset, target.strides)
    for part in readdress(whole, axes_of(sources[source.shard])):
        for copy in readdress(part.turned(), axes_of(targets[target.shard])):
            yield (_Window(target.shard, copy.shape, copy.strides,
                           copy.offset), _Window(source.shard, copy.shape, copy.other_strides, copy.other_offset))


def _packed_copies(message: Message, side: str, buffers: Tensors) -> List[Tuple[ShardKey, Copy]]:
    """The message's chunks by shard: from addresses in the buffers to places back to back in the message."""
    copies = []
    position = 0
    for chunk in message.chunks:
        box = getattr(chunk, side)
        packed_strides = tuple(prod(chunk.shape[dim + 1:]) for dim in range(len(chunk.shape)))
        whole = Copy(chunk.shape, box.offset, box.strides, position, packed_strides)
        copies += [(box.shard, copy) for copy in readdress(whole, axes_of(buffers[box.shard]))]
        position += chunk.numel
    return copies


def _lane(copies_by_message: Sequence[List[Tuple[ShardKey, Copy]]], queue: Sequence[Message], is_wire: bool,
          wire_dtype: torch.dtype, depth: int) -> _Lane:
    """Windows for the messages that lie in one piece in a buffer, in the form they travel in; slots for the others.

    Slots are used in turn. Of the messages under way there are at most ``depth``, so the one that used a slot before
    is done when the next one needs it.
    """
    bare = [
        is_wire and len(copies) == 1 and is_contiguous(copies[0][1].shape, copies[0][1].strides)
        for copies in copies_by_message
    ]
    staged_numels = [message.numel for message, is_bare in zip(queue, bare) if not is_bare]
    arena = torch.empty((min(depth, len(staged_numels)), max(staged_numels, default=0)), dtype=wire_dtype)
    slots = itertools.cycle(arena.unbind())
    parcels = []
    for message, copies, is_bare in zip(queue, copies_by_message, bare):
        if is_bare:
            shard, copy = copies[0]
            parcels.append(_Parcel(None, _Window(shard, (message.numel, ), (1, ), copy.offset)))
        else:
            parcels.append(_staged(next(slots)[:message.numel], copies))
    return _Lane(parcels, arena)


def _staged(slot: torch.Tensor, copies: List[Tuple[ShardKey, Copy]]) -> _Parcel:
    parts = ((slot.as_strided(copy.shape, copy.other_strides,
                              slot.storage_offset() + copy.other_offset),
              _Window(shard, copy.shape, copy.strides, copy.offset)) for shard, copy in copies)
    return _Parcel(slot, None, tuple(parts))
