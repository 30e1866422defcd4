# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Messages between the ranks of a simulation: in host memory as gloo sends them, in device memory as NCCL does.

Host messages go over a link per pair and direction, in order, at any time between being posted at both ends and being
waited for; waiting blocks the rank. Device messages of one ``exchange`` are one entry of a stream that the transport
keeps for itself. Such a window occupies the stream until every peer in it has reached its own window for this rank.
What would sometimes hang or corrupt memory on real hardware is an error here: windows that hold other messages at the
other end, more messages at once than the cap, other sizes or other kinds of memory at the two ends, a window before
all ranks have used the group's devices together once, as NCCL needs to make its communicator.
"""

from collections import deque
from typing import Deque, Dict, FrozenSet, List, Optional, Sequence, Set, Tuple

import torch

from .host_accesses import touch
from .hosts import Host, caller, here
from .memory import shadow
from .operators import is_on_device, region_of
from .races import Access, Clock, join
from .simulation import Simulation
from .streams import Mark, Stream, Wait, Work, unobserved
from .synchronizations import synchronization

HOST, DEVICE = 'host', 'device'
Addressed = Tuple[torch.Tensor, int]


def transports(simulation: Simulation,
               memory: FrozenSet[str],
               max_operations: int = 64,
               is_new: bool = False) -> List['SimulatedTransport']:
    """A transport for every rank of a simulation, in rank order, over one group of them all.

    ``memory``: where messages may lie, HOST, DEVICE or both. ``max_operations``: the most messages in one window.
    ``is_new``: all ranks are yet to use the group's devices together.
    """
    network = _Network(simulation, frozenset(memory), max_operations)
    if not is_new:
        network.connected.update(range(network.size))
    return [SimulatedTransport(network, host) for host in simulation.hosts]


class SimulatedTransport:
    """One rank's end of a group. Its methods are called by that rank."""

    def __init__(self, network: '_Network', host: Host):
        self.rank = host.rank
        self.size = network.size
        self.memory = network.memory
        # The ranks are one process, whose memory they do not share here.
        self.host = 0
        self.timeout_s = None
        self._network = network
        self._host = host
        self._stream: Optional[Stream] = None

    def exchange(self, sends: Sequence[Addressed],
                 receives: Sequence[Addressed]) -> Tuple[List['_Pending'], List['_Pending']]:
        """Start a window of messages, at most one to and one from each peer, and return them in the order given.

        Device messages start after what the current stream has queued. RuntimeError for what no real transport can do.
        """
        here().simulation.enter()
        self._network.check()
        self._check(sends, receives)
        numbers = [[self._link(peer, is_receive).post(tensor, is_receive) for tensor, peer in side]
                   for is_receive, side in enumerate((sends, receives))]
        on_device = [[message for message in side if is_on_device(message[0])] for side in (sends, receives)]
        mark = self._start_window(*on_device) if any(on_device) else None
        pending_sends, pending_receives = ([
            self._start(tensor, peer, bool(is_receive), number, mark)
            for (tensor, peer), number in zip(side, numbers[is_receive])
        ] for is_receive, side in enumerate((sends, receives)))
        return pending_sends, pending_receives

    def _check(self, sends: Sequence[Addressed], receives: Sequence[Addressed]) -> None:
        if len(sends) + len(receives) > self._network.max_operations:
            raise RuntimeError(f'{len(sends)} sends and {len(receives)} receives were handed in at once, more than '
                               f'{self._network.max_operations} can deadlock')
        for side in (sends, receives):
            if len({peer for _, peer in side}) < len(side):
                raise RuntimeError('a window holds two messages of one direction for one peer')
            for tensor, peer in side:
                place = DEVICE if is_on_device(tensor) else HOST
                if place not in self.memory:
                    raise RuntimeError(f'a message in {place} memory for a transport of {sorted(self.memory)} memory')
                if not tensor.is_contiguous() or not tensor.numel():
                    raise RuntimeError(f'a message must be contiguous and not empty, not {tuple(tensor.shape)}')

    def _link(self, peer: int, is_receive: bool) -> '_Link':
        return self._network.links[(peer, self.rank) if is_receive else (self.rank, peer)]

    def _start(self, tensor: torch.Tensor, peer: int, is_receive: bool, number: int,
               mark: Optional[Mark]) -> '_Pending':
        if is_on_device(tensor):
            return _DeviceMessage(self._network, tensor, mark)
        link = self._link(peer, is_receive)
        message = _HostMessage(self._network, link, tensor, is_receive, number)
        (link.receives if is_receive else link.sends).append(message)
        self._host.simulation.scheduler.wake(link)
        return message

    def _start_window(self, sends: Sequence[Addressed], receives: Sequence[Addressed]) -> Mark:
        if not self._network.is_connected():
            raise RuntimeError('a window of device messages came before all ranks had connected their devices')
        if self._stream is None:
            self._stream = Stream()
        self._stream.push(Wait(here().stream.mark()))
        window = _Window(self._network, self._stream, sends, receives)
        window.register(self._stream, self._stream.push(window))
        return self._stream.mark()

    def connect_devices(self) -> None:
        """Have all ranks use the group's devices together. Called by every rank."""
        self._network.connected.add(self.rank)
        self._meet(torch.empty(0))

    def all_gather(self, rows: Sequence[torch.Tensor], row: torch.Tensor) -> None:
        """Fill ``rows`` with every rank's ``row``, all in host memory, and return when they are there."""
        touch(row, False, 'gathering')
        if HOST not in self.memory:
            self._network.connected.add(self.rank)
        for target, gathered in zip(rows, self._meet(row)):
            target.copy_(gathered)

    def _meet(self, row: torch.Tensor) -> List[torch.Tensor]:
        """Wait until all ranks are here as often as this one; their rows."""
        host, network = here(), self._network
        host.simulation.enter()
        network.check()
        number = len(network.gathered[self.rank])
        network.gathered[self.rank].append((row.clone(), host.clock))
        host.simulation.scheduler.changes += 1

        def is_done():
            return all(len(gathered) > number for gathered in network.gathered)

        host.wait_until(lambda: is_done() or network.abandoned_by is not None, (), 'gather rows')
        if not is_done():
            network.check()
        for gathered in network.gathered:
            host.catch_up(gathered[number][1])
        return [gathered[number][0] for gathered in network.gathered]

    def abandon(self) -> List[int]:
        """Fail what any rank has pending, and all later use of the group; the ranks that had abandoned it before.

        As with ncclCommAbort and gloo's closed connections, no message of this rank touches memory any more on return.
        """
        here().simulation.enter()
        gone = [] if self._network.abandoned_by in (None, self.rank) else [self._network.abandoned_by]
        if self._network.abandoned_by is None:
            self._network.abandoned_by = self.rank
            self._host.simulation.unawaited.clear()
        here().simulation.scheduler.changes += 1
        if self._stream is not None:
            self._host.wait_for_mark(self._stream.mark(), 'abandon the group')
        for pair, link in self._network.links.items():
            if self.rank in pair:
                link.close()
                self._host.see({link: link.count})
        return gone


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


class _Network:
    """What the transports of one group share."""

    def __init__(self, simulation: Simulation, memory: FrozenSet[str], max_operations: int):
        self.memory = memory
        self.max_operations = max_operations
        self.size = len(simulation.hosts)
        self.abandoned_by: Optional[int] = None
        pairs = [(source, target) for source in range(self.size) for target in range(self.size) if source != target]
        self.links = {pair: _Link(simulation, *pair) for pair in pairs}
        # By (rank, peer): the windows of the rank that hold a message to or from the peer.
        self.windows: Dict[Tuple[int, int], List[_Window]] = {pair: [] for pair in pairs}
        # The ranks that have used their devices with all others.
        self.connected: Set[int] = set()
        # By rank: every row so far, and what its host had seen.
        self.gathered: List[List[Tuple[torch.Tensor, Clock]]] = [[] for _ in range(self.size)]

    def is_connected(self) -> bool:
        return len(self.connected) == self.size

    def check(self) -> None:
        if self.abandoned_by is not None:
            raise RuntimeError(f'rank {self.abandoned_by} has abandoned the group')


class _Link:
    """The messages from one rank to another, in order."""

    def __init__(self, simulation: Simulation, source: int, target: int):
        self._name = f'link from rank {source} to rank {target}'
        self.sends: Deque[_HostMessage] = deque()
        self.receives: Deque[_HostMessage] = deque()
        # Of every message so far, at the sending and at the receiving end: its memory and its size.
        self._posted: Tuple[List[str], List[str]] = ([], [])
        simulation.scheduler.add(self)

    def __repr__(self):
        return self._name

    def post(self, tensor: torch.Tensor, is_receive: bool) -> int:
        """Count a message of one end, and return its number. RuntimeError if it does not fit the other end."""
        mine, others = self._posted[is_receive], self._posted[not is_receive]
        number = len(mine)
        mine.append(f'{tensor.nbytes} bytes in {DEVICE if is_on_device(tensor) else HOST} memory')
        if number < len(others) and others[number] != mine[number]:
            raise RuntimeError(f'{self}: message {number} has {mine[number]} at one end and {others[number]} at the '
                               f'other')
        return number

    @property
    def count(self) -> int:
        """The number of messages so far, at the end that has posted more."""
        return max(len(posted) for posted in self._posted)

    def close(self) -> None:
        """Deliver nothing any more."""
        self.sends.clear()
        self.receives.clear()

    def is_ready(self) -> bool:
        return bool(self.sends and self.receives)

    def blockers(self) -> Sequence:
        return ()

    def step(self) -> None:
        """Deliver the next message."""
        send, receive = self.sends.popleft(), self.receives.popleft()
        with unobserved(), torch._C._InferenceMode(True):
            _bytes_of(receive.tensor).copy_(_bytes_of(send.tensor))
        join(receive.clock, send.clock)
        send.is_done = receive.is_done = True
        scheduler = send.host.simulation.scheduler
        scheduler.changes += 1
        if not self.is_ready():
            scheduler.rest(self)

    def describe(self) -> str:
        return f'{self}: {len(self.sends)} sent, {len(self.receives)} awaited' if self.sends or self.receives else ''


class _Pending:
    """A message under way."""

    def __init__(self, network: _Network):
        self._network = network

    @synchronization
    def wait(self) -> None:
        """Let the host come after a message in host memory, and the current stream after one in device memory."""
        here().simulation.enter()
        self._network.check()
        self._wait()


class _DeviceMessage(_Pending):

    def __init__(self, network: _Network, tensor: torch.Tensor, mark: Mark):
        super().__init__(network)
        # As NCCL's process group does, until some stream is ordered after the message.
        self._held: Optional[torch.Tensor] = tensor
        self._mark = mark

    def _wait(self):
        here().stream.push(Wait(self._mark))
        self._held = None


class _HostMessage(_Pending):

    def __init__(self, network: _Network, link: _Link, tensor: torch.Tensor, is_receive: bool, number: int):
        super().__init__(network)
        self.tensor = tensor
        self.host = here()
        self.is_done = False
        # What whoever waits for this message has seen then.
        self.clock: Clock = {**self.host.clock, link: number + 1}
        self._link = link
        block, region = region_of(tensor)
        text = f'{"receiving" if is_receive else "sending"} at {caller()}'
        access = Access(region, is_receive, link, number + 1, True, text)
        self.host.simulation.unawaited[self] = text
        ledger = self.host.simulation.ledger
        ledger.check(block, access, self.host.clock, pending_too=True)
        ledger.add(block, access)

    def _wait(self):
        self.host.simulation.unawaited.pop(self, None)
        self.host.wait_until(lambda: self.is_done or self._network.abandoned_by is not None, (self._link, ),
                             f'wait for a message over {self._link}')
        if not self.is_done:
            self._network.check()
        self.host.catch_up(self.clock)


class _Window(Work):
    """The device messages of one exchange, at one rank."""

    def __init__(self, network: _Network, stream: Stream, sends: Sequence[Addressed], receives: Sequence[Addressed]):
        touches = [(*region_of(tensor), is_receive) for is_receive, side in enumerate((sends, receives))
                   for tensor, _ in side]
        super().__init__(self._move_all, touches,
                         f'a window of {len(sends)} sends and {len(receives)} receives at {caller()}')
        # By peer: the bytes of the message, and its place among the touches. Holds no tensor: whoever frees one before
        # the message has left must see the harm.
        self._sends = {peer: (_bytes_of(shadow(tensor)), place) for place, (tensor, peer) in enumerate(sends)}
        self._receives = {
            peer: (_bytes_of(shadow(tensor)), place)
            for place, (tensor, peer) in enumerate(receives, start=len(sends))
        }
        self._sent: Set[int] = set()
        self._network = network
        self._stream = stream
        self._rank = stream.host.rank
        # What its stream had seen where it began; None until it has.
        self._clock: Optional[Clock] = None
        # By peer: the number of this window among those of both ranks.
        self._numbers: Dict[int, int] = {}
        for peer in sorted({*self._sends, *self._receives}):
            mine = network.windows[self._rank, peer]
            self._numbers[peer] = len(mine)
            mine.append(self)
            self._check(peer)

    def _opposite(self, peer: int) -> Optional['_Window']:
        """The window of the peer that this one meets, if it is there."""
        theirs, number = self._network.windows[peer, self._rank], self._numbers[peer]
        return theirs[number] if number < len(theirs) else None

    def _check(self, peer: int) -> None:
        other, rank = self._opposite(peer), self._rank
        if other is None:
            return
        if (peer in self._sends) != (rank in other._receives) or (peer in self._receives) != (rank in other._sends):
            raise RuntimeError(f'ranks {rank} and {peer} have different messages for one another in their window '
                               f'number {self._numbers[peer]}: {self.text}, {other.text}')

    def _begin(self) -> bool:
        """Whether its stream has come to this window, and if so, note what it has seen by then."""
        if self._clock is None and self._stream.queue and self._stream.queue[0].entry is self:
            self._stream.reach()
            self._clock = dict(self._stream.clock)
        return self._clock is not None

    def is_ready(self):
        if self._network.abandoned_by is not None:
            return True
        opposites = [self._opposite(peer) for peer in self._numbers]
        return all(other is not None and other._begin() for other in opposites)

    def blockers(self):
        opposites = [self._opposite(peer) for peer in self._numbers]
        return [other._stream for other in opposites if other is not None and not other._begin()]

    def run(self, stream):
        """Move all messages, both ways, that the windows of the peers have not moved when they ran."""
        self._begin()
        with unobserved(), torch._C._InferenceMode(True):
            self._function()

    def _move_all(self):
        for peer in self._numbers if self._network.abandoned_by is None else ():
            other = self._opposite(peer)
            self._send(peer, other)
            other._send(self._rank, self)
            if peer in self._receives:
                join(self._stream.clock, other._clock)

    def _send(self, peer: int, other: '_Window') -> None:
        if peer not in self._sends or peer in self._sent:
            return
        self._sent.add(peer)
        (source, place), (target, target_place) = self._sends[peer], other._receives[self._rank]
        self._touch(self._stream, place, self._clock)
        other._touch(other._stream, target_place, other._clock)
        target.copy_(source)
