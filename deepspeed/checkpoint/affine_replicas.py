# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which location sends what several locations hold."""

from dataclasses import dataclass, field
from typing import Dict, Hashable, Mapping, NamedTuple, Tuple

import numpy as np

__all__ = ['ReplicaCandidate', 'ReplicaSelectionRequest', 'SpreadReplicas']


@dataclass(frozen=True)
class ReplicaCandidate:
    """A source rank that holds the elements asked for, and where in its shard."""
    source_rank: int
    source_offset: int
    source_strides: Tuple[int, ...]


@dataclass(frozen=True)
class ReplicaSelectionRequest:
    """Which of several holders should send this box of the parameter to this target rank."""
    target_rank: int
    logical_origin: Tuple[int, ...]
    shape: Tuple[int, ...]
    target_offset: int
    target_strides: Tuple[int, ...]
    candidates: Tuple[ReplicaCandidate, ...]


@dataclass(frozen=True)
class SpreadReplicas:
    """Let holders take turns, and prefer one in the target's own process, then one on its host.

    ``source_process`` and ``target_process`` give each location's process, any hashable id that means the same on
    both sides (a rank of the group that joins them); ``host_by_process`` gives each process's host. A location or
    process that is left out is near nobody. Among equally near holders of a box, the target pieces that want it take
    the next one each, and ``plan_model`` goes on with the next parameter where the last one stopped, so that over a
    model every holder sends about the same. All of it follows from the maps alone: every rank that plans with the
    same maps and policy, whole or in part, makes the same choice.

    A parameter that ranks 0 and 1 hold and targets 0, 1, 2 want comes from 0, 1, 0 and the next such parameter from
    1, 0, 1.
    """
    source_process: Mapping[int, Hashable] = field(default_factory=dict)
    target_process: Mapping[int, Hashable] = field(default_factory=dict)
    host_by_process: Mapping[Hashable, Hashable] = field(default_factory=dict)

    def nearness(self, source_ranks: np.ndarray, target_ranks: np.ndarray) -> np.ndarray:
        """Row by row 2 for the same process, 1 for the same host, 0 otherwise."""
        process_number: Dict[Hashable, int] = {}
        host_number: Dict[Hashable, int] = {}

        def numbered(ranks, process_of, nowhere):
            places, inverse = np.unique(ranks, return_inverse=True)
            rows = []
            for rank in places.tolist():
                process = process_of.get(rank)
                known = rank in process_of
                host = self.host_by_process.get(process) if known else None
                rows.append((process_number.setdefault(process, len(process_number)) if known else nowhere,
                             host_number.setdefault(host, len(host_number)) if host is not None else nowhere))
            return np.array(rows, dtype=np.int64).reshape(-1, 2)[inverse]

        same = numbered(source_ranks, self.source_process, -1) == numbered(target_ranks, self.target_process, -2)
        return np.where(same[:, 0], 2, same[:, 1].astype(np.int64))


class HolderRuns(NamedTuple):
    """For each of n boxes to copy, the source rows that may send it: ``rows[first[i]:first[i] + count[i]]``."""
    rows: np.ndarray
    first: np.ndarray
    count: np.ndarray

    def in_turn(self, turn: np.ndarray) -> np.ndarray:
        """The row whose turn it is for each box."""
        return self.rows[self.first + turn % self.count]

    def nearest(self, policy: SpreadReplicas, rank_of_row: np.ndarray, target_ranks: np.ndarray) -> 'HolderRuns':
        """Only the holders that are nearest to each box's target."""
        if not policy.source_process or not policy.target_process or not len(self.first):
            return self
        box = np.repeat(np.arange(len(self.first)), self.count)
        begin = np.cumsum(self.count) - self.count
        rows = self.rows[self.first[box] + np.arange(box.size) - begin[box]]
        nearness = policy.nearness(rank_of_row[rows], target_ranks[box])
        kept = nearness == np.maximum.reduceat(nearness, begin)[box]
        count = np.bincount(box[kept], minlength=len(self.first))
        return HolderRuns(rows[kept], np.cumsum(count) - count, count)
