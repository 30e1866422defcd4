# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One run of a program on the simulated accelerator."""

import itertools
from typing import Dict

from . import memory
from .host_accesses import HostAccesses
from .hosts import Host, become
from .races import Ledger
from .scheduler import Scheduler
from .streams import Stream


class DeviceRace(AssertionError):
    """Accesses to the same bytes, one of them a write, that nothing orders."""


class Simulation:
    """The accelerators of ``size`` ranks, whose work runs in an order that the seed decides.

    As a context manager, it makes the calling thread its only rank, and raises DeviceRace at its end when there was
    one (with ``finds_races``). ``run_ranks`` runs several ranks.
    """

    def __init__(self, seed: int, size: int = 1, finds_races: bool = True):
        self.seed = seed
        self.scheduler = Scheduler(seed)
        self.ledger = Ledger()
        # Messages in host memory that nobody has waited for yet.
        self.unawaited: Dict[object, str] = {}
        self.device_memory = memory.DeviceMemory()
        self._finds_races = finds_races
        self._stream_ids = itertools.count()
        self._stream_by_id: Dict[int, Stream] = {}
        self.hosts = [Host(self, rank) for rank in range(size)]
        self.scheduler.hosts = self.hosts
        for host in self.hosts:
            become(host)
            host.default_stream = host.stream = Stream()
        become(None)
        self._accesses = HostAccesses()

    def enter(self) -> None:
        """Called where the program calls the accelerator or the transport: others may go on before it does."""
        self.scheduler.advance()

    def new_stream_id(self) -> int:
        return next(self._stream_ids)

    def add_stream(self, stream: Stream) -> None:
        self._stream_by_id[stream.stream_id] = stream
        self.scheduler.add(stream)

    def stream(self, stream_id: int) -> Stream:
        return self._stream_by_id[stream_id]

    def close(self) -> None:
        """No tensor of this simulation can be used any more."""
        self.device_memory.is_open = False

    def check_races(self) -> None:
        """Raise DeviceRace when there was a race."""
        if self.ledger.races and self._finds_races:
            raise DeviceRace(f'seed {self.seed}: {len(self.ledger.races)} races, the first of them:\n' +
                             '\n'.join(self.ledger.races[:5]))

    def finish(self) -> None:
        """Run what is still queued; a message that nobody has waited for counts as a race."""
        self.scheduler.drain()
        self.ledger.races += [f'{text} was never waited for' for text in self.unawaited.values()]

    def __enter__(self):
        become(self.hosts[0])
        self._accesses.__enter__()
        return self

    def __exit__(self, error_type, error, traceback):
        self._accesses.__exit__(error_type, error, traceback)
        if error is None:
            self.finish()
        self.close()
        become(None)
        self.check_races()
