# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which of a rank's messages travel at the same time: one *window* after another, each handed over at once.

Pairs of ranks are ordered into *phases* by arithmetic that needs no plan of the whole job: sender s and receiver t are
``(t - s) mod size`` apart, and ``max_active_peers`` neighbouring distances make a phase. So within a phase no rank has
more than that many peers in either direction, and both ends of a pair know its phase. Window (phase, k) holds the k-th
message of every pair of the phase. All ranks go through their windows in the same order, so the first window that is
not done anywhere waits for nothing but itself.

Example: of 6 ranks with ``max_active_peers`` = 2, rank 0 sends to ranks 1 and 2 in phase 0, to 3 and 4 in phase 1 and
to 5 in phase 2; a rank that takes part in no message of a window has no such window.
"""

from typing import Dict, List, Mapping, NamedTuple, Sequence, Tuple

from .affine_transfer_schedule import Message, Schedule

__all__ = ['Travel', 'Window', 'windows_of']


class Travel(NamedTuple):
    """A message, its other end, and its place among the messages of its window and direction, from 0 on.

    The place is below the number of peers of the phase; a pair keeps it through all windows.
    """
    peer: int
    place: int
    message: Message


class Window(NamedTuple):
    """What one rank sends and receives in one window, at most one message per peer and direction.

    ``number`` is the same at both ends of a pair, and one more in the pair's next window.
    """
    sends: Sequence[Travel]
    receives: Sequence[Travel]
    number: int


def windows_of(schedule: Schedule, rank: int, size: int, max_active_peers: int) -> List[Window]:
    """All windows that ``rank`` of ``size`` ranks takes part in, in the order in which all ranks go through them."""
    windows: Dict[Tuple[int, int], Window] = {}
    _fill(windows, 'sends', schedule.sends, {peer: (peer - rank) % size for peer in schedule.sends}, max_active_peers)
    _fill(windows, 'receives', schedule.receives, {peer: (rank - peer) % size
                                                   for peer in schedule.receives}, max_active_peers)
    return [windows[key] for key in sorted(windows)]


def _fill(windows: Dict[Tuple[int, int], Window], side: str, queues: Mapping[int, Sequence[Message]],
          distances: Mapping[int, int], max_active_peers: int) -> None:
    places: Dict[int, int] = {}
    for peer in sorted(distances, key=distances.get):
        phase = (distances[peer] - 1) // max_active_peers
        place = places[phase] = places.get(phase, -1) + 1
        for number, message in enumerate(queues[peer]):
            window = windows.setdefault((phase, number), Window([], [], phase + number))
            getattr(window, side).append(Travel(peer, place, message))
