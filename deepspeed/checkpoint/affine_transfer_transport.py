# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How a transfer's bytes and its status rows travel between processes.

``Transport`` is all that the executor asks of a process group: its own rank and size, messages between two ranks,
rows gathered from everybody, and a way to give up. ``ProcessGroupTransport`` answers through the methods of the group
object itself. ``deepspeed.comm`` and ``torch.distributed.get_rank(group)`` look a group up in the default world, and
answer wrongly or raise for one that joins two worlds or was built straight from a store, as groups between trainers
and rollout workers are.
"""

from datetime import timedelta
from typing import List, Optional, Protocol

import torch

__all__ = ['Transport', 'PendingMessage', 'ProcessGroupTransport', 'LoneTransport', 'transport_over']

# Messages of one tag between two ranks arrive in the order they were sent. A tag of our own keeps them apart from
# messages that the owner of the group sends with the default tag.
_MESSAGE_TAG = 0x0AFF
_NEVER_SENT_TAG = 0x0AFE
_GIVE_UP_AFTER = timedelta(milliseconds=1)


class PendingMessage(Protocol):
    """A message on its way; ``wait`` returns when its tensor may be reused, and raises when it failed."""

    def wait(self) -> object:
        ...


class Transport(Protocol):
    """Messages in host memory between the ``size`` ranks of one group, this process being ``rank``."""
    rank: int
    size: int

    def send(self, tensor: torch.Tensor, peer: int) -> PendingMessage:
        """Start sending a contiguous tensor, which must stay as it is until the message was waited for."""

    def receive(self, tensor: torch.Tensor, peer: int) -> PendingMessage:
        """Start receiving into a contiguous tensor the next message from ``peer``, of as many bytes."""

    def all_gather(self, rows: List[torch.Tensor], row: torch.Tensor) -> None:
        """Fill ``rows`` with each rank's ``row``, in rank order; all have one size. Called by every rank."""

    def abandon(self) -> None:
        """Fail what peers have pending with this rank, so that they need not wait for the group's timeout."""


class ProcessGroupTransport:
    """Transport over a gloo ``ProcessGroup``, or over a bare backend object such as ``ProcessGroupGloo``."""

    def __init__(self, group):
        self._group = group
        self.rank = group.rank()
        self.size = group.size()

    def send(self, tensor, peer):
        return self._group.send([tensor], peer, _MESSAGE_TAG)

    def receive(self, tensor, peer):
        return self._group.recv([tensor], peer, _MESSAGE_TAG)

    def all_gather(self, rows, row):
        self._group.allgather([rows], [row]).wait()

    def abandon(self):
        # When one wait of a rank times out, gloo closes all of that rank's connections, and its peers' operations
        # fail at once. abort() and shutdown() leave the connections open (torch 2.13), so wait for what nobody sends.
        # A peer that is already gone fails without a timeout; going on to the next one reaches one that is alive.
        row = torch.empty(1, dtype=torch.uint8)
        for peer in range(self.size):
            if peer == self.rank:
                continue
            try:
                self._group.recv([row], peer, _NEVER_SENT_TAG).wait(_GIVE_UP_AFTER)
            except RuntimeError:
                continue


class LoneTransport:
    """The transport of a process without a group: one rank, which has nobody to exchange messages with."""
    rank = 0
    size = 1

    def send(self, tensor, peer):
        raise ValueError(f'there is no rank {peer} without a process group')

    def receive(self, tensor, peer):
        raise ValueError(f'there is no rank {peer} without a process group')

    def all_gather(self, rows, row):
        rows[0].copy_(row)

    def abandon(self):
        pass


def transport_over(group: Optional[object]) -> Transport:
    """The transport of ``group``, or of this process alone when it is None.

    Raises TypeError for what is no group object, such as what ``new_group`` returns to a process it leaves out.
    """
    if group is None:
        return LoneTransport()
    try:
        return ProcessGroupTransport(group)
    except AttributeError as error:
        raise TypeError(f'{group!r} is not a process group that this process is a member of') from error
