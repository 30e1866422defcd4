# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The process groups of the job: a default world per side, and a third group over both that carries the transfer.

Trainers and rollout workers are two programs. Each has a default world of its own, because what runs there takes the
whole default world for itself: ZeRO-3's set-up, for one, runs a barrier over it. The transfer group is therefore
made outside both, from a store and ranks of its own: trainer t has rank t there, rollout worker r has rank
trainers + r.
"""

import os
from datetime import timedelta

import torch.distributed as torch_dist

TIMEOUT = timedelta(seconds=120)


class Meeting:
    """Where the processes of a job find one another: a store in a folder that all of them see.

    ``store`` is a torch.distributed store; besides the groups' own, its keys serve messages between the sides.
    """

    def __init__(self, folder, trainers, rollouts):
        self.trainers = trainers
        self.rollouts = rollouts
        self.store = torch_dist.FileStore(os.path.join(folder, 'store'), trainers + rollouts)
        self.store.set_timeout(TIMEOUT)

    @property
    def rollout_ranks(self):
        """The rollout workers' ranks in the transfer group."""
        return range(self.trainers, self.trainers + self.rollouts)

    def start_world(self, side, rank, size):
        """Make the calling process ``rank`` of the default gloo world of ``side``."""
        # DeepSpeed reads these.
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
        store = torch_dist.PrefixStore(f'world of {side}', self.store)
        torch_dist.init_process_group('gloo', store=store, rank=rank, world_size=size, timeout=TIMEOUT)

    def join_transfer_group(self, rank):
        """The gloo group over both sides, in which the caller has ``rank``; every process of the job calls this."""
        store = torch_dist.PrefixStore('transfer', self.store)
        return torch_dist.ProcessGroupGloo(store, rank, self.trainers + self.rollouts, TIMEOUT)
