# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Slots in memory that processes of one host share: a sender packs into them, and the receiver unpacks from them.

A sender has one *area* for each distance to its peers modulo ``max_active_peers``, so no two messages of a window meet
in one (see ``affine_transfer_windows``), and both ends of a pair know which area is theirs. An area has as many slots
as messages of a pair may be under way. It is memory without a name, handed over through the connection of a pair, so
nothing is left of it when the processes that have mapped it are gone, however they ended.
"""

import hashlib
import os
import socket
import struct
from contextlib import suppress
from typing import Callable, Collection, Dict, List, Optional, Sequence

import torch

from deepspeed.utils import logger

from .affine_transfer_schedule import Schedule

__all__ = ['Line', 'SharedSlots', 'host_identity']

_BOOT_ID = '/proc/sys/kernel/random/boot_id'
_NETWORK = '/proc/self/ns/net'
_WRITTEN, _READ = b'w', b'r'
_RANK = struct.Struct('=q')
_CREDENTIALS = struct.Struct('3I')
# Python's sockets know no timeout of more than 2**31 ms.
_LONGEST_TIMEOUT_S = 2e6


def host_identity() -> int:
    """A number of 63 bits that is the same in processes that can share memory with one another; 0 where none can.

    Processes of several users have different ones, and so do those in containers with networks of their own.
    """
    try:
        with open(_BOOT_ID) as file:
            boot = file.read()
        network = os.stat(_NETWORK)
    except OSError:
        return 0
    identity = f'{boot} {network.st_dev} {network.st_ino} {os.geteuid()}'
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), 'little') >> 1 | 1


class Line:
    """A connection with a process of this host: either sends a byte for each slot that it has written or read.

    What tells or waits raises RuntimeError where the other end has gone, or is silent for the connection's timeout.
    """

    def __init__(self, peer: int, connection: socket.socket):
        self.connection = connection
        self._peer = peer
        self._written = self._read = 0

    def tell_written(self) -> None:
        """The next message to the peer lies in its slot."""
        self._tell(_WRITTEN, 'sending to')

    def tell_read(self) -> None:
        """The next message from the peer has been read, and its slot may be written again."""
        self._tell(_READ, 'receiving from')

    def until_written(self) -> None:
        """Wait until the next message from the peer lies in its slot."""
        while not self._written:
            self._listen('receiving from')
        self._written -= 1

    def until_read(self) -> None:
        """Wait until the peer has read the next message to it."""
        while not self._read:
            self._listen('sending to')
        self._read -= 1

    def abandon(self) -> None:
        """Let the other end wait for nothing any more, even where a forked process has this one too."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _tell(self, what: bytes, doing: str) -> None:
        try:
            self.connection.send(what, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise self._failure(doing, error) from error

    def _listen(self, doing: str) -> None:
        try:
            told = self.connection.recv(4096)
            if not told:
                raise ConnectionResetError
        except OSError as error:
            raise self._failure(doing, error) from error
        self._written += told.count(_WRITTEN)
        self._read += told.count(_READ)

    def _failure(self, doing: str, error: OSError) -> RuntimeError:
        cause = 'it ended or gave up' if isinstance(error, ConnectionError) else error
        return RuntimeError(f'{doing} rank {self._peer} through shared memory: {cause}')


class SharedSlots:
    """What ``rank`` shares with ``peers``, the others of its host: slots for messages, and ``lines`` by peer.

    ``hosts`` has the host of every rank, 0 for one that shares with nobody. ``schedule`` is that of the rank, cut for
    these peers. When this object goes its connections close, and its memory goes with the last of its slots.
    """

    def __init__(self, hosts: List[int], rank: int, schedule: Schedule, max_active_peers: int, name: str,
                 timeout_s: Optional[float]):
        self.lines: Dict[int, Line] = {}
        self._listener: Optional[socket.socket] = None
        self._files: Dict[int, int] = {}
        self.hosts, self._rank, self._max_active_peers, self._name = hosts, rank, max_active_peers, name
        self._timeout_s = None if timeout_s is None else min(timeout_s, _LONGEST_TIMEOUT_S)
        self.peers = frozenset(peer for peer, host in enumerate(hosts) if host == hosts[rank] != 0 and peer != rank)
        self.schedule = schedule.sharing_memory_with(self.peers)
        partners = self.peers & (self.schedule.sends.keys() | self.schedule.receives.keys())
        self._lower, self._higher = ({peer
                                      for peer in partners if (peer > rank) == is_higher}
                                     for is_higher in (False, True))
        # This rank's by place, and by peer those that it receives from.
        self._own_areas: Dict[int, torch.Tensor] = {}
        self._areas_by_peer: Dict[int, torch.Tensor] = {}

    def __del__(self):
        # Python warns of a socket that nobody closes.
        for line in self.lines.values():
            line.connection.close()
        self._release()

    @classmethod
    def agreed(cls, hosts: List[int], agree: Callable[[int], List[int]], *arguments) -> 'SharedSlots':
        """Slots set up by all ranks that can; ``arguments`` are the constructor's other ones. Called by every rank.

        ``agree`` gives this rank's host to all ranks and returns every rank's. A rank that cannot share, for want of
        memory say, warns, and has no host in the ``hosts`` of the slots that are returned.
        """
        while True:
            slots = cls(hosts, *arguments)
            hosts = slots._set_up(agree)
            if hosts == slots.hosts:
                return slots

    def _set_up(self, agree: Callable[[int], List[int]]) -> List[int]:
        """Every rank's host in the end, or as soon as one could not go on. No step waits for a peer."""
        hosts, host = self.hosts, self.hosts[self._rank]
        if not _some_share(hosts):
            return hosts
        try:
            for step in (self._make, self._connect, self._accept, self._take_over):
                try:
                    if host:
                        step()
                except Exception as error:
                    logger.warning(
                        f'rank {self._rank} cannot share memory with others of its host, so messages to and '
                        f'from it are sent: {type(error).__name__}: {error}')
                    host = 0
                hosts = agree(host)
                if hosts != self.hosts:
                    break
            return hosts
        finally:
            self._release()

    def _release(self) -> None:
        """Close what is needed to set up alone."""
        if self._listener is not None:
            self._listener.close()
        while self._files:
            os.close(self._files.popitem()[1])

    def _make(self) -> None:
        """Make the own areas, and listen for partners of higher rank."""
        slot_bytes: Dict[int, int] = {}
        for peer in self.schedule.sends.keys() & self.peers:
            place = self._place(peer)
            slot_bytes[place] = max(slot_bytes.get(place, 0), self.schedule.longest_bytes_to(peer))
        for place, nbytes in slot_bytes.items():
            self._files[place] = os.memfd_create(self._name)
            # A process that writes where no memory was reserved, and finds none, is killed.
            os.posix_fallocate(self._files[place], 0, nbytes * self.schedule.depth)
            self._own_areas[place] = _mapped(self._files[place])
        if self._higher:
            self._listener = _socket()
            self._listener.bind(self._address(self._rank))
            self._listener.listen(socket.SOMAXCONN)

    def _connect(self) -> None:
        """Connect to partners of lower rank, and hand over what they are to receive from."""
        for peer in self._lower:
            self.lines[peer] = Line(peer, _socket())
            self.lines[peer].connection.connect(self._address(peer))
            if not _is_of_this_user(self.lines[peer].connection):
                raise OSError(f'another user listens in the place of rank {peer}')
            self._hand_over(peer)

    def _accept(self) -> None:
        """Take the connections of partners of higher rank, and hand over what they are to receive from."""
        missing = set(self._higher)
        while missing:
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            peer = self._taken_over(connection, missing)
            if peer is None:
                connection.close()
                continue
            self.lines[peer] = Line(peer, connection)
            self._hand_over(peer)
            missing.remove(peer)

    def _take_over(self) -> None:
        """Take what partners of lower rank hand over."""
        for peer in self._lower:
            if self._taken_over(self.lines[peer].connection, {peer}) is None:
                raise OSError(f'rank {peer} has handed nothing over')
        for line in self.lines.values():
            line.connection.settimeout(self._timeout_s)

    def _hand_over(self, peer: int) -> None:
        files = [self._files[self._place(peer)]] if peer in self.schedule.sends else []
        socket.send_fds(self.lines[peer].connection, [_RANK.pack(self._rank)], files)

    def _taken_over(self, connection: socket.socket, expected: Collection[int]) -> Optional[int]:
        """The peer at the other end, whose area is mapped if this rank receives from it; None if it is none of these.
        """
        if not _is_of_this_user(connection):
            return None
        try:
            told, files, _, _ = socket.recv_fds(connection, _RANK.size, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        try:
            peer = _RANK.unpack(told)[0] if len(told) == _RANK.size else None
            if peer not in expected:
                return None
            if len(files) != (peer in self.schedule.receives):
                raise OSError(f'rank {peer} handed over {len(files)} areas')
            for file in files:
                self._areas_by_peer[peer] = _mapped(file)
            return peer
        finally:
            for file in files:
                os.close(file)

    def _address(self, rank: int) -> str:
        # One that begins with a zero byte is no name in any folder.
        return f'\0{self._name}-{rank}'

    def _place(self, receiver: int) -> int:
        """The place of this rank's area for a peer that it sends to."""
        return ((receiver - self._rank) % len(self.hosts) - 1) % self._max_active_peers

    @property
    def nbytes(self) -> int:
        """The bytes of the areas for what this rank sends."""
        return sum(area.nbytes for area in self._own_areas.values())

    def slot(self, side: str, peer: int, number: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Where ``numel`` elements lie that are sent to ('source') or received from ('target') a peer in the window of
        this number."""
        area = self._own_areas[self._place(peer)] if side == 'source' else self._areas_by_peer[peer]
        begin = number % self.schedule.depth * (len(area) // self.schedule.depth)
        return area[begin:begin + numel * dtype.itemsize].view(dtype)

    def abandon(self) -> None:
        """Let peers wait for this rank no longer."""
        for line in self.lines.values():
            line.abandon()


def _some_share(hosts: Sequence[int]) -> bool:
    known = [host for host in hosts if host]
    return len(set(known)) < len(known)


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.setblocking(False)
    return made


def _is_of_this_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] == os.geteuid()


def _mapped(file: int) -> torch.Tensor:
    """The bytes of a file, as memory that is shared with all who have it mapped."""
    size = os.fstat(file).st_size
    return torch.from_file(f'/proc/self/fd/{file}', shared=True, size=size, dtype=torch.uint8, device='cpu')
