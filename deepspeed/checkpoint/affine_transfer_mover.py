# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Move one call's bytes: pack, exchange and unpack window after window, some on the wire while others are copied.

The host copies what lies in host memory. What touches device memory runs late, on two lanes: *outgoing* packs what is
sent, *incoming* unpacks what was received. Slots are used in turn, so whoever uses one, the host, a lane or the
transport, must come after whoever used it last. Each place that must wait for this has a method of its own here, named
for what it waits for; nothing else waits, but ``Line.until_written`` and ``until_read`` for slots in shared memory.
"""

from collections import deque
from typing import Deque, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch

from .affine_transfer_memory import HOST, Copies, Lane, Mark, copy
from .affine_transfer_staging import Layout, Load, Loads
from .affine_transfer_transport import PendingMessage, Transport

__all__ = ['Mover']

_NO_MESSAGES = Loads([], [], [], [], [], None)


class _UnderWay(NamedTuple):
    loads: Loads
    sends: List[PendingMessage]
    receives: List[PendingMessage]


class _Turn:
    """What the next window in the same slots must come after.

    ``packed``: copies between host and device to fill what is sent. ``arrived``: those to unpack what was received,
    and what the device copies after them. ``unpacked``: all reading of what was received in device memory.
    """

    def __init__(self):
        self.packed, self.arrived, self.unpacked = Mark(), Mark(), Mark()


class Mover:
    """Moves bytes over ``transport``, at most ``depth`` windows in slots and ``max_operations`` messages at a time."""

    def __init__(self, transport: Transport, depth: int, max_operations: int):
        self._transport, self._depth, self._max_operations = transport, depth, max_operations
        self._device: Optional[torch.device] = None
        self._outgoing, self._incoming = Lane(), Lane()
        self._turns = [_Turn() for _ in range(depth)]
        self._no_turn = _Turn()
        self._under_way: Deque[_UnderWay] = deque()
        self._operations_under_way = 0
        self._turns_taken: Set[int] = set()

    def prepare_device(self, device: torch.device) -> None:
        """Be ready for memory of this device: without it, buffers and messages must be in host memory alone."""
        if device != self._device:
            self._device = device
            self._outgoing, self._incoming = Lane.on_new_stream(), Lane.on_new_stream()
            self._turns, self._no_turn = [_Turn() for _ in range(self._depth)], _Turn()

    def move(self, layout: Layout) -> None:
        """Move all windows, and copy what stays within host or device memory meanwhile.

        On return every source may be overwritten and every target read, by the host and on any stream.
        Raises RuntimeError when a message fails.
        """
        self._follow_the_caller()
        windows = layout.windows or [_NO_MESSAGES]
        started = 0
        for finished in range(len(windows)):
            while started < len(windows) and not self._must_finish_one_before(windows[started]):
                self._start(windows[started])
                started += 1
            # Peers wait for nothing of this rank now, but for slots in shared memory to be read.
            self._incoming.copy(_share(layout.device, finished, len(windows)))
            copy(_share(layout.host, finished, len(windows)))
            self._finish_oldest()
        self.until_done()

    def _must_finish_one_before(self, loads: Loads) -> bool:
        """Whether a window must wait for the oldest one under way, for its slots or since too many messages are."""
        is_one_too_many = self._operations_under_way + loads.operations > self._max_operations
        return bool(self._under_way) and (is_one_too_many or loads.turn in self._turns_taken)

    def _turn_of(self, loads: Loads) -> _Turn:
        return self._no_turn if loads.turn is None else self._turns[loads.turn]

    def _start(self, loads: Loads) -> None:
        turn = self._turn_of(loads)
        self._until_slots_may_be_packed(turn)
        self._pack(loads.sends, turn.packed)
        if HOST in self._transport.memory:
            self._until_host_may_send(turn)
        self._until_slots_may_be_received_into(turn)
        sends, receives = self._exchange(loads)
        for load in loads.shared_sends:
            copy(load.host)
            load.line.tell_written()
        self._pack([sender for sender, _ in loads.to_itself], turn.packed)
        self._unpack_on_device([receiver for _, receiver in loads.to_itself], turn.arrived)
        self._under_way.append(_UnderWay(loads, sends, receives))
        self._operations_under_way += loads.operations
        if loads.turn is not None:
            self._turns_taken.add(loads.turn)

    def _exchange(self, loads: Loads) -> Tuple[List[PendingMessage], List[PendingMessage]]:
        if not loads.sends and not loads.receives:
            return [], []
        with self._outgoing.as_current():
            return self._transport.exchange([(load.wire, load.peer) for load in loads.sends],
                                            [(load.wire, load.peer) for load in loads.receives])

    def _pack(self, loads: Sequence[Load], mark: Mark) -> None:
        for load in loads:
            copy(load.host)
            self._outgoing.copy(load.device)
            self._outgoing.cross(load.crossing)
        if any(load.is_watched for load in loads):
            self._outgoing.set(mark)

    def _finish_oldest(self) -> None:
        under_way = self._under_way.popleft()
        loads, turn = under_way.loads, self._turn_of(under_way.loads)
        for load, message in zip(loads.receives, under_way.receives):
            self._until_received(message)
            self._unpack_on_device([load], turn.arrived)
            if load.wire.is_cpu:
                copy(load.host)
        on_device = [load for load in loads.receives if not load.wire.is_cpu]
        if on_device and loads.turn is not None:
            self._incoming.set(turn.unpacked)
        if any(load.host.targets for load in on_device):
            self._until_host_may_unpack(turn)
            for load in on_device:
                copy(load.host)
        if any(load.host.targets for _, load in loads.to_itself):
            self._until_host_may_unpack_its_own(turn)
            for _, load in loads.to_itself:
                copy(load.host)
        # All is received before anything that was sent is awaited: so no rank awaits one that awaits it.
        for load in loads.shared_receives:
            load.line.until_written()
            copy(load.host)
            load.line.tell_read()
        for message in under_way.sends:
            self._until_sent(message)
        for load in loads.shared_sends:
            load.line.until_read()
        self._operations_under_way -= loads.operations
        self._turns_taken.discard(loads.turn)

    def _unpack_on_device(self, loads: Sequence[Load], mark: Mark) -> None:
        for load in loads:
            self._incoming.cross(load.crossing)
            self._incoming.copy(load.device)
        if any(load.is_watched for load in loads):
            self._incoming.set(mark)

    # All that waits

    def _follow_the_caller(self) -> None:
        """The caller's stream may still write sources and read or write targets."""
        if self._device is not None:
            self._outgoing.follow_current_stream()
            self._incoming.follow_current_stream()

    def _until_slots_may_be_packed(self, turn: _Turn) -> None:
        """The last content of those that the host fills may still be on its way to the device, for messages to peers.
        """
        turn.packed.until_done()

    def _until_host_may_send(self, turn: _Turn) -> None:
        """What is sent from host memory must have come from the device; once for all messages of a window."""
        turn.packed.until_done()

    def _until_slots_may_be_received_into(self, turn: _Turn) -> None:
        """What was last received in them may still be on its way to the device, or be read there. So may what the
        process last sent itself, whose slots may then be packed."""
        turn.arrived.until_done()
        self._outgoing.follow(turn.unpacked)

    def _until_received(self, message: PendingMessage) -> None:
        with self._incoming.as_current():
            message.wait()

    def _until_host_may_unpack(self, turn: _Turn) -> None:
        """What arrived in device memory must have come to the host; once for all messages of a window."""
        turn.arrived.until_done()

    def _until_host_may_unpack_its_own(self, turn: _Turn) -> None:
        """What this process sends itself must have come from the device."""
        turn.packed.until_done()

    def _until_sent(self, message: PendingMessage) -> None:
        with self._outgoing.as_current():
            message.wait()

    def until_done(self) -> None:
        """Lanes may still read sources and write targets."""
        self._outgoing.until_done()
        self._incoming.until_done()


def _share(copies: Copies, number: int, count: int) -> Copies:
    return Copies(copies.targets[number::count], copies.sources[number::count])
