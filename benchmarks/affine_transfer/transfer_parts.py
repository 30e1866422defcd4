# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The part of a job that is left when nothing has to be sent: what the processes must copy themselves."""

import functools
import itertools
from typing import Iterable, Iterator, Tuple

import torch

from transfer_jobs import TRAINERS, differing_elements
from transfer_loops import boxes_of, is_run
from transfer_methods import Method, pattern, require_conversion, window


class ConvertAndUnpack(Method):
    """Trainers convert all of their masters, piece by piece, into two slots in turn. Targets copy, out of two slots in
    turn, what a message cannot be received into in place: the pieces that are no single run of elements there.

    What the trainers' slots hold in the end is compared, and all that targets were given.
    """
    name = 'convert and unpack'
    slot_bytes = 4 << 20

    @classmethod
    def prepare(cls, participant):
        require_conversion(participant.job)

    def __init__(self, participant):
        super().__init__(participant)
        dtype = participant.job.dtype
        numel = self.slot_bytes // dtype.itemsize
        self._slots = torch.full((2, numel), float('nan'), dtype=dtype)
        self._converted = list(self._cut(participant.sources.values(), self._slots))
        boxes = [
            box for (_, target), of_pair in boxes_of(participant, numel).items() for box in of_pair
            if target == participant.rank and not is_run(box.shape, box.target[1])
        ]
        filled = itertools.cycle(pattern(2 * numel, participant.rank, dtype).view(2, numel))
        self._unpacked = [(window(participant.targets[box.name], box.shape,
                                  *box.target), slot[:box.numel].view(box.shape)) for box, slot in zip(boxes, filled)]

    @staticmethod
    def _cut(masters: Iterable[torch.Tensor], slots: torch.Tensor) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
        """(part of a slot, piece of a master) pairs, in order."""
        turns = itertools.cycle(slots)
        for master in masters:
            for piece, slot in zip(master.split(slots.shape[1]), turns):
                yield slot[:piece.numel()], piece

    def run(self):
        for target, source in (*self._converted, *self._unpacked):
            target.copy_(source)

    def reset(self):
        super().reset()
        self._slots.fill_(float('nan'))

    def spoil(self):
        if self.participant.rank == TRAINERS - 1:
            self._slots[0, 0] += 1

    @functools.cached_property
    def _expected(self) -> torch.Tensor:
        job, trainer = self.participant.job, self.participant.source
        expected = torch.full_like(self._slots, float('nan'))
        for part, piece in self._cut((job.master(name, trainer) for name in self.participant.sources), expected):
            part.copy_(piece)
        return expected

    def wrong_elements(self):
        unpacked = sum(differing_elements(view, part) for view, part in self._unpacked)
        return differing_elements(self._slots, self._expected) + unpacked
