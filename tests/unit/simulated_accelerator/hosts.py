# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The host side of each rank, and which rank the calling thread is."""

import functools
import os
import sys
import threading
from dataclasses import dataclass
from typing import Callable, List, Optional, Sequence

from .races import Clock, join

_thread = threading.local()
_HERE = os.path.dirname(__file__)


@dataclass
class Usage:
    """Memory of one kind that one rank holds, as allocations asked for it."""
    live_bytes: int = 0
    peak_bytes: int = 0
    allocations: int = 0

    def take(self, nbytes: int) -> None:
        self.allocations += 1
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def give_back(self, nbytes: int) -> None:
        self.live_bytes -= nbytes

    def reset(self) -> None:
        """Count from here: no allocations, and a peak of what lives now."""
        self.allocations = 0
        self.peak_bytes = self.live_bytes


class Host:
    """One rank's host thread: its current stream, what it has seen of other actors, and what it waits for."""

    def __init__(self, simulation, rank: int):
        self.simulation = simulation
        self.rank = rank
        self.device_usage = Usage()
        self.pinned_usage = Usage()
        self.streams: List = []
        self.default_stream = None
        self.stream = None
        # Replaced, never changed: queued entries keep it as it was.
        self.clock: Clock = {}
        self.baton = threading.Lock()
        self.is_running = True
        self.waits_for: Optional[str] = None
        self.seen_changes = -1

    def __repr__(self):
        return f'host of rank {self.rank}'

    def see(self, clock: Clock) -> None:
        """What the host does from here on comes after what ``clock`` has seen."""
        merged = dict(self.clock)
        join(merged, clock)
        self.clock = merged

    def wait_until(self, condition: Callable[[], bool], runners: Sequence, text: str) -> None:
        self.simulation.scheduler.wait_until(self, condition, runners, f'{text} at {caller()}')

    def wait_for_mark(self, mark, text: str) -> None:
        self.wait_until(lambda: mark.is_done, (mark.stream, ), text)
        self.catch_up(mark.clock)

    def catch_up(self, clock: Clock) -> None:
        """See what the host has waited for."""
        self.see(clock)
        if not any(stream.queue for stream in self.streams):
            self.simulation.ledger.forget_seen(self.rank, self.clock)


def here() -> Host:
    """The host of the calling thread's rank. RuntimeError outside a simulation."""
    host = getattr(_thread, 'host', None)
    if host is None:
        raise RuntimeError('the simulated accelerator was used outside a simulation: run the code in run_ranks, or in '
                           '"with Simulation(seed):"')
    return host


def become(host: Optional[Host]) -> None:
    """From here on, the calling thread is this host."""
    _thread.host = host


def caller() -> str:
    """'file.py:12' of the nearest frame outside torch and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return f'{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}'


@functools.lru_cache(maxsize=None)
def _is_machinery(filename: str) -> bool:
    if os.path.dirname(filename) == _HERE:
        return not os.path.basename(filename).startswith('test_')
    return '/torch/' in filename or filename.endswith('contextlib.py')
