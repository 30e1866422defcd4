# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Streams whose work runs late, and events.

A stream is a queue of entries that run in order, each when the scheduler says so: work on bytes, marks (what an event
records) and waits for marks of other streams. Enqueueing returns at once.
"""

from collections import deque
from typing import Callable, Deque, List, NamedTuple, Optional, Sequence, Tuple

import torch

from .hosts import Host, here
from .races import Access, Clock, Region, join
from .synchronizations import synchronization

_PRIVATE_USE_DEVICE_TYPE = 20
_PYTHON_KEYS = (torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
                | torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot))
Touch = Tuple[object, Region, bool]


def unobserved():
    """The context for moving bytes: what happens in it is not an access of the host."""
    return torch._C._ExcludeDispatchKeyGuard(_PYTHON_KEYS)


class Entry:
    """Something in a stream's queue."""
    text = ''

    def is_ready(self) -> bool:
        return True

    def blockers(self) -> Sequence:
        """The streams or links that must go on before this entry can run."""
        return ()

    def run(self, stream: 'Stream') -> None:
        raise NotImplementedError


class Mark(Entry):
    """A place in a stream; what an event records."""
    text = 'record'

    def __init__(self, stream: 'Stream'):
        self.stream = stream
        self.is_done = False
        self.clock: Clock = {}

    def run(self, stream):
        self.is_done = True
        self.clock = dict(stream.clock)


class Wait(Entry):

    def __init__(self, mark: Mark):
        self._mark = mark

    @property
    def text(self):
        return f'wait for {self._mark.stream}'

    def is_ready(self):
        return self._mark.is_done

    def blockers(self):
        return (self._mark.stream, )

    def run(self, stream):
        join(stream.clock, self._mark.clock)


class Work(Entry):
    """A function that touches bytes: ``touches`` says which, as (block, region, whether it is written)."""

    def __init__(self, function: Callable[[], object], touches: Sequence[Touch], text: str):
        self.text = text
        self._function = function
        self._touches = touches
        self._accesses: List[Tuple[object, Access]] = []

    def register(self, stream: 'Stream', time: int) -> None:
        """Let the host's own accesses be checked against this work, from now on."""
        self._accesses = [(block, Access(region, is_write, stream, time, False, self.text))
                          for block, region, is_write in self._touches]
        for block, access in self._accesses:
            stream.host.simulation.ledger.add(block, access)

    def run(self, stream):
        for place in range(len(self._touches)):
            self._touch(stream, place, stream.clock)
        # Targets may be inference tensors, whichever thread gets to move the bytes.
        with unobserved(), torch._C._InferenceMode(True):
            self._function()

    def _touch(self, stream: 'Stream', place: int, clock: Clock) -> None:
        """Do the access of this place among the touches, after all that ``clock`` has seen."""
        block, access = self._accesses[place]
        stream.host.simulation.ledger.check(block, access, clock)
        access.is_done = True


class _Queued(NamedTuple):
    """An entry, what its host had seen when it was enqueued, and its number in the stream."""
    entry: Entry
    host_clock: Clock
    time: int


class Stream(torch.Stream):
    """A stream of the calling rank."""

    def __new__(cls, device=None, priority=0):
        return torch.Stream.__new__(cls,
                                    stream_id=here().simulation.new_stream_id(),
                                    device_index=0,
                                    device_type=_PRIVATE_USE_DEVICE_TYPE)

    def __init__(self, device=None, priority=0):
        self.host: Host = here()
        self.queue: Deque[_Queued] = deque()
        self.clock: Clock = {}
        self._joined: Optional[Clock] = None
        self._enqueued = 0
        self.host.streams.append(self)
        self.host.simulation.add_stream(self)

    def __repr__(self):
        return f'stream {self.stream_id} of rank {self.host.rank}'

    __str__ = __repr__

    def push(self, entry: Entry) -> int:
        """Enqueue an entry, and return its number in this stream."""
        self._enqueued += 1
        self.queue.append(_Queued(entry, self.host.clock, self._enqueued))
        self.host.simulation.scheduler.wake(self)
        return self._enqueued

    def enqueue_work(self, function: Callable[[], object], touches: Sequence[Touch], text: str) -> None:
        work = Work(function, touches, text)
        work.register(self, self.push(work))

    def mark(self) -> Mark:
        mark = Mark(self)
        self.push(mark)
        return mark

    def is_ready(self) -> bool:
        return bool(self.queue) and self.queue[0].entry.is_ready()

    def blockers(self) -> Sequence:
        return self.queue[0].entry.blockers() if self.queue else ()

    def reach(self) -> None:
        """Bring the clock to where the first entry begins."""
        queued = self.queue[0]
        if queued.host_clock is not self._joined:
            join(self.clock, queued.host_clock)
            self._joined = queued.host_clock
        self.clock[self] = queued.time

    def step(self) -> None:
        """Run the first entry, which must be ready."""
        self.reach()
        self.queue[0].entry.run(self)
        self.queue.popleft()
        scheduler = self.host.simulation.scheduler
        scheduler.changes += 1
        if not self.queue:
            scheduler.rest(self)

    def describe(self) -> str:
        return f'{self}: {", ".join(queued.entry.text for queued in self.queue)}' if self.queue else ''

    # What torch's streams offer.

    def record_event(self, event: Optional['Event'] = None) -> 'Event':
        event = event or Event()
        event.record(self)
        return event

    @synchronization
    def wait_event(self, event: 'Event') -> None:
        here().simulation.enter()
        if event.mark is not None:
            self.push(Wait(event.mark))

    @synchronization
    def wait_stream(self, stream: 'Stream') -> None:
        here().simulation.enter()
        self.push(Wait(stream.mark()))

    @synchronization
    def synchronize(self) -> None:
        here().simulation.enter()
        here().wait_for_mark(self.mark(), f'synchronize {self}')

    def query(self) -> bool:
        here().simulation.enter()
        if self.queue:
            here().simulation.scheduler.poll(here(), self)
            return False
        here().catch_up(self.clock)
        return True


class Event:
    """An event. Recording it again forgets the record before; before the first, waiting for it waits for nothing."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.mark: Optional[Mark] = None

    @synchronization
    def record(self, stream: Optional[Stream] = None) -> None:
        here().simulation.enter()
        self.mark = (stream or here().stream).mark()

    def wait(self, stream: Optional[Stream] = None) -> None:
        (stream or here().stream).wait_event(self)

    @synchronization
    def synchronize(self) -> None:
        here().simulation.enter()
        if self.mark is not None:
            here().wait_for_mark(self.mark, f'synchronize an event of {self.mark.stream}')

    def query(self) -> bool:
        here().simulation.enter()
        if self.mark is None:
            return True
        if not self.mark.is_done:
            here().simulation.scheduler.poll(here(), self.mark.stream)
            return False
        here().catch_up(self.mark.clock)
        return True
