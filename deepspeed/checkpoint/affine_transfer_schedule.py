# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which messages one rank of a transfer sends and receives, and what it copies itself, as plain values.

A plan says which box of which source shard becomes which box of which target shard; endpoints say which rank holds
each shard. The schedule of a rank follows: its segments, cut into *chunks* that fit a message, and the chunks laid
back to back into *messages* per peer. Both ends of a pair derive the same messages in the same order from the segments
they share, so nothing but payload travels. This module knows neither tensors nor processes; offsets and strides are
elements into a shard's row-major storage, as in ``TransferSegment``.

Example: one segment of 10 elements from rank 0 to rank 1, with room for 4 elements in a message, is three messages of
4, 4 and 2 elements in the schedules of both, and nothing in the schedule of rank 2.
"""

import hashlib
import itertools
import struct
from collections import deque
from dataclasses import dataclass, replace
from math import prod
from typing import Container, Deque, Dict, Iterable, List, Mapping, Sequence, Tuple

from .affine_transfer import TransferPlan, TransferSegment

__all__ = [
    'AffineTransferExecutionError', 'Box', 'Chunk', 'Message', 'PairDigest', 'Schedule', 'ShardKey', 'Wire',
    'cutting_of_messages', 'is_contiguous', 'messages_of', 'of_parameter'
]

# A chunk that needs no packing at one or both of its ends travels alone, straight from or into the buffer there, when
# it has this many bytes. For a shorter one, a message of its own costs more than the copies that it saves.
ALONE_BYTES_BY_BARE_ENDS = {1: 3 << 19, 2: 1 << 17}
# Longer messages leave the cache between packing and sending. Those that need neither end's copies may be longer. Two
# slots of this size leave some of the default budget for the Python objects of a schedule.
MAX_PACKED_BYTES = 7 << 20
# The same in shared memory: two slots of a pair stay in the cache, and word of a message costs less than sending one.
MAX_SHARED_BYTES = 1 << 21

# A parameter's name and a location that holds a shard of it.
ShardKey = Tuple[str, int]
NamedSegment = Tuple[str, TransferSegment]


def cutting_of_messages() -> str:
    """The sizes above, as ranks compare them: both ends of a pair must cut alike."""
    return f'{ALONE_BYTES_BY_BARE_ENDS}, {MAX_PACKED_BYTES}, {MAX_SHARED_BYTES}'


class AffineTransferExecutionError(ValueError):
    """A transfer that was refused before it began, or that failed midway; the text says which, and why."""


@dataclass(frozen=True)
class Wire:
    """How elements travel: their size on the wire, and whether each end's buffers hold them in that very form."""
    itemsize: int
    source_is_wire: bool
    target_is_wire: bool

    @classmethod
    def between(cls, source_itemsize: int, target_itemsize: int, converts: bool) -> 'Wire':
        """Convert on the sender when target elements are no larger, else on the receiver: fewer bytes travel."""
        on_sender = target_itemsize <= source_itemsize
        return cls(itemsize=min(source_itemsize, target_itemsize),
                   source_is_wire=not converts or not on_sender,
                   target_is_wire=not converts or on_sender)


@dataclass(frozen=True)
class Box:
    """Where a box of elements begins in a shard and how it strides there; its shape is kept beside it."""
    shard: ShardKey
    offset: int
    strides: Tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A box of elements that is copied at once, from a source shard into a target shard."""
    shape: Tuple[int, ...]
    source: Box
    target: Box

    @classmethod
    def of(cls, name: str, segment: TransferSegment) -> 'Chunk':
        """The whole segment, without dimensions of one element and with those merged that both ends run through."""
        dims: List[Tuple[int, int, int]] = []
        for size, source, target in zip(segment.shape, segment.source_strides, segment.target_strides):
            if size == 1:
                continue
            if dims and dims[-1][1:] == (size * source, size * target):
                size *= dims.pop()[0]
            dims.append((size, source, target))
        shape, source_strides, target_strides = zip(*dims) if dims else ((), (), ())
        return cls(shape, Box((name, segment.source_rank), segment.source_offset, source_strides),
                   Box((name, segment.target_rank), segment.target_offset, target_strides))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def rows(self, begin: int, end: int) -> 'Chunk':
        """The part ``[begin:end]`` along the outermost dimension, without that dimension when it is a single row."""
        kept = 0 if end - begin > 1 else 1
        return Chunk(((end - begin, ) + self.shape[1:])[kept:],
                     *(Box(box.shard, box.offset + begin * box.strides[0], box.strides[kept:])
                       for box in (self.source, self.target)))


@dataclass(frozen=True)
class Message:
    """Chunks that travel together, back to back in row-major order; ``numel`` elements in all."""
    chunks: Tuple[Chunk, ...]
    numel: int


@dataclass(frozen=True)
class PairDigest:
    """What one end holds of a pair, small enough to send: 128 bits over its ordered segments, and two sums."""
    value: int
    segments: int
    elements: int

    @classmethod
    def of(cls, source_rank: int, target_rank: int, pair: Iterable[NamedSegment]) -> 'PairDigest':
        digest = hashlib.blake2b(struct.pack('<2q', source_rank, target_rank), digest_size=16)
        segments = elements = 0
        for name, segment in pair:
            encoded = name.encode()
            numbers = (len(encoded), len(segment.shape), segment.source_rank, segment.source_offset,
                       segment.target_rank, segment.target_offset, *segment.shape, *segment.source_strides,
                       *segment.target_strides)
            digest.update(encoded + struct.pack(f'<{len(numbers)}q', *numbers))
            segments += 1
            elements += segment.numel
        # Sizes may be NumPy's, whose sums json does not write.
        return cls(int.from_bytes(digest.digest(), 'little'), segments, int(elements))


@dataclass(frozen=True)
class Schedule:
    """One rank's part: chunks to copy within the process, and the messages to and from each peer, in order.

    ``depth`` messages of ``message_numel`` elements fit into the bytes that a peer may occupy in one direction, so
    that one can be packed while another one travels. Extents are the elements that the buffer of each of this rank's
    shards must reach, counted from the shard's start.
    """
    local: Tuple[Chunk, ...]
    sends: Dict[int, Tuple[Message, ...]]
    receives: Dict[int, Tuple[Message, ...]]
    wire: Wire
    depth: int
    message_numel: int
    segments: int
    source_extents: Dict[ShardKey, int]
    target_extents: Dict[ShardKey, int]
    send_digests: Dict[int, PairDigest]
    receive_digests: Dict[int, PairDigest]

    @classmethod
    def build(cls, plans: Mapping[str, TransferPlan], source_ranks: Mapping[int, int], target_ranks: Mapping[int, int],
              rank: int, wire: Wire, bytes_per_peer: int) -> 'Schedule':
        """The schedule of ``rank`` for plans that hold at least the segments it takes part in.

        ``source_ranks`` and ``target_ranks`` give the rank that each location is bound to. Parameters are taken in the
        order of their names, so that processes that met them in different orders agree. Raises
        AffineTransferExecutionError when a location has no rank, when a segment is no box at both ends, or when the
        budget does not hold one element.
        """
        if bytes_per_peer < wire.itemsize:
            raise AffineTransferExecutionError(
                f'a budget of {bytes_per_peer} bytes per peer is less than one element of {wire.itemsize} bytes')
        depth = min(2, bytes_per_peer // wire.itemsize)
        message_numel = max(1, bytes_per_peer // depth // wire.itemsize)
        local, outgoing, incoming = _pairs_of(plans, source_ranks, target_ranks, rank)
        stay = [Chunk.of(*named) for named in local]
        sent, received = ({
            peer: [Chunk.of(*named) for named in pair]
            for peer, pair in side.items()
        } for side in (outgoing, incoming))
        return cls(local=tuple(stay),
                   sends={
                       peer: messages_of(chunks, wire, message_numel)
                       for peer, chunks in sent.items()
                   },
                   receives={
                       peer: messages_of(chunks, wire, message_numel)
                       for peer, chunks in received.items()
                   },
                   wire=wire,
                   depth=depth,
                   message_numel=message_numel,
                   segments=len(stay) + sum(len(chunks) for side in (sent, received) for chunks in side.values()),
                   source_extents=_extents(itertools.chain(stay, *sent.values()), 'source'),
                   target_extents=_extents(itertools.chain(stay, *received.values()), 'target'),
                   send_digests={
                       peer: PairDigest.of(rank, peer, pair)
                       for peer, pair in outgoing.items()
                   },
                   receive_digests={
                       peer: PairDigest.of(peer, rank, pair)
                       for peer, pair in incoming.items()
                   })

    def sharing_memory_with(self, peers: Container[int]) -> 'Schedule':
        """The same for a rank that shares memory with these peers, as they do with it: all chunks to and from them are
        packed, since none of them is spared a copy by travelling alone."""
        longest_numel = max(1, min(self.message_numel, MAX_SHARED_BYTES // self.wire.itemsize))

        def of(queues):
            return {
                peer:
                tuple(_pack((chunk for message in queue
                             for chunk in message.chunks), longest_numel)) if peer in peers else queue
                for peer, queue in queues.items()
            }

        return replace(self, sends=of(self.sends), receives=of(self.receives))

    def longest_bytes_to(self, peer: int) -> int:
        """The bytes of the longest message to a peer that this rank sends to."""
        return max(message.numel for message in self.sends[peer]) * self.wire.itemsize

    @property
    def sent_numel(self) -> int:
        return sum(message.numel for queue in self.sends.values() for message in queue)

    @property
    def received_numel(self) -> int:
        return sum(message.numel for queue in self.receives.values() for message in queue)

    @property
    def chunks(self) -> int:
        queues = (queue for side in (self.sends, self.receives) for queue in side.values())
        return len(self.local) + sum(len(message.chunks) for queue in queues for message in queue)


def _pairs_of(plans, source_ranks, target_ranks, rank):
    """This rank's segments by name: those that stay here, those for each peer, and those from each peer."""
    local: List[NamedSegment] = []
    outgoing: Dict[int, List[NamedSegment]] = {}
    incoming: Dict[int, List[NamedSegment]] = {}
    for name in sorted(plans):
        for segment in plans[name].segments:
            source = _rank_of(segment.source_rank, source_ranks, 'source', name)
            target = _rank_of(segment.target_rank, target_ranks, 'target', name)
            if rank not in (source, target):
                continue
            _check_box(name, segment)
            if segment.numel == 0:
                continue
            if source == target:
                local.append((name, segment))
            elif source == rank:
                outgoing.setdefault(target, []).append((name, segment))
            else:
                incoming.setdefault(source, []).append((name, segment))
    return local, outgoing, incoming


def _check_box(name: str, segment: TransferSegment) -> None:
    """Refuse a segment, made by hand, of tuples that zip would cut down to the shortest, or of a negative size."""
    shape, source_strides, target_strides = segment.shape, segment.source_strides, segment.target_strides
    if not len(shape) == len(source_strides) == len(target_strides) or min(shape, default=0) < 0:
        raise AffineTransferExecutionError(
            f'a segment{of_parameter(name)} from location {segment.source_rank} to location {segment.target_rank} has '
            f'shape {shape}, source strides {source_strides} and target strides {target_strides}, which must be of '
            'equal length, with sizes of 0 or more')


def _rank_of(location: int, ranks: Mapping[int, int], side: str, name: str) -> int:
    if location not in ranks:
        raise AffineTransferExecutionError(
            f'{side} location {location}{of_parameter(name)} is not bound to any rank by the endpoints')
    return ranks[location]


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a box is one run of elements in row-major order."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def of_parameter(name: str) -> str:
    """``' of <name>'`` for messages, or nothing for the one unnamed plan."""
    return f' of {name}' if name else ''


def _extents(chunks: Iterable[Chunk], side: str) -> Dict[ShardKey, int]:
    extents: Dict[ShardKey, int] = {}
    for chunk in chunks:
        box = getattr(chunk, side)
        if box.offset < 0 or min(box.strides, default=0) < 0:
            raise AffineTransferExecutionError(
                f'a segment{of_parameter(box.shard[0])} has a negative {side} offset or stride')
        end = box.offset + sum((size - 1) * stride for size, stride in zip(chunk.shape, box.strides)) + 1
        extents[box.shard] = max(extents.get(box.shard, 0), end)
    return extents


def messages_of(chunks: Iterable[Chunk], wire: Wire, message_numel: int) -> Tuple[Message, ...]:
    """The messages of one pair, of at most ``message_numel`` elements: the chunks that travel alone first, then the
    others, packed."""
    alone: List[Message] = []
    shared: List[Chunk] = []
    packed_numel = max(1, min(message_numel, MAX_PACKED_BYTES // wire.itemsize))
    for chunk in chunks:
        bare_ends = _bare_ends(chunk, wire)
        if bare_ends == 0:
            shared.append(chunk)
            continue
        longest_numel = message_numel if bare_ends == 2 else packed_numel
        for part in (part for message in _pack([chunk], longest_numel) for part in message.chunks):
            if part.numel * wire.itemsize >= ALONE_BYTES_BY_BARE_ENDS[bare_ends]:
                alone.append(Message((part, ), part.numel))
            else:
                shared.append(part)
    return (*alone, *_pack(shared, packed_numel))


def _bare_ends(chunk: Chunk, wire: Wire) -> int:
    """At how many ends the chunk is one run of elements of the shard, in the form in which they travel."""
    return ((wire.source_is_wire and is_contiguous(chunk.shape, chunk.source.strides)) +
            (wire.target_is_wire and is_contiguous(chunk.shape, chunk.target.strides)))


def _pack(chunks: Iterable[Chunk], message_numel: int) -> List[Message]:
    """Lay chunks back to back into messages of at most ``message_numel`` elements, cutting those that do not fit.

    A cut runs between rows of a chunk's outermost dimension, or inside a row when that exceeds a whole message.
    """
    messages: List[Message] = []
    taken: List[Chunk] = []
    room = message_numel
    waiting: Deque[Chunk] = deque(chunks)
    while waiting:
        chunk = waiting.popleft()
        row_numel = chunk.numel // chunk.shape[0] if chunk.shape else 1
        if chunk.numel <= room:
            taken.append(chunk)
            room -= chunk.numel
        elif row_numel <= room:
            fitting = room // row_numel
            waiting.extendleft((chunk.rows(fitting, chunk.shape[0]), chunk.rows(0, fitting)))
        elif row_numel > message_numel:
            waiting.extendleft((chunk.rows(1, chunk.shape[0]), chunk.rows(0, 1)))
        else:
            waiting.appendleft(chunk)
            messages.append(Message(tuple(taken), message_numel - room))
            taken, room = [], message_numel
    if taken:
        messages.append(Message(tuple(taken), message_numel - room))
    return messages
