# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How a transfer's bytes and its status rows travel between processes.

``Transport`` is all that the executor asks of a process group: its own rank and size, the memory that messages may lie
in, messages exchanged with peers, rows gathered from everybody, and a way to give up. ``ProcessGroupTransport``
answers through the methods of the group object itself. ``deepspeed.comm`` and ``torch.distributed.get_rank(group)``
look a group up in the default world, and answer wrongly or raise for one that joins two worlds or was built straight
from a store, as groups between trainers and rollout workers are.
"""

import time
from datetime import timedelta
from functools import partial
from threading import RLock
from typing import Callable, FrozenSet, List, Optional, Protocol, Sequence, Tuple, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch.distributed import BroadcastOptions

from .affine_transfer_memory import DEVICE, HOST, accelerator_device, accelerator_type
from .affine_transfer_shared import host_identity

__all__ = [
    'Transport', 'PendingMessage', 'ProcessGroupTransport', 'LoneTransport', 'transport_over', 'lock_over',
    'refuse_within'
]

# Messages of one tag between two ranks arrive in the order they were sent. A tag of our own keeps them apart from
# messages that the owner of the group sends with the default tag.
_MESSAGE_TAG = 0x0AFF
_NEVER_SENT_TAG = 0x0AFE
_ROW_TAG = 0x0AFD
_GIVE_UP_AFTER = timedelta(milliseconds=1)

_FROM_FIRST_RANK = BroadcastOptions()
_FROM_FIRST_RANK.rootRank = 0

_lock_by_group = WeakKeyDictionary()

# A contiguous tensor of one dimension, and the peer that it goes to or comes from.
Addressed = Tuple[torch.Tensor, int]


class PendingMessage(Protocol):
    """A message on its way. ``wait`` raises RuntimeError when it failed.

    For a message in host memory it returns when the tensor may be reused; for one in device memory it orders the
    accelerator's current stream after the message, and does not hold the host up.
    """

    def wait(self) -> object:
        ...


@runtime_checkable
class Transport(Protocol):
    """Messages between the ``size`` ranks of one group, this process being ``rank``.

    ``memory`` tells where messages may lie: HOST, DEVICE or both; it is the same on all ranks. ``host`` is the same on
    ranks that can share memory, 0 on one that shares with nobody. ``timeout_s`` limits each wait, None where it is not
    known.
    """
    rank: int
    size: int
    memory: FrozenSet[str]
    host: int
    timeout_s: Optional[float]

    def exchange(self, sends: Sequence[Addressed],
                 receives: Sequence[Addressed]) -> Tuple[List[PendingMessage], List[PendingMessage]]:
        """Start one window of messages, at most one to and one from each peer; both ends call it for the same window.

        Returns the messages under way, in the order given. Tensors must stay as they are until the message was
        waited for. Messages in device memory begin after what is queued on the accelerator's current stream.
        """

    def all_gather(self, table: torch.Tensor, row: torch.Tensor) -> None:
        """Fill ``table[rank]`` with the ``row`` of every rank, of one shape on all, and return when they are there.

        Both are contiguous, in host memory. Called by every rank.
        """

    def connect_devices(self) -> None:
        """Make ready for messages in device memory, where ``memory`` has both. Called by every rank, before some of
        them start the first window of such messages."""

    def abandon(self) -> List[int]:
        """Fail what peers have pending with this rank, so that they need not wait for the group's timeout, and see to
        it that none of this rank's own messages touches memory any more.

        Returns the ranks that nothing could be posted to any more: dead ones and those that have abandoned the group
        themselves; all ranks where a wait for one of them timed out.
        """


class ProcessGroupTransport:
    """Transport over a ``ProcessGroup``, or over a bare backend object such as ``ProcessGroupGloo``.

    Messages lie in host memory where the group has a backend for it, and in device memory where it has a backend for
    the accelerator's device that takes device memory itself (gloo copies it to the host, one message at a time).
    """

    def __init__(self, group):
        self._group = group
        self.rank = group.rank()
        self.size = group.size()
        # A ProcessGroup has a backend for each type of device, a bare backend is one.
        types = {device.type for device in getattr(group, '_device_types', ())}
        self._coalesced = (torch.device(accelerator_type()), ) if accelerator_type() in types else ()
        self._device_backend = self._device_backend_of(group) if self._coalesced or not types else None
        takes_host = 'cpu' in types if types else group.name() == 'gloo'
        self._host_backend = group._get_backend(torch.device('cpu')) if 'cpu' in types else group
        self.memory = frozenset([HOST] * takes_host + [DEVICE] * (self._device_backend is not None))
        if not self.memory:
            raise TypeError(f'{group!r} takes neither messages in host memory nor coalesced ones in the memory of the '
                            f'accelerator ({accelerator_type() or "there is none"})')
        self.host = host_identity() if HOST in self.memory else 0
        self._device_form: Optional[Tuple] = None
        self._device_tensors: List[torch.Tensor] = []

    def _device_backend_of(self, group):
        """The backend that takes device memory itself, all messages of a window at once; None if there is none."""
        if accelerator_type() is None:
            return None
        backend = group._get_backend(*self._coalesced) if self._coalesced else group
        return backend if backend.name() != 'gloo' and backend.supports_coalescing else None

    @property
    def timeout_s(self):
        timeout = getattr(getattr(self._host_backend, 'options', None), '_timeout', None)
        return None if timeout is None else timeout.total_seconds()

    def exchange(self, sends, receives):
        on_device = [[message for message in side if not message[0].is_cpu] for side in (sends, receives)]
        grouped = self._exchange_on_device(*on_device) if any(on_device) else None
        pending_receives = [
            _Posted(f'receiving from rank {peer}', partial(self._group.recv, [tensor], peer, _MESSAGE_TAG))
            if tensor.is_cpu else grouped for tensor, peer in receives
        ]
        pending_sends = [
            _Posted(f'sending to rank {peer}', partial(self._group.send, [tensor], peer, _MESSAGE_TAG))
            if tensor.is_cpu else grouped for tensor, peer in sends
        ]
        return pending_sends, pending_receives

    def _exchange_on_device(self, sends, receives) -> PendingMessage:
        """All messages of a window as one group: posted one by one, two ranks would each begin with the one that the
        other has not come to."""
        self._group._start_coalescing(*self._coalesced)
        # As bytes, since backends do not know all dtypes.
        for tensor, peer in receives:
            self._group.recv([tensor.view(torch.uint8)], peer, _MESSAGE_TAG)
        for tensor, peer in sends:
            self._group.send([tensor.view(torch.uint8)], peer, _MESSAGE_TAG)
        peers = sorted({peer for side in (sends, receives) for _, peer in side})
        return _Posted(f'exchanging with ranks {peers}', partial(self._group._end_coalescing, *self._coalesced))

    def all_gather(self, table, row):
        if HOST in self.memory:
            self._all_gather_by_first_rank(table, row)
            return
        device_table, device_row = self._on_device(table, row)
        device_row.copy_(row)
        self._group._allgather_base(device_table.view(-1), device_row).wait()
        table.copy_(device_table)

    def _all_gather_by_first_rank(self, table, row):
        """All tell the first rank, which tells all.

        gloo's allgather hands rows round a ring instead: each of its steps waits for another process to be scheduled,
        for up to a timeout of its own, and nobody learns who has not come.
        """
        learn = partial(self._group.broadcast, [table], _FROM_FIRST_RANK)
        if self.rank > 0:
            told = _Posted('sending to rank 0', partial(self._group.send, [row], 0, _ROW_TAG))
            _Posted('receiving from rank 0 what all ranks told it', learn).wait()
            told.wait()
            return
        table[0].copy_(row)
        tellers = [
            _Posted(f'receiving from rank {peer}', partial(self._group.recv, [table[peer]], peer, _ROW_TAG))
            for peer in range(1, self.size)
        ]
        # A wait of its own for each would let them add up.
        timeout_s = self.timeout_s
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for teller in tellers:
            teller.wait(None if deadline is None else timedelta(seconds=max(0.001, deadline - time.monotonic())))
        _Posted('sending to all ranks', learn).wait()

    def _on_device(self, *tensors: torch.Tensor) -> List[torch.Tensor]:
        """Device memory of the form of these tensors, the same as the last time where they are of the same form."""
        form = (accelerator_device(), *((tensor.shape, tensor.dtype) for tensor in tensors))
        if form != self._device_form:
            self._device_tensors = [torch.empty_like(tensor, device=form[0]) for tensor in tensors]
            self._device_form = form
        return self._device_tensors

    def connect_devices(self):
        # NCCL makes its communicator with the first operation. All ranks must take part in that, while only those
        # that have messages in a window enter it.
        self._group.allreduce([torch.zeros(1, dtype=torch.uint8, device=accelerator_device())]).wait()

    def abandon(self):
        gone = self._close_connections() if HOST in self.memory else []
        if self._device_backend is not None:
            self._device_backend.abort()
        return gone

    def _close_connections(self) -> List[int]:
        # When one wait of a rank times out, gloo closes all of that rank's connections, and its peers' operations
        # fail at once. abort() and shutdown() leave the connections open (torch 2.13), so wait for what nobody sends.
        # With a peer that is gone nothing can be posted any more.
        row = torch.empty(1, dtype=torch.uint8, device='cpu')
        gone, posted = [], []
        for peer in (peer for peer in range(self.size) if peer != self.rank):
            try:
                posted.append(self._group.recv([row], peer, _NEVER_SENT_TAG))
            except RuntimeError:
                gone.append(peer)
        for work in posted:
            try:
                work.wait(_GIVE_UP_AFTER)
            except RuntimeError:
                continue
        return gone


class _Posted:
    """A message under way, whose failure says whom it was for."""

    def __init__(self, doing: str, post: Callable[[], PendingMessage]):
        self._doing = doing
        self._work = self._told(post)

    def wait(self, timeout: Optional[timedelta] = None):
        """Raises RuntimeError after ``timeout`` too, in place of the group's."""
        self._told(self._work.wait if timeout is None else partial(self._work.wait, timeout))

    def _told(self, call):
        try:
            return call()
        except RuntimeError as error:
            raise RuntimeError(f'{self._doing}: {error}') from error


class LoneTransport:
    """The transport of a process without a group: one rank, which has nobody to exchange messages with."""
    rank = 0
    size = 1
    memory = frozenset((HOST, ))
    host = 0
    timeout_s = None

    def exchange(self, sends, receives):
        if sends or receives:
            raise ValueError('there are no other ranks without a process group')
        return [], []

    def all_gather(self, table, row):
        table[0].copy_(row)

    def connect_devices(self):
        raise ValueError('there are no other ranks without a process group')

    def abandon(self):
        return []


def transport_over(group: Optional[object]) -> Transport:
    """The transport of ``group``, or of this process alone when it is None; a Transport is its own.

    Raises TypeError for what is no group object, such as what ``new_group`` returns to a process it leaves out, and
    for a group without a backend that can carry messages here.
    """
    if group is None:
        return LoneTransport()
    if isinstance(group, Transport):
        return group
    try:
        return ProcessGroupTransport(group)
    except AttributeError as error:
        raise TypeError(f'{group!r} is not a process group that this process is a member of') from error


def lock_over(group: Optional[object]) -> RLock:
    """The lock of everything that is done through ``group``; a new one when it is None.

    Messages of two executors look alike to a group: only their order tells them apart.
    """
    return RLock() if group is None else _lock_by_group.setdefault(group, RLock())


def refuse_within(lock: RLock) -> None:
    """Raises RuntimeError where this thread holds the lock already, as one in a signal handler can, instead of
    beginning a transfer in the middle of another one."""
    if lock._is_owned():  # as threading.Condition asks it
        raise RuntimeError('this thread is in a transfer over the same group already')
