# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What runs next: which stream goes on, and which rank's thread holds the baton.

Ranks are threads of which only the one with the baton runs. It may change hands, and streams may go on, whenever the
program calls the accelerator or the transport; a generator seeded by the test decides, so a seed always gives the same
run. The seed also picks a mode:

    rush    half of the streams run at once, the others only when somebody waits for them; every second seed
    lazy    streams run only when somebody waits for them
    random  any stream, any number of steps
    starve  as random, but some streams run only when somebody waits for them
    eager   everything runs at once
"""

import random
from typing import Callable, Dict, List, Sequence, Set

from .hosts import Host, here

MODES = ('lazy', 'random', 'starve', 'eager')


class Deadlock(RuntimeError):
    """Every rank waits, and nothing that is queued can run."""


def mode_of(seed: int) -> str:
    return 'rush' if seed % 2 == 0 else MODES[seed // 2 % len(MODES)]


class Scheduler:

    def __init__(self, seed: int):
        self.mode = mode_of(seed)
        self.hosts: List[Host] = []
        self.changes = 0
        self._random = random.Random(seed)
        self._switching = self._random.choice((0.02, 0.1, 0.3))
        # What can be stepped: streams, and links between ranks.
        self._runners: List = []
        self._at_will: Set = set()
        # Those at will that have something queued, in the order in which they got it.
        self._busy: Dict = {}
        self._deadlock = ''

    def add(self, runner) -> None:
        self._runners.append(runner)
        if self._runs_at_will():
            self._at_will.add(runner)

    def wake(self, runner) -> None:
        """The runner has something queued; called again and again."""
        self.changes += 1
        if runner in self._at_will:
            self._busy[runner] = None

    def rest(self, runner) -> None:
        """The runner has nothing queued any more."""
        self._busy.pop(runner, None)

    def _runs_at_will(self) -> bool:
        """Whether the next runner goes on when nobody waits for it."""
        if self.mode == 'rush':
            return self._random.random() < 0.5
        if self.mode == 'starve':
            return self._random.random() < 0.7
        return self.mode != 'lazy'

    def advance(self) -> None:
        """What may happen when the program calls the accelerator: streams go on, another rank gets the baton."""
        if self._busy:
            if self.mode in ('rush', 'eager'):
                self._run_all()
            else:
                self._run_some(self._random.choice((0, 0, 1, 1, 2, 4)))
        if len(self.hosts) > 1 and self._random.random() < self._switching:
            self._switch(here())

    def _run_all(self) -> None:
        ready = True
        while ready:
            ready = [runner for runner in self._busy if runner.is_ready()]
            for runner in ready:
                while runner.is_ready():
                    runner.step()

    def _run_some(self, steps: int) -> bool:
        """Make up to so many steps; whether there was any to make."""
        for step in range(steps):
            ready = [runner for runner in self._busy if runner.is_ready()]
            if not ready:
                return step > 0
            self._random.choice(ready).step()
        return steps > 0

    def wait_until(self, host: Host, condition: Callable[[], bool], runners: Sequence, text: str) -> None:
        """Let others go on until the condition holds: first what ``runners`` need, then other ranks.

        Raises Deadlock when nothing can.
        """
        while not condition():
            if self.mode == 'random' and self._run_some(self._random.choice((0, 1, 2))):
                continue
            if any(self._pull(runner, set()) for runner in runners):
                continue
            host.waits_for = text
            host.seen_changes = self.changes
            if not self._switch(host):
                self._deadlock = self._deadlock or self._report()
            self.check_deadlock()
            host.waits_for = None

    def poll(self, host: Host, runner) -> None:
        """Sometimes bring ``runner`` forward, so that a program that polls comes to an end in every mode."""
        if self._random.random() < 0.2 and not self._pull(runner, set()):
            self._switch(host)

    def drain(self) -> None:
        """Run whatever is still queued and can run."""
        while any(self._pull(runner, set()) for runner in self._runners):
            pass

    def _pull(self, runner, seen: set) -> bool:
        """Make one step that brings ``runner`` forward; False when there is none."""
        if runner in seen:
            return False
        seen.add(runner)
        if runner.is_ready():
            runner.step()
            return True
        return any(self._pull(blocker, seen) for blocker in runner.blockers())

    def _can_go_on(self, host: Host) -> bool:
        """Whether a rank runs, or something has happened since it found that it must wait."""
        return host.is_running and (host.waits_for is None or host.seen_changes != self.changes
                                    or bool(self._deadlock))

    def _switch(self, host: Host) -> bool:
        """Let another rank go on, and return when this one gets the baton again; False when no other one can."""
        others = [other for other in self.hosts if other is not host and self._can_go_on(other)]
        if others:
            self._random.choice(others).baton.release()
            host.baton.acquire()
        return bool(others)

    def finish(self, host: Host) -> None:
        """Called by a rank's thread when it is done: another one goes on."""
        self.changes += 1
        host.is_running = False
        others = [other for other in self.hosts if other.is_running]
        if others:
            self._random.choice(others).baton.release()

    def start(self) -> None:
        """Give the baton to one of the ranks' threads, which all wait for it."""
        self._random.choice(self.hosts).baton.release()

    def check_deadlock(self) -> None:
        """Raise Deadlock when there was one, whatever the program made of it."""
        if self._deadlock:
            raise Deadlock(self._deadlock)

    def _report(self) -> str:
        lines = ['nothing can go on:']
        for host in self.hosts:
            lines.append(f'{host} {f"waits to {host.waits_for}" if host.is_running else "has finished"}')
        return '\n'.join(lines + [f'  {runner.describe()}' for runner in self._runners if runner.describe()])
