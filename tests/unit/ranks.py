# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Run a function on several gloo ranks, each a process of its own, and bring back what they return.

The processes are forked from a server that has torch and deepspeed imported, so three ranks start in about
0.3 s where spawning them takes 4-5 s.
"""

import faulthandler
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta

DEFAULT_TIMEOUT_S = 90

_context = multiprocessing.get_context('forkserver')
# DeepSpeed's first optimizer imports the last two, and with them torch's compiler, for seconds per rank.
_context.set_forkserver_preload([
    'torch', 'torch.distributed.tensor.parallel', 'torch.distributed.fsdp', 'hypothesis', 'pytest', 'deepspeed',
    'torch._dynamo', 'deepspeed.runtime.zero.muon.muon_optimizer', 'deepspeed.checkpoint.affine_transfer_executor'
])


class RankFailure(AssertionError):
    """A rank raised, died or did not finish; the text holds every rank's traceback or exit code."""


def run_ranks(function, world_size, *args, timeout=DEFAULT_TIMEOUT_S, init_world=True, shares_memory=True):
    """Call ``function(rank, *args)`` on ``world_size`` processes and return the results in rank order.

    ``function`` must be importable (a module-level function) and its results picklable without tensors sharing
    memory. With ``init_world`` the default process group is a gloo world over all of them, with collectives that
    time out after ``timeout`` seconds; without, the processes only share the folder ``rank_folder()`` names.
    Without ``shares_memory`` transfers send all messages, as between hosts.
    Raises RankFailure when a rank raises, dies, or is not done after ``timeout`` seconds (it is killed then).
    """
    with tempfile.TemporaryDirectory() as folder:
        outcomes = _context.Queue()
        processes = [
            _context.Process(target=_rank_main,
                             args=(function, rank, world_size, args, folder, timeout, init_world, shares_memory,
                                   outcomes)) for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(processes, outcomes, timeout, folder)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def rank_folder():
    """The folder that the ranks of this ``run_ranks`` call share, for stores and files."""
    return os.environ['TEST_RANK_FOLDER']


def _rank_main(function, rank, world_size, args, folder, timeout, init_world, shares_memory, outcomes):
    import deepspeed
    import torch
    from deepspeed.checkpoint import affine_transfer_transport
    torch.set_num_threads(1)
    # DeepSpeed would compile an op for messages in shared memory first, for minutes, where it finds a compiler.
    deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
    if not shares_memory:
        affine_transfer_transport.host_identity = lambda: 0
    os.environ.update(TEST_RANK_FOLDER=folder,
                      RANK=str(rank),
                      LOCAL_RANK=str(rank),
                      WORLD_SIZE=str(world_size),
                      LOCAL_SIZE=str(world_size),
                      MASTER_ADDR='127.0.0.1')
    with open(_stack_file(folder, rank), 'w') as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        _report(function, rank, world_size, args, folder, timeout, init_world, outcomes)
    sys.stdout.flush()
    # Leave at once: tearing down a world whose peers already failed can wait for them.
    os._exit(0)


def _stack_file(folder, rank):
    return os.path.join(folder, f'stacks-{rank}')


def _report(function, rank, world_size, args, folder, timeout, init_world, outcomes):
    import torch.distributed as torch_dist
    try:
        if init_world:
            store = torch_dist.FileStore(os.path.join(folder, 'world'), world_size)
            torch_dist.init_process_group('gloo',
                                          store=store,
                                          rank=rank,
                                          world_size=world_size,
                                          timeout=timedelta(seconds=timeout))
        outcomes.put((rank, None, function(rank, *args)))
    except BaseException:
        outcomes.put((rank, traceback.format_exc(), None))
    outcomes.close()
    outcomes.join_thread()


def _collect(processes, outcomes, timeout, folder):
    deadline = time.monotonic() + timeout
    results, failures = {}, {}
    silent_since = {}
    while len(results) + len(failures) < len(processes):
        try:
            rank, error, result = outcomes.get(timeout=0.2)
        except queue.Empty:
            for rank, process in enumerate(processes):
                if rank in results or rank in failures:
                    continue
                if process.exitcode is not None:
                    # What it returned may still be on its way.
                    if time.monotonic() - silent_since.setdefault(rank, time.monotonic()) > 2:
                        failures[rank] = f'exited with code {process.exitcode}{_signal_name(process.exitcode)}'
                elif time.monotonic() > deadline:
                    failures[rank] = f'not done, killed in\n{_stacks(process, folder, rank)}'
            continue
        if error is None:
            results[rank] = result
        else:
            failures[rank] = error
            # The other ranks may now wait for this one: give them a moment to say so, not the whole timeout.
            deadline = min(deadline, time.monotonic() + 20)
    if failures:
        raise RankFailure('\n'.join(f'rank {rank}: {text}' for rank, text in sorted(failures.items())))
    return [results[rank] for rank in range(len(processes))]


def _stacks(process, folder, rank):
    """Where the threads of a rank are."""
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    with open(_stack_file(folder, rank)) as stacks:
        return stacks.read()


def _signal_name(exitcode):
    return f' ({signal.Signals(-exitcode).name})' if exitcode < 0 else ''
