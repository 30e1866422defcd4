# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where a schedule's messages lie: in the buffers themselves, or in slots that are packed before or unpacked after.

A ``Layout`` is made for buffers of one geometry (shapes, strides and kinds of memory) and holds the slots; ``bound``
then puts the tensors of one call's buffers into it. The layout itself keeps no buffer alive between calls.

*One end of a message.* What travels, its *wire*, lies in host or device memory: part of a buffer where the message is
one run of elements there, in the form and memory in which they travel, else a slot. Parts of a message whose buffer
lies in the wire's own memory are copied between buffer and slot. Parts in the other memory cross over, in contiguous
runs of the wire's dtype: to or from the buffer itself where it holds such a run and is no pageable memory (which no
copy can read or write late), else by way of a second slot in the buffer's memory, the *bounce*, at the same positions.

*Copies between host and device memory within this process* are messages of the process to itself, whose two ends share
one wire in pinned memory.

*Messages in shared memory* lie in a slot of the sender's that both ends have mapped; what travels is word of it.
"""

import itertools
from dataclasses import dataclass, replace
from math import prod
from typing import Collection, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from .affine_transfer_buffers import BoxPair, BufferKey, axes_of, readdress
from .affine_transfer_memory import DEVICE, HOST, PAGEABLE, PINNED, Copies, arena
from .affine_transfer_schedule import Chunk, Message, Wire, is_contiguous, messages_of
from .affine_transfer_shared import Line, SharedSlots
from .affine_transfer_windows import Window

__all__ = ['Layout', 'Load', 'Loads', 'SharedLoad', 'lay_out']

Buffers = Mapping[BufferKey, torch.Tensor]

# The peer and the place of a process's messages to itself.
_ITSELF = -1


@dataclass(frozen=True)
class _Place:
    """A box of elements of one buffer, ``offset`` elements from its first."""
    buffer: BufferKey
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]
    offset: int

    def of(self, buffers: Buffers) -> torch.Tensor:
        buffer = buffers[self.buffer]
        return buffer.as_strided(self.shape, self.strides, buffer.storage_offset() + self.offset)


# A slot stays the same through all calls; a place in a buffer becomes a tensor with each call.
_Laid = Union[_Place, torch.Tensor]


def _bound(laid: _Laid, buffers: Buffers) -> torch.Tensor:
    return laid.of(buffers) if isinstance(laid, _Place) else laid


def _bound_copies(copies: Copies, buffers: Buffers) -> Copies:
    if not copies.targets:
        return copies
    return Copies(*([_bound(laid, buffers) for laid in side] for side in copies))


class Load(NamedTuple):
    """One end of a message: what travels, and the copies before (sender) or after (receiver).

    ``crossing`` copies between pinned and device memory; it is watched when its pinned side is a slot, which the host
    or a transport will read or fill. In a layout, what lies in buffers is places; in what moves, all are tensors.
    """
    peer: int
    wire: _Laid
    host: Copies = Copies()
    device: Copies = Copies()
    crossing: Copies = Copies()
    is_watched: bool = False

    def bound(self, buffers: Buffers) -> 'Load':
        return Load(self.peer, _bound(self.wire, buffers),
                    *(_bound_copies(copies, buffers) for copies in (self.host, self.device, self.crossing)),
                    self.is_watched)


class SharedLoad(NamedTuple):
    """One end of a message in shared memory: the copies between buffer and slot, and the line to the other end."""
    line: Line
    host: Copies

    def bound(self, buffers: Buffers) -> 'SharedLoad':
        return SharedLoad(self.line, _bound_copies(self.host, buffers))


class Loads(NamedTuple):
    """One window of messages: those that a transport carries, of those to the process itself both ends, and those in
    shared memory.

    ``turn`` is the turn of the pipeline whose slots it has, None when none of its messages needs one.
    """
    sends: List[Load]
    receives: List[Load]
    to_itself: List[Tuple[Load, Load]]
    shared_sends: List[SharedLoad]
    shared_receives: List[SharedLoad]
    turn: Optional[int]

    @property
    def operations(self) -> int:
        """How many operations of a transport its messages are; those in shared memory are none."""
        return len(self.sends) + len(self.receives)

    def bound(self, buffers: Buffers) -> 'Loads':
        return Loads([load.bound(buffers) for load in self.sends], [load.bound(buffers) for load in self.receives],
                     [(sender.bound(buffers), receiver.bound(buffers))
                      for sender, receiver in self.to_itself], [load.bound(buffers) for load in self.shared_sends],
                     [load.bound(buffers) for load in self.shared_receives], self.turn)


@dataclass(frozen=True)
class Layout:
    """A schedule laid out for buffers of one geometry: what is copied within host and within device memory, the
    windows in order, and the bytes of the slots."""
    host: Copies
    device: Copies
    windows: List[Loads]
    host_staging_bytes: int
    device_staging_bytes: int

    def bound(self, buffers: Buffers) -> 'Layout':
        """The layout with the tensors of one call's buffers."""
        return replace(self,
                       host=_bound_copies(self.host, buffers),
                       device=_bound_copies(self.device, buffers),
                       windows=[window.bound(buffers) for window in self.windows])


def lay_out(shared: SharedSlots, windows: Sequence[Window], wire_dtype: torch.dtype, buffers: Buffers,
            memory_by_buffer: Mapping[BufferKey, str], wire_memory_by_peer: Mapping[str, Mapping[int, str]],
            host_slots: str) -> Layout:
    """Address every chunk of the schedule of ``shared`` in the buffers' own strides, and take the slots.

    ``wire_memory_by_peer`` has, per side ('source' for peers sent to, 'target' for peers received from), the memory in
    which messages lie; ``host_slots`` is PINNED or PAGEABLE.
    """
    schedule = shared.schedule
    reader = _Reader(schedule.wire, buffers, memory_by_buffer)
    within, across = reader.local(schedule.local)
    to_itself = messages_of(across, schedule.wire, schedule.message_numel)
    windows = [*windows, *itertools.repeat(Window((), (), 0), len(to_itself) - len(windows))]
    apart = [_apart(window, shared.peers) for window in windows]
    carried = [
        reader.carried(window, message, wire_memory_by_peer)
        for (window, _), message in itertools.zip_longest(apart, to_itself)
    ]
    turns = list(_turns(carried, [window for _, window in apart], schedule.depth))
    slots = _Slots(wire_dtype, host_slots)
    for messages, turn in zip(carried, turns):
        for message in messages:
            slots.reserve_for(message, turn)
    laid = [
        slots.laid(messages, turn)._replace(shared_sends=reader.shared_loads('source', window, shared, wire_dtype),
                                            shared_receives=reader.shared_loads('target', window, shared, wire_dtype))
        for messages, (_, window), turn in zip(carried, apart, turns)
    ]
    return Layout(_copies(within[HOST]), _copies(within[DEVICE]), laid,
                  slots.nbytes(HOST) + shared.nbytes, slots.nbytes(DEVICE))


def _apart(window: Window, sharing: Collection[int]) -> Tuple[Window, Window]:
    """What a transport carries of a window, and what lies in memory shared with these peers."""
    carried, shared = ([[travel for travel in travels if (travel.peer in sharing) == is_shared]
                        for travels in (window.sends, window.receives)] for is_shared in (False, True))
    return Window(*carried, window.number), Window(*shared, window.number)


def _turns(carried: Sequence[Sequence['_Carried']], shared: Sequence[Window], depth: int) -> Iterator[Optional[int]]:
    """The turn of each window: 0 and up in a circle, None for one that needs no slots of this process.

    One that sends in shared memory has the turn of its number, which the receivers know; they need no turn.
    """
    turn = 0
    for messages, window in zip(carried, shared):
        is_staged = bool(window.sends) or any(message.bare is None for message in messages)
        turn = window.number % depth if window.sends else turn
        yield turn if is_staged else None
        turn = (turn + is_staged) % depth


def _copies(pairs: Sequence[Tuple[_Laid, _Laid]]) -> Copies:
    return Copies(*zip(*pairs)) if pairs else Copies()


@dataclass(frozen=True)
class _Piece:
    """A chunk of a message in this process's buffer: ``numel`` elements from ``position`` on in the message.

    ``copies`` lead from the buffer to the message. ``is_run``: the buffer holds them as the message does.
    """
    buffer: BufferKey
    memory: str
    position: int
    numel: int
    copies: Tuple[BoxPair, ...]
    is_run: bool

    @property
    def place(self) -> _Place:
        assert self.is_run, 'only a run is one place'
        return _Place(self.buffer, (self.numel, ), (1, ), self.copies[0].offset)

    def between(self, slot: torch.Tensor) -> Iterator[Tuple[torch.Tensor, _Place]]:
        """Each copy as its part of the slot, which holds the message, and its place in the buffer."""
        for copy in self.copies:
            part = slot.as_strided(copy.shape, copy.other_strides, slot.storage_offset() + copy.other_offset)
            yield part, _Place(self.buffer, copy.shape, copy.strides, copy.offset)


class _SlotKey(NamedTuple):
    """``place`` is that of the message among those of its side; a slot without a turn serves all of them."""
    memory: str
    side: str
    place: int
    turn: Optional[int]


@dataclass(frozen=True)
class _Carried:
    """A message of a window and its ends in this process, by side: one, or both when it is to the process itself.

    ``bare`` is its place in a buffer, None where it travels in a slot, in ``memory``.
    """
    peer: int
    place: int
    memory: str
    numel: int
    pieces_by_side: Mapping[str, Sequence[_Piece]]
    bare: Optional[_Place]

    @classmethod
    def of(cls, peer: int, place: int, memory: str, numel: int,
           pieces_by_side: Mapping[str, Sequence[_Piece]]) -> '_Carried':
        # Pageable memory cannot be read or written late, as the other end of a message to itself does.
        kinds = (DEVICE, ) if memory == DEVICE else (PINNED, ) if peer == _ITSELF else (PAGEABLE, PINNED)
        bare = (pieces[0].place for pieces in pieces_by_side.values()
                if len(pieces) == 1 and pieces[0].is_run and pieces[0].memory in kinds)
        return cls(peer, place, memory, numel, pieces_by_side, next(bare, None))

    @property
    def other_memory(self) -> str:
        return HOST if self.memory == DEVICE else DEVICE

    def is_bare_at(self, side: str) -> bool:
        return self.bare is not None and self.bare.buffer[0] == side

    def is_bounced(self, piece: _Piece) -> bool:
        is_across = (piece.memory == DEVICE) != (self.memory == DEVICE)
        return is_across and not (piece.is_run and piece.memory != PAGEABLE)

    def wire_slot(self, turn: Optional[int]) -> _SlotKey:
        return _SlotKey(self.memory, next(iter(self.pieces_by_side)), self.place, turn)

    def bounce_slot(self, side: str, turn: Optional[int]) -> _SlotKey:
        # The process itself has one: its device end is always filled and read by the same lane, in order.
        return _SlotKey(self.other_memory, side, self.place, None if self.peer == _ITSELF else turn)


class _Reader:
    """Where chunks lie in the buffers of this process."""

    def __init__(self, wire: Wire, buffers: Buffers, memory_by_buffer: Mapping[BufferKey, str]):
        self._is_wire = {'source': wire.source_is_wire, 'target': wire.target_is_wire}
        self._axes = {key: axes_of(tensor) for key, tensor in buffers.items()}
        self._memory = memory_by_buffer

    def carried(self, window: Window, to_itself: Optional[Message],
                wire_memory_by_peer: Mapping[str, Mapping[int, str]]) -> List[_Carried]:
        """The messages of a window, ``to_itself`` among them if it is not None."""
        carried = [
            _Carried.of(travel.peer, travel.place, wire_memory_by_peer[side][travel.peer], travel.message.numel,
                        {side: self._pieces(side, travel.message)})
            for side, travels in (('source', window.sends), ('target', window.receives)) for travel in travels
        ]
        if to_itself is not None:
            pieces_by_side = {side: self._pieces(side, to_itself) for side in ('source', 'target')}
            carried.append(_Carried.of(_ITSELF, _ITSELF, HOST, to_itself.numel, pieces_by_side))
        return carried

    def shared_loads(self, side: str, window: Window, shared: SharedSlots, dtype: torch.dtype) -> List[SharedLoad]:
        """The messages of a window that lie in shared memory, of one side."""
        loads = []
        for travel in window.sends if side == 'source' else window.receives:
            slot = shared.slot(side, travel.peer, window.number, travel.message.numel, dtype)
            pairs = [pair for piece in self._pieces(side, travel.message) for pair in piece.between(slot)]
            loads.append(SharedLoad(shared.lines[travel.peer], _directed(side, pairs)))
        return loads

    def _pieces(self, side: str, message: Message) -> List[_Piece]:
        pieces = []
        position = 0
        for chunk in message.chunks:
            box = getattr(chunk, side)
            packed_strides = tuple(prod(chunk.shape[dim + 1:]) for dim in range(len(chunk.shape)))
            whole = BoxPair(chunk.shape, box.offset, box.strides, position, packed_strides)
            buffer = (side, box.shard)
            copies = tuple(readdress(whole, self._axes[buffer]))
            is_run = self._is_wire[side] and len(copies) == 1 and is_contiguous(copies[0].shape, copies[0].strides)
            pieces.append(_Piece(buffer, self._memory[buffer], position, chunk.numel, copies, is_run))
            position += chunk.numel
        return pieces

    def local(self, chunks: Sequence[Chunk]) -> Tuple[Dict[str, List[Tuple[_Place, _Place]]], List[Chunk]]:
        """(target, source) places of the chunks that stay within host or device memory, and the chunks that cross."""
        within: Dict[str, List[Tuple[_Place, _Place]]] = {HOST: [], DEVICE: []}
        across = []
        for chunk in chunks:
            kinds = {DEVICE if self._memory[key] == DEVICE else HOST for key in _keys_of(chunk)}
            if len(kinds) > 1:
                across.append(chunk)
            else:
                within[kinds.pop()] += self._local_places(chunk)
        return within, across

    def _local_places(self, chunk: Chunk) -> Iterator[Tuple[_Place, _Place]]:
        source_key, target_key = _keys_of(chunk)
        whole = BoxPair(chunk.shape, chunk.source.offset, chunk.source.strides, chunk.target.offset,
                        chunk.target.strides)
        for part in readdress(whole, self._axes[source_key]):
            for copy in readdress(part.turned(), self._axes[target_key]):
                yield (_Place(target_key, copy.shape, copy.strides,
                              copy.offset), _Place(source_key, copy.shape, copy.other_strides, copy.other_offset))


def _keys_of(chunk: Chunk) -> Tuple[BufferKey, BufferKey]:
    return ('source', chunk.source.shard), ('target', chunk.target.shard)


class _Slots:
    """The slots of a layout: first reserved for all messages, then taken and used."""

    def __init__(self, dtype: torch.dtype, host_memory: str):
        self._dtype, self._host_memory = dtype, host_memory
        self._numel: Dict[_SlotKey, int] = {}
        self._tensors: Dict[_SlotKey, torch.Tensor] = {}

    def nbytes(self, memory: str) -> int:
        return sum(tensor.nbytes for key, tensor in self._tensors.items() if key.memory == memory)

    def reserve_for(self, message: _Carried, turn: Optional[int]) -> None:
        keys = [message.wire_slot(turn)] if message.bare is None else []
        keys += [
            message.bounce_slot(side, turn) for side, pieces in message.pieces_by_side.items()
            if not message.is_bare_at(side) and any(message.is_bounced(piece) for piece in pieces)
        ]
        for key in keys:
            self._numel[key] = max(self._numel.get(key, 0), message.numel)

    def _take(self, key: _SlotKey) -> torch.Tensor:
        if key not in self._tensors:
            memory = DEVICE if key.memory == DEVICE else self._host_memory
            self._tensors[key] = arena(self._numel[key], self._dtype, memory)
        return self._tensors[key]

    def laid(self, messages: Sequence[_Carried], turn: Optional[int]) -> Loads:
        window = Loads([], [], [], [], [], turn)
        for message in messages:
            wire = message.bare or self._take(message.wire_slot(turn))[:message.numel]
            ends = {side: self._end(message, side, wire, turn) for side in message.pieces_by_side}
            if message.peer == _ITSELF:
                window.to_itself.append((ends['source'], ends['target']))
            elif 'source' in ends:
                window.sends.append(ends['source'])
            else:
                window.receives.append(ends['target'])
        return window

    def _end(self, message: _Carried, side: str, wire: _Laid, turn: Optional[int]) -> Load:
        if message.is_bare_at(side):
            return Load(message.peer, wire)
        within: Dict[str, List] = {HOST: [], DEVICE: []}
        crossing: List[Tuple[_Laid, _Laid]] = []
        bounced: List[Tuple[int, int]] = []
        for piece in message.pieces_by_side[side]:
            begin, end = piece.position, piece.position + piece.numel
            if message.is_bounced(piece):
                within[message.other_memory] += piece.between(self._take(message.bounce_slot(side, turn)))
                # Neighbours cross over as one run.
                bounced.append((bounced.pop()[0] if bounced and bounced[-1][1] == begin else begin, end))
            elif (piece.memory == DEVICE) == (message.memory == DEVICE):
                within[message.memory] += piece.between(wire)
            else:
                crossing.append((_run(wire, begin, end), piece.place))
        for begin, end in bounced:
            crossing.append((_run(wire, begin, end), self._take(message.bounce_slot(side, turn))[begin:end]))
        is_watched = any(isinstance(pair[message.memory == DEVICE], torch.Tensor) for pair in crossing)
        return Load(message.peer, wire,
                    *(_directed(side, pairs) for pairs in (within[HOST], within[DEVICE], crossing)), is_watched)


def _run(laid: _Laid, begin: int, end: int) -> _Laid:
    if isinstance(laid, torch.Tensor):
        return laid[begin:end]
    return _Place(laid.buffer, (end - begin, ), (1, ), laid.offset + begin)


def _directed(side: str, pairs: Sequence[Tuple[_Laid, _Laid]]) -> Copies:
    """Copies between (wire or slot, what is nearer to the buffer): towards the wire at the source, else from it."""
    return _copies(pairs if side == 'source' else [(near, wire) for wire, near in pairs])
