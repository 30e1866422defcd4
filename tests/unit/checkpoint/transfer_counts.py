# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Counters of what later executes must not do: make tensors, plan, and exchange objects."""

import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import wraps
from unittest import mock

import torch
import torch.distributed as torch_dist
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.checkpoint.affine_transfer_buffers import readdress
from deepspeed.checkpoint.affine_transfer_schedule import Schedule
from deepspeed.checkpoint.affine_transfer_staging import lay_out
from deepspeed.checkpoint.affine_transfer_windows import windows_of

PLANNING = ('build', 'windows_of', 'lay_out', 'readdress')
OBJECT_COLLECTIVES = ('all_gather_object', 'gather_object', 'broadcast_object_list', 'scatter_object_list',
                      'send_object_list', 'recv_object_list')


class AllocatingCalls(TorchDispatchMode):
    """Names of the operators that made a tensor with storage of its own."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.names.append(str(func))
        return result


@contextmanager
def planning_calls():
    """Counts by name the calls of what plans a transfer and of all object collectives, by whatever module they are
    made."""
    calls = Counter()

    def counted(name, function):

        @wraps(function)
        def counting(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return counting

    functions = [windows_of, lay_out, readdress, *(getattr(torch_dist, name) for name in OBJECT_COLLECTIVES)]
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(Schedule, 'build', counted('build', Schedule.build)))
        for module in [
                module for name, module in sys.modules.items() if name.startswith(('deepspeed', 'torch.distributed'))
        ]:
            for name, value in list(vars(module).items()):
                if any(value is function for function in functions):
                    patches.enter_context(mock.patch.object(module, name, counted(value.__name__, value)))
        yield calls
