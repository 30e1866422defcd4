# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a person writes who knows both layouts: a loop of convert, send, receive and unpack, in several variants.

They move the planner's segments, prepared once: every view of every buffer is at hand before the loop starts, and so
is its staging memory. Elements are converted while they are packed.
"""

import itertools
import math
from typing import Dict, Iterator, List, NamedTuple, Sequence, Tuple

import torch

from transfer_jobs import Participant
from transfer_methods import Message, Method, exchange, plans_of, processes_of, window

MIB = 1 << 20


class Box(NamedTuple):
    """A part of a segment: its shape, and its offset and strides in the source and in the target shard."""
    name: str
    shape: Tuple[int, ...]
    source: Tuple[int, Tuple[int, ...]]
    target: Tuple[int, Tuple[int, ...]]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def rows(self, begin: int, end: int) -> 'Box':
        """A part along the first dimension, which goes when the part is one row."""
        kept = 0 if end - begin > 1 else 1
        ends = ((offset + begin * strides[0], strides[kept:]) for offset, strides in (self.source, self.target))
        return Box(self.name, (end - begin, *self.shape[1:])[kept:], *ends)

    def cut(self, limit_numel: int) -> Iterator['Box']:
        if self.numel <= limit_numel:
            yield self
            return
        rows = max(1, limit_numel // (self.numel // self.shape[0]))
        for begin in range(0, self.shape[0], rows):
            yield from self.rows(begin, min(begin + rows, self.shape[0])).cut(limit_numel)


def boxes_of(participant: Participant, limit_numel: int) -> Dict[Tuple[int, int], List[Box]]:
    """The segments that concern this process, cut to so many elements, by the processes that they leave and reach."""
    boxes_by_pair: Dict[Tuple[int, int], List[Box]] = {}
    for name, plan in sorted(plans_of(participant).items()):
        for segment in plan.segments:
            box = Box(name, segment.shape, (segment.source_offset, segment.source_strides),
                      (segment.target_offset, segment.target_strides))
            boxes_by_pair.setdefault(processes_of(participant, segment), []).extend(box.cut(limit_numel))
    return dict(sorted(boxes_by_pair.items()))


def is_run(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a box is one run of elements."""
    return all(size == 1 or stride == math.prod(shape[dim + 1:])
               for dim, (size, stride) in enumerate(zip(shape, strides)))


class HandWritten(Method):
    """Segments are cut to ``bucket_bytes`` and packed into buckets of that size, ``in_flight`` of them at a time.

    A piece of ``straight_bytes`` or more that is one run of elements in the target travels alone, received where it
    belongs; where nothing is converted and it is one run in the source as well, it is sent from there.
    """
    bucket_bytes: int
    in_flight: int
    straight_bytes = math.inf

    def __init__(self, participant):
        super().__init__(participant)
        rank = participant.rank
        boxes_by_pair = boxes_of(participant, self._bucket_numel)
        self._local = [(window(participant.targets[box.name], box.shape,
                               *box.target), window(participant.sources[box.name], box.shape, *box.source))
                       for box in boxes_by_pair.pop((rank, rank), [])]
        self._sends = {
            target: self._messages(boxes, participant.sources, 'source')
            for (source, target), boxes in boxes_by_pair.items() if source == rank
        }
        self._receives = {
            source: self._messages(boxes, participant.targets, 'target')
            for (source, target), boxes in boxes_by_pair.items() if target == rank
        }

    def run(self):
        exchange(self.participant.group, self._sends, self._receives, self._local, self.in_flight)

    @property
    def _bucket_numel(self):
        return self.bucket_bytes // self.participant.job.dtype.itemsize

    def _messages(self, boxes: Sequence[Box], buffers, end: str) -> List[Message]:
        """The messages of one pair; its two processes make the same ones, but for what is in place."""
        dtype = self.participant.job.dtype
        groups = list(self._groups(boxes))
        slots = torch.empty((self.in_flight, max(sum(box.numel for box in group) for group in groups)), dtype=dtype)
        messages = []
        for group, slot in zip(groups, itertools.cycle(slots)):
            views = [window(buffers[box.name], box.shape, *getattr(box, end)) for box in group]
            if self._is_straight(group[0]) and views[0].is_contiguous() and views[0].dtype == dtype:
                messages.append(Message(views[0]))
                continue
            tensor = slot[:sum(view.numel() for view in views)]
            parts = tensor.split([view.numel() for view in views])
            messages.append(Message(tensor, [(part.view(view.shape), view) for part, view in zip(parts, views)]))
        return messages

    def _groups(self, boxes: Sequence[Box]) -> Iterator[List[Box]]:
        group, room = [], self._bucket_numel
        for box in boxes:
            if self._is_straight(box):
                yield [box]
                continue
            if box.numel > room:
                yield group
                group, room = [], self._bucket_numel
            group.append(box)
            room -= box.numel
        if group:
            yield group

    def _is_straight(self, box: Box) -> bool:
        is_long = box.numel * self.participant.job.dtype.itemsize >= self.straight_bytes
        return is_long and is_run(box.shape, box.target[1])


class PerSegment(HandWritten):
    """One message per segment, one at a time."""
    name = 'loop: a message per segment'
    bucket_bytes = 1 << 40
    in_flight = 1

    def _groups(self, boxes):
        return ([box] for box in boxes)


class Buckets(HandWritten):
    name = 'loop: buckets of 16 MiB'
    bucket_bytes = 16 * MIB
    in_flight = 1


class DoubleBuffered(HandWritten):
    name = 'loop: 2 buckets of 16 MiB'
    bucket_bytes = 16 * MIB
    in_flight = 2


class SmallDoubleBuffered(HandWritten):
    name = 'loop: 2 buckets of 2 MiB'
    bucket_bytes = 2 * MIB
    in_flight = 2


class Straight(HandWritten):
    name = 'loop: 2 buckets of 8 MiB, long runs in place'
    bucket_bytes = 8 * MIB
    in_flight = 2
    straight_bytes = MIB // 2


class DeepStraight(Straight):
    name = 'loop: 8 buckets of 8 MiB, long runs in place'
    in_flight = 8
    straight_bytes = MIB // 4


LOOPS = (PerSegment, Buckets, DoubleBuffered, SmallDoubleBuffered, Straight, DeepStraight)
