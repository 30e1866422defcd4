# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Who touched which bytes when: races found from what is ordered before what, whatever the bytes hold.

Every host thread, stream and link between two ranks is an *actor* with a clock of its own. A clock maps actors to
times: what an actor has seen of the others. Two accesses to one byte, at least one of them a write, race when the
later one's clock has not seen the earlier one's time. So a missing wait shows on the first run, even in a schedule
in which the bytes happened to be right.
"""

from functools import lru_cache
from typing import Dict, List, NamedTuple, Optional, Tuple

import numpy

Clock = Dict[object, int]


def join(clock: Clock, other: Clock) -> None:
    """Let ``clock`` see all that ``other`` has seen."""
    for actor, time in other.items():
        if clock.get(actor, 0) < time:
            clock[actor] = time


class Region(NamedTuple):
    """Bytes of one block of memory: from ``start`` up to ``stop``, all of them or only those of a strided view."""
    start: int
    stop: int
    shape: Optional[Tuple[int, ...]] = None
    byte_strides: Optional[Tuple[int, ...]] = None

    @classmethod
    def of(cls, tensor, start: int) -> 'Region':
        """The bytes of a tensor with elements, whose first byte is the block's byte ``start``."""
        itemsize = tensor.element_size()
        if tensor.is_contiguous():
            return cls(start, start + tensor.numel() * itemsize)
        shape, strides = tuple(tensor.shape) + (itemsize, ), tuple(tensor.stride())
        byte_strides = tuple(stride * itemsize for stride in strides) + (1, )
        stop = start + sum((size - 1) * stride for size, stride in zip(shape, byte_strides)) + 1
        return cls(start, stop, shape, byte_strides)

    def meets(self, other: 'Region') -> bool:
        if self.stop <= other.start or other.stop <= self.start:
            return False
        if self.shape is None and other.shape is None:
            return True
        return _strided_meet(self, other)


@lru_cache(maxsize=1 << 16)
def _strided_meet(one: Region, other: Region) -> bool:
    first = min(one.start, other.start)
    touched = numpy.zeros((2, max(one.stop, other.stop) - first), dtype=bool)
    for row, region in zip(touched, (one, other)):
        cells = row[region.start - first:region.stop - first]
        if region.shape is not None:
            cells = numpy.lib.stride_tricks.as_strided(cells, region.shape, region.byte_strides)
        cells[...] = True
    return bool((touched[0] & touched[1]).any())


class Access:
    """One operation's reading or writing of a region, at the time ``time`` of ``actor``."""
    __slots__ = ('region', 'is_write', 'actor', 'time', 'is_done', 'text')

    def __init__(self, region: Region, is_write: bool, actor: object, time: int, is_done: bool, text):
        self.region = region
        self.is_write = is_write
        self.actor = actor
        self.time = time
        self.is_done = is_done
        self.text = text

    def __str__(self):
        return f'{"write" if self.is_write else "read"} by {self.text} on {self.actor}'


class Ledger:
    """The accesses to each block of memory that some actor may not have seen yet, and the races among them."""

    def __init__(self):
        self.races: List[str] = []
        self._accesses: Dict[object, List[Access]] = {}

    def add(self, block: object, access: Access) -> None:
        self._accesses.setdefault(block, []).append(access)

    def check(self, block: object, access: Access, clock: Clock, pending_too: bool = False) -> None:
        """Report the accesses that race with this one.

        Operations that are still queued will find the race themselves once they run, when their clocks are known; the
        host, whose accesses are not kept, looks at them as well (``pending_too``).
        """
        for old in self._accesses.get(block, ()):
            if ((old.is_write or access.is_write) and (old.is_done or pending_too) and old is not access
                    and old.time > clock.get(old.actor, 0) and old.region.meets(access.region)):
                self.races.append(f'{access} and {old} are not ordered, bytes {access.region.start} to '
                                  f'{access.region.stop} and {old.region.start} to {old.region.stop} of one block')

    @property
    def is_busy(self) -> bool:
        return bool(self._accesses)

    def knows(self, block: object) -> bool:
        return block in self._accesses

    def forget(self, block: object) -> None:
        self._accesses.pop(block, None)

    def forget_seen(self, rank: int, clock: Clock) -> None:
        """Drop the accesses of a rank that its host has seen; right only while nothing of that rank is queued."""
        for block in [block for block in self._accesses if block[0] == rank]:
            rest = [old for old in self._accesses[block] if old.time > clock.get(old.actor, 0)]
            if rest:
                self._accesses[block] = rest
            else:
                del self._accesses[block]
