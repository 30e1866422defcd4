# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ranks as threads of one process, of which only one runs at a time."""

import threading
import traceback
from typing import Callable, FrozenSet, List, Optional

from .host_accesses import HostAccesses
from .hosts import become
from .scheduler import Deadlock
from .simulation import Simulation
from .transport import SimulatedTransport, transports

_TIMEOUT_S = 120


class RankFailure(AssertionError):
    """A rank raised. The text has the seed and the ranks' tracebacks; the cause is the first error."""


def run_ranks(body: Callable[[SimulatedTransport], object],
              size: int,
              seed: int,
              memory: FrozenSet[str] = frozenset(('host', )),
              max_operations: int = 64,
              finds_races: bool = True,
              is_new: bool = False) -> List:
    """Call ``body(transport)`` on a thread per rank and return the results in rank order.

    ``memory``, ``max_operations`` and ``is_new`` are those of ``transports``; ``transport.rank`` is the thread's rank.
    Raises RankFailure when a rank raises, Deadlock when all ranks waited for one another (even if the program caught
    it), and DeviceRace when nothing orders two accesses (with ``finds_races``).
    """
    simulation = Simulation(seed, size, finds_races)
    ranks = [
        _Rank(simulation, transport, body) for transport in transports(simulation, memory, max_operations, is_new)
    ]
    for rank in ranks:
        rank.thread.start()
    simulation.scheduler.start()
    for rank in ranks:
        rank.thread.join(_TIMEOUT_S)
        if rank.thread.is_alive():
            raise TimeoutError(f'seed {seed}: {rank.thread.name} has not come to an end in {_TIMEOUT_S} s')
    return _outcome(simulation, ranks)


class _Rank:

    def __init__(self, simulation: Simulation, transport: SimulatedTransport, body: Callable):
        self.result = None
        self.error: Optional[BaseException] = None
        self.text = ''
        self.thread = threading.Thread(target=self._run, daemon=True, name=f'rank {transport.rank}')
        self._host = simulation.hosts[transport.rank]
        self._call = lambda: body(transport)
        self._host.baton.acquire()

    def _run(self) -> None:
        self._host.baton.acquire()
        become(self._host)
        try:
            with HostAccesses():
                self.result = self._call()
        except BaseException as error:
            self.error = error
            self.text = f'{self.thread.name}:\n{traceback.format_exc()}'
        self._host.simulation.scheduler.finish(self._host)


def _outcome(simulation: Simulation, ranks: List[_Rank]) -> List:
    failed = [rank for rank in ranks if rank.error is not None]
    if not failed:
        simulation.finish()
    simulation.close()
    simulation.check_races()
    first = next((rank.error for rank in failed if not isinstance(rank.error, Deadlock)), None)
    if first is not None:
        texts = '\n'.join(rank.text for rank in failed)
        raise RankFailure(f'seed {simulation.seed} ({simulation.scheduler.mode}):\n{texts}') from first
    simulation.scheduler.check_deadlock()
    return [rank.result for rank in ranks]
