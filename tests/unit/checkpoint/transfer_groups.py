# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Groups of gloo ranks for the executor's tests, group objects that are watched or disturbed, and what is told."""

import functools
import itertools
import os
from datetime import timedelta

import pytest
import torch.distributed as torch_dist

from deepspeed.checkpoint.affine_transfer_executor import AffineTransferExecutionError
from deepspeed.checkpoint.affine_transfer_transport import _ROW_TAG
from unit.ranks import rank_folder, run_ranks

# Messages travel through the group even between ranks of one host, which would share memory.
run_sending_ranks = functools.partial(run_ranks, shares_memory=False)

# What an executor asks of a group object. Payload moves by the first two; in each exchange of status all other ranks
# tell the first one, and learn from it what all have told.
MESSAGES = ('send', 'recv')
TELLS, LEARNS = ('tell', ), ('broadcast', )


def world():
    return torch_dist.distributed_c10d._get_default_group()


def store(name, size):
    return torch_dist.FileStore(os.path.join(rank_folder(), name), size)


def gloo_outside_any_world(name, rank, size, timeout_s=30):
    return torch_dist.ProcessGroupGloo(store(name, size), rank, size, timedelta(seconds=timeout_s))


class WatchedGroup:
    """A group object that calls ``before(name, args)`` ahead of each call of one of its methods.

    Messages of an exchange of status have a name of their own.
    """

    def __init__(self, group, before):
        self._group, self._before = group, before

    def __getattr__(self, name):
        attribute = getattr(self._group, name)
        if not callable(attribute):
            return attribute

        def watched(*args):
            self._before(*(TELLS if args[2:] == (_ROW_TAG, ) else (name, )), args)
            return attribute(*args)

        return watched


def with_fault(group, names, number, fault):
    """The group, but for something else that its ``number``-th call, from 0 on, of one of these methods does first."""
    numbers = itertools.count()

    def before(name, _):
        if name in names and next(numbers) == number:
            fault()

    return WatchedGroup(group, before)


def text_of(call):
    """The text of the error that an executor's call must raise."""
    with pytest.raises(AffineTransferExecutionError) as caught:
        call()
    return str(caught.value)
