# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where a program synchronizes, and running it with one of these places left out.

A *site* is the name of what was called and the source lines that led there, from the call outwards: ``('Event.record',
'file.py:12', 'file.py:80')``. Only frames whose file name contains the text that the observer asked for count, so a
helper that waits on behalf of two callers is two sites.
"""

import functools
import os
import sys
from contextlib import contextmanager
from typing import Dict, Iterator, Optional, Tuple

Site = Tuple[str, ...]


class _Observer:
    """Counts calls by their site, and swallows those of one site."""

    def __init__(self, within: str, omitted: Optional[Site]):
        self._within = within
        self._omitted = omitted
        self.calls: Dict[Site, int] = {}

    def swallows(self, name: str) -> bool:
        lines = []
        frame = sys._getframe(2)
        while frame is not None:
            if self._within in frame.f_code.co_filename:
                lines.append(f'{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}')
            frame = frame.f_back
        if not lines:
            return False
        site = (name, *lines)
        self.calls[site] = self.calls.get(site, 0) + 1
        return site == self._omitted


_observer: Optional[_Observer] = None


def synchronization(method):
    """A method whose calls are sites; it returns None when left out, and calls no other such method."""
    name = method.__qualname__

    @functools.wraps(method)
    def call(*args, **kwargs):
        if _observer is not None and _observer.swallows(name):
            return None
        return method(*args, **kwargs)

    return call


@contextmanager
def observed(within: str) -> Iterator[Dict[Site, int]]:
    """The number of calls by site in this context, counted as they are made."""
    with _observing(_Observer(within, None)) as observer:
        yield observer.calls


@contextmanager
def omitted(site: Site, within: str) -> Iterator[None]:
    """In this context, calls from one site do nothing."""
    with _observing(_Observer(within, site)):
        yield


@contextmanager
def _observing(observer: _Observer) -> Iterator[_Observer]:
    global _observer
    _observer = observer
    try:
        yield observer
    finally:
        _observer = None
