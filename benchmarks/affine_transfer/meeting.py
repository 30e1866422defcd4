# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The processes of a job: how they start, and where they meet."""

import multiprocessing
import os
import queue
import tempfile
from datetime import timedelta
from typing import Any, Callable, Sequence

import torch
import torch.distributed as torch_dist
import torch.multiprocessing

TIMEOUT = timedelta(seconds=300)

# ZeRO imports its Muon late, and torch's compiler with it: each process would, for seconds.
PRELOADED = [
    'torch', 'deepspeed', 'deepspeed.runtime.zero.muon.muon_optimizer', 'torch.distributed.checkpoint',
    'deepspeed.checkpoint.affine_transfer_executor'
]


def run_processes(function: Callable, count: int, *arguments: Any) -> Any:
    """What ``function(meeting, *arguments)`` returns in process 0 of ``count`` processes.

    Each runs with one thread for tensor operations. Raises what ``torch.multiprocessing`` raises when one fails; the
    others are ended then.
    """
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(PRELOADED)
    returned = context.Queue()
    # In memory where that is possible, for the files of whoever moves weights through files.
    shared_memory = '/dev/shm' if os.path.isdir('/dev/shm') else None
    with tempfile.TemporaryDirectory(dir=shared_memory) as folder:
        processes = torch.multiprocessing.start_processes(_process_main,
                                                          (function, count, folder, returned, arguments),
                                                          nprocs=count,
                                                          join=False,
                                                          start_method='forkserver')
        # What process 0 returns must be taken before it can end.
        result = _first_result(processes, returned)
        while not processes.join():
            pass
    return result


def _first_result(processes, returned) -> Any:
    while True:
        try:
            return returned.get(timeout=0.2)
        except queue.Empty:
            if processes.join(timeout=0):
                raise RuntimeError('the processes ended without a result') from None


def _process_main(rank: int, function: Callable, count: int, folder: str, returned, arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    result = function(Meeting(folder, rank, count), *arguments)
    if rank == 0:
        returned.put(result)
        returned.close()
        returned.join_thread()


class Meeting:
    """Where the ``size`` processes of a job meet, this one being ``rank``.

    ``folder`` is one that all of them see. ``group`` is a gloo group over all of them that is no default world, as a
    group that joins trainers and rollout workers is none: each side has a world of its own.
    """

    def __init__(self, folder: str, rank: int, size: int):
        self.folder, self.rank, self.size = folder, rank, size
        self.store = torch_dist.FileStore(os.path.join(folder, 'store'), size)
        self.store.set_timeout(TIMEOUT)
        self.group = self.group_of(range(size))

    def group_of(self, ranks: Sequence[int]) -> torch_dist.ProcessGroupGloo:
        """A gloo group of these processes, in this order; called by each of them."""
        store = torch_dist.PrefixStore(f'group of {list(ranks)}', self.store)
        return torch_dist.ProcessGroupGloo(store, list(ranks).index(self.rank), len(ranks), TIMEOUT)

    def start_world(self, size: int) -> None:
        """Make the first ``size`` processes, which all call this, the default world of each of them."""
        # DeepSpeed reads these.
        os.environ.update(RANK=str(self.rank), LOCAL_RANK=str(self.rank), WORLD_SIZE=str(size))
        store = torch_dist.PrefixStore('world', self.store)
        torch_dist.init_process_group('gloo', store=store, rank=self.rank, world_size=size, timeout=TIMEOUT)

    def maximum(self, value: float) -> float:
        """The greatest of the values that all processes call this with."""
        return self._reduced(value, torch_dist.ReduceOp.MAX)

    def total(self, value: float) -> float:
        """The sum of the values that all processes call this with."""
        return self._reduced(value, torch_dist.ReduceOp.SUM)

    def _reduced(self, value: float, operation) -> float:
        values = torch.tensor([value], dtype=torch.float64)
        self.group.allreduce([values], operation).wait()
        return values.item()

    def barrier(self) -> None:
        self.group.barrier().wait()
