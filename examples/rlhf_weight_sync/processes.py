# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Start the processes of a job, pass on what they report, and end all of them as soon as one fails."""

import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from multiprocessing import forkserver
from typing import Any, Callable, Tuple

# How long to listen on after the first failure: the process that died first need not be the first one heard of.
GRACE_S = 2.0

_context = multiprocessing.get_context('forkserver')
# The server imports once what the workers would import each. ZeRO imports its Muon late, and torch's compiler with it.
_context.set_forkserver_preload([
    'deepspeed', 'deepspeed.checkpoint.affine_transfer_executor', 'deepspeed.runtime.zero.muon.muon_optimizer',
    'torch.distributed.tensor.parallel', 'torch.utils.cpp_extension', 'transformers.models.llama.modeling_llama'
])


class WorkerFailed(RuntimeError):
    """A worker raised or died; the text names it and the reason, and the workers that failed after it."""


@dataclasses.dataclass(frozen=True)
class Worker:
    """One process: ``main(report, *args)`` runs in it, where ``report(item)`` brings ``item`` to the launcher.

    ``main`` is a function of a module; ``args`` and what it reports can be pickled.
    """

    label: str
    main: Callable
    args: Tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Failure:
    """An exception that ended a worker, at ``time_s`` of the clock that all processes of a machine share."""

    time_s: float
    label: str
    error: str
    traceback: str


def run_workers(workers, on_report):
    """Run all ``workers`` to their end, calling ``on_report(label, item)`` here for every item they report.

    Raises WorkerFailed when one raises or dies. However this function ends (Ctrl-C too), no worker is left.
    """
    processes, labels = [], {}
    try:
        _start_server()
        for worker in workers:
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(target=_worker_main, args=(sender, worker), name=worker.label, daemon=True)
            process.start()
            sender.close()
            processes.append(process)
            labels[receiver] = worker.label
        _listen(labels, on_report)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _start_server():
    """Start the server that the processes are forked from: it ignores Ctrl-C, and so do they.

    Ctrl-C reaches every process of the terminal, but only the launcher shall answer it, and end the others.
    """
    answer = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, answer)


def _worker_main(sender, worker):
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    try:
        worker.main(lambda item: sender.send(('item', item)), *worker.args)
        sender.send(('done', None))
    except BaseException as error:
        sender.send(('failed',
                     Failure(time.monotonic(), worker.label, f'{type(error).__name__}: {error}',
                             traceback.format_exc())))
    # Leave at once: tearing down a world whose peers are gone can wait for them.
    os._exit(0)


def _end_with_launcher():
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _listen(labels, on_report):
    """Serve the connections of ``labels`` until every worker is done, or until GRACE_S after one failed."""
    open_connections = dict(labels)
    died, raised = [], []
    deadline = None
    while open_connections:
        timeout = None if deadline is None else deadline - time.monotonic()
        if timeout is not None and timeout <= 0:
            break
        for connection in multiprocessing.connection.wait(list(open_connections), timeout):
            label = open_connections[connection]
            try:
                kind, content = connection.recv()
            except (EOFError, OSError):
                kind, content = 'died', None
            if kind == 'item':
                on_report(label, content)
                continue
            del open_connections[connection]
            if kind == 'failed':
                raised.append(content)
            elif kind == 'died':
                died.append(label)
        if (raised or died) and deadline is None:
            deadline = time.monotonic() + GRACE_S
    if raised or died:
        raise WorkerFailed(_reason(died, raised))


def _reason(died, raised):
    """The text of a failure: what vanished or raised first is the cause of what the others then met."""
    lines = [f'{label} died without a word (killed, or out of memory?)' for label in died]
    raised = sorted(raised, key=lambda failure: failure.time_s)
    lines += [f'{failure.label} failed: {failure.error}' for failure in raised[:1]]
    lines += [f'{failure.label} failed after that' for failure in raised[1:]]
    if not died:
        lines += ['', raised[0].traceback]
    return '\n'.join(lines)
