# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A transfer between four ranks, of which one will refuse or fail.

Ranks 0 and 1 hold 8 elements of each parameter; ranks 1 and 2 get 8 each, half from either. Rank 3 only takes part.
"""

import torch

from deepspeed.checkpoint.affine_transfer_executor import AffineTransferExecutor, StagingBudget, TransferEndpoints
from unit.checkpoint.transfer_cases import line_plan
from unit.checkpoint.transfer_groups import world

ENDPOINTS = TransferEndpoints({0: 0, 1: 1}, {0: 1, 1: 2})
SEGMENTS = ((0, 0, 0, 0, 4), (1, 0, 0, 4, 4), (0, 4, 1, 0, 4), (1, 4, 1, 4, 4))
EIGHTS = {0: 8, 1: 8}


def plan_of(*segments):
    return line_plan(*(segments or SEGMENTS), source_numels=EIGHTS, target_numels=EIGHTS)


def executor_of(group=None,
                plans=None,
                endpoints=ENDPOINTS,
                dtype=torch.float32,
                source_dtype=torch.float32,
                budget=1 << 20,
                max_active_peers=16,
                share_memory=True):
    return AffineTransferExecutor(plans or {'w': plan_of()},
                                  endpoints,
                                  dtype=dtype,
                                  source_dtype=source_dtype,
                                  budget=StagingBudget(budget, max_active_peers, share_memory),
                                  group=group or world())


def buffers_of(rank, base=0., names=('w', )):
    """Sources of values that begin at ``base``, and targets of an element that no transfer brings."""
    sources = {name: {rank: torch.arange(8.) + 10 * rank + base} if rank < 2 else {} for name in names}
    targets = {name: {rank - 1: torch.full((8, ), -1. - base)} if rank in (1, 2) else {} for name in names}
    return sources, targets


def assert_moved(rank, targets, base=0.):
    half = 4 * (rank - 1)
    expected = [base + 10 * source + half + index for source in (0, 1) for index in range(4)]
    assert all(by_location[rank - 1].tolist() == expected for by_location in targets.values() if by_location)


def assert_untouched(rank, side, buffers, base=0.):
    """Whether these sources, or targets, hold what ``buffers_of`` gave them."""
    made = buffers_of(rank, base, buffers.keys())[('source', 'target').index(side)]
    assert all(
        torch.equal(tensor, made[name][place]) for name, by_location in buffers.items()
        for place, tensor in by_location.items())
