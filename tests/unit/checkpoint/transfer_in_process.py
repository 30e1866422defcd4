# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Transfers within one process: what they have in common, and what a refused one must leave as it was."""

import pytest
import torch

from deepspeed.checkpoint.affine import contiguous_split_map
from deepspeed.checkpoint.affine_transfer import plan_transfer
from deepspeed.checkpoint.affine_transfer_executor import (AffineTransferExecutionError, TransferEndpoints,
                                                           execute_transfer)
from unit.checkpoint.transfer_cases import line_plan

NAN = float('nan')
HERE = TransferEndpoints({place: 0 for place in range(4)}, {place: 0 for place in range(4)})
FOUR = line_plan((0, 0, 0, 0, 4), source_numels={0: 4}, target_numels={0: 4})
TWO_TO_TWO = line_plan((0, 0, 0, 0, 4), (1, 0, 1, 0, 4), source_numels={0: 4, 1: 4}, target_numels={0: 4, 1: 4})
SQUARES = plan_transfer(contiguous_split_map((4, 6), [3, 3], 1), contiguous_split_map((4, 6), [4], 0))


def execute(plan, sources, targets, dtype=torch.float32, endpoints=HERE):
    return execute_transfer(plan, sources, targets, endpoints, dtype)


def refuses(words, plan, sources, targets, **options):
    written = [target for target in targets.values() if isinstance(target, torch.Tensor) and target.is_cpu]
    before = [target.clone() for target in written]
    with pytest.raises(AffineTransferExecutionError, match=f'(?s)transfer refused before it began: rank 0: .*{words}'):
        execute(plan, sources, targets, **options)
    for old, new in zip(before, written):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
