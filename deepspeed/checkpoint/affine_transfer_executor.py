# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Move the bytes of transfer plans between processes: checked before the first byte, bounded while they move.

Build an ``AffineTransferExecutor`` once and call ``execute`` whenever the values are to travel; ``execute_transfer``
does both for one plan. ``execute`` plans nothing and exchanges no objects, and from its second call on it allocates no
tensor, whatever tensors of the same geometry it is given.

*Who takes part.* Every rank of the group makes the same calls. A rank passes buffers for exactly the locations that
its endpoints bind to it, and may hold plans cut down to those; a rank that holds neither end passes none.

*Refusal.* Each construction and each ``execute`` begins with an exchange of one small row. When a rank finds a fault,
all ranks raise AffineTransferExecutionError, naming it and its cause: ``transfer refused before it began: ...`` or
``ranks disagree about the transfer schedule: ...``. Nothing has been written then, and the executor stays usable.

*Failure.* Once bytes move, a lost peer makes every survivor raise, within the group's timeout: what its targets hold
is undefined, and neither the executor nor the group can be used again. A second exchange ends each ``execute``, so a
rank without any traffic to the lost one learns of it too.

*Bound.* Staging is host memory, in bytes at most

    bytes_per_peer * (peers this rank sends to + peers this rank receives from)

where a peer counts only if some message to or from it must be packed or converted: a message that is one run of
elements in this rank's buffer, in the form they travel in, is sent from or received into the buffer itself. No device
memory is used. ``TransferStats.peak_host_staging_bytes`` is what was really allocated.

*Numbers.* Values become what ``tensor.to(dtype)`` makes of them, converted once: by the sender when the target's
elements are no larger than the source's, else by the receiver. (NaN stays NaN; which bits it has is torch's affair.)
"""

import hashlib
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import index
from typing import Deque, List, Mapping, Optional, Tuple, Union

import torch

from .affine_transfer import TransferPlan
from .affine_transfer_agreement import Agreement, Terms
from .affine_transfer_buffers import check_buffers, check_disjoint, collect, shards_of, signature
from .affine_transfer_schedule import AffineTransferExecutionError, Schedule, Wire
from .affine_transfer_staging import Bound, Layout, Load, Tensors, geometry_of, lay_out
from .affine_transfer_transport import PendingMessage, Transport, transport_over

__all__ = [
    'AffineTransferExecutionError', 'AffineTransferExecutor', 'StagingBudget', 'TransferEndpoints', 'TransferStats',
    'execute_transfer'
]

Buffers = Union[Mapping[int, torch.Tensor], Mapping[str, Mapping[int, torch.Tensor]]]


@dataclass(frozen=True)
class TransferEndpoints:
    """Which rank of the group holds each location: ``{location: rank}`` per side, numbered independently.

    Location 0 of the source and location 0 of the target may be on different ranks; a rank may hold several locations.
    Equal on all ranks.
    """
    source: Mapping[int, int]
    target: Mapping[int, int]

    def __post_init__(self):
        for side in ('source', 'target'):
            try:
                bound = {index(location): index(rank) for location, rank in getattr(self, side).items()}
            except (AttributeError, TypeError) as error:
                raise AffineTransferExecutionError(
                    f'the {side} endpoints must map locations to ranks, both integers: {error}') from error
            object.__setattr__(self, side, bound)

    def digest(self) -> str:
        """A text that is equal for equal endpoints, and short for any number of them."""
        bound = (sorted(self.source.items()), sorted(self.target.items()))
        return hashlib.blake2b(repr(bound).encode(), digest_size=8).hexdigest()

    def check_ranks(self, size: int) -> None:
        """Refuse a location that is bound to a rank outside a group of ``size`` ranks."""
        for side in ('source', 'target'):
            for location, rank in getattr(self, side).items():
                if not 0 <= rank < size:
                    raise AffineTransferExecutionError(
                        f'{side} location {location} is bound to rank {rank}, outside the group of {size} ranks')


@dataclass(frozen=True)
class StagingBudget:
    """The bytes of staging that one peer may occupy on this rank in one direction; equal on every rank."""
    bytes_per_peer: int = 1 << 24

    def __post_init__(self):
        if not isinstance(self.bytes_per_peer, int) or self.bytes_per_peer < 1:
            raise AffineTransferExecutionError(
                f'bytes_per_peer must be a positive integer, not {self.bytes_per_peer!r}')


@dataclass(frozen=True)
class TransferStats:
    """What one ``execute`` did on this rank.

    A chunk is a segment or a part of one that was cut; a round is one message to and from each peer. Sent and received
    bytes are those that travelled, locally copied ones are counted in the target's dtype.
    """
    segments: int
    chunks: int
    rounds: int
    local_copy_bytes: int
    sent_bytes: int
    received_bytes: int
    peak_host_staging_bytes: int
    peak_device_staging_bytes: int
    seconds: float


def execute_transfer(plan: TransferPlan,
                     source_buffers: Mapping[int, torch.Tensor],
                     target_buffers: Mapping[int, torch.Tensor],
                     endpoints: TransferEndpoints,
                     dtype: torch.dtype,
                     budget: StagingBudget = StagingBudget(),
                     group: Optional[object] = None) -> TransferStats:
    """Move one plan's bytes once, between buffers of one dtype. See AffineTransferExecutor."""
    return AffineTransferExecutor(plan, endpoints, dtype=dtype, budget=budget,
                                  group=group).execute(source_buffers, target_buffers)


class AffineTransferExecutor:
    """A transfer made ready once, to be executed many times.

    ``plans`` is one TransferPlan, or a dict of them by parameter name; all parameters share messages. Buffers of
    ``source_dtype`` (``dtype`` when left out) become values of ``dtype``. ``group`` is a process group object whose
    ranks the endpoints name, inside or outside the default world; without one, all copies are within this process.
    Constructed by every rank of the group. Raises AffineTransferExecutionError on all of them when one refuses (a
    budget below one element, a location bound to no rank of the group, ...), or when they disagree.
    """

    def __init__(self,
                 plans: Union[TransferPlan, Mapping[str, TransferPlan]],
                 endpoints: TransferEndpoints,
                 *,
                 dtype: torch.dtype,
                 source_dtype: Optional[torch.dtype] = None,
                 budget: StagingBudget = StagingBudget(),
                 group: Optional[object] = None):
        self._transport = transport_over(group)
        self._agreement = Agreement(self._transport)
        self._broken: Optional[str] = None
        self._one_at_a_time = threading.Lock()
        self._layout: Optional[Layout] = None
        self._checked: Optional[tuple] = None  # signatures of the buffers that passed the checks last
        fault, terms = None, None
        with self._giving_up('the ranks could not agree on a transfer, nothing was moved'):
            try:
                terms = self._build(plans, endpoints, dtype, source_dtype or dtype, budget)
            except Exception as error:
                fault = error
            self._agreement.construct(fault, terms)

    def execute(self, source_buffers: Buffers, target_buffers: Buffers) -> TransferStats:
        """Write the values of all ranks' source buffers into their target buffers. Called by every rank.

        Buffers are ``{location: tensor}``, or ``{name: {location: tensor}}`` for named plans: in host memory, in the
        shard's shape with strides that each step over what the smaller ones reach, or flat. Buffers without elements
        are ignored. Calls from several threads take turns.
        Raises AffineTransferExecutionError: on all ranks, with targets untouched, when one of them refuses; with
        targets undefined where the text says that the transfer failed after it began.
        """
        # Targets may be inference tensors, which can be written only in this mode; others are written as ever.
        with self._one_at_a_time, torch.inference_mode():
            if self._broken:
                raise AffineTransferExecutionError(f'this executor can no longer be used: {self._broken}')
            started = time.perf_counter()
            fault, bound = None, None
            with self._giving_up('transfer failed before it began, targets are untouched'):
                try:
                    bound = self._bind(source_buffers, target_buffers)
                except Exception as error:
                    fault = error
                self._agreement.open(fault)
            with self._giving_up('transfer failed after it began, targets are undefined'):
                _move(bound, self._transport, self._schedule.depth)
                self._agreement.close()
            return replace(self._stats, seconds=time.perf_counter() - started)

    @contextmanager
    def _giving_up(self, told: str):
        """Whatever fails but a refusal, which all ranks share, ends this executor and lets its peers know at once."""
        try:
            yield
        except AffineTransferExecutionError:
            raise
        except BaseException as error:
            self._broken = f'{told}: {error}'
            self._transport.abandon()
            if not isinstance(error, Exception):
                raise
            raise AffineTransferExecutionError(self._broken) from error

    def _build(self, plans, endpoints: TransferEndpoints, dtype, source_dtype, budget: StagingBudget) -> Terms:
        """Make the schedule, and the terms that peers compare."""
        self._is_named = isinstance(plans, Mapping)
        plans = plans if self._is_named else {'': plans}
        for name, plan in plans.items():
            if not isinstance(name, str) or not isinstance(plan, TransferPlan):
                raise AffineTransferExecutionError(f'plans must be a TransferPlan or a dict of them by name, but '
                                                   f'{name!r} has a {type(plan).__name__}')
        if not isinstance(dtype, torch.dtype) or not isinstance(source_dtype, torch.dtype):
            raise AffineTransferExecutionError(f'dtypes must be torch dtypes, not {dtype!r} and {source_dtype!r}')
        endpoints.check_ranks(self._transport.size)
        self._dtype, self._source_dtype = dtype, source_dtype
        wire = Wire.between(source_dtype.itemsize, dtype.itemsize, source_dtype != dtype)
        self._schedule = Schedule.build(plans, endpoints.source, endpoints.target, self._transport.rank, wire,
                                        budget.bytes_per_peer)
        source_shapes = {name: plan.source_shard_shapes for name, plan in plans.items()}
        target_shapes = {name: plan.target_shard_shapes for name, plan in plans.items()}
        self._sources = shards_of(source_shapes, endpoints.source, self._transport.rank, self._schedule.source_extents)
        self._targets = shards_of(target_shapes, endpoints.target, self._transport.rank, self._schedule.target_extents)
        settings = {
            'dtype': str(dtype),
            'source dtype': str(source_dtype),
            'bytes per peer': str(budget.bytes_per_peer),
            # Where ranks bind a location to one another, each would leave its copy to the other one.
            'digest of the endpoints': endpoints.digest()
        }
        return Terms(settings, self._schedule.send_digests, self._schedule.receive_digests)

    def _bind(self, source_buffers, target_buffers) -> Bound:
        """The views of this call's buffers that bytes move from and to; refuses buffers before any byte moves."""
        if not self._is_named:
            source_buffers, target_buffers = {'': source_buffers}, {'': target_buffers}
        sources, targets = collect('source', source_buffers), collect('target', target_buffers)
        signatures = (signature(sources), signature(targets))
        if signatures != self._checked:
            self._checked = None
            check_buffers('source', sources, self._sources, self._source_dtype)
            check_buffers('target', targets, self._targets, self._dtype)
            check_disjoint(sources, targets)
            self._lay_out(sources, targets)
            self._checked = signatures
        return self._layout.bind(sources, targets)

    def _lay_out(self, sources: Tensors, targets: Tensors) -> None:
        """Make a layout for these buffers, unless the present one serves them."""
        if self._layout is not None and self._layout.geometry == geometry_of(sources, targets):
            return
        self._layout = None  # its arenas are given back before new ones are taken
        self._layout = lay_out(self._schedule, self._source_dtype, self._dtype, sources, targets)
        schedule, itemsize = self._schedule, self._schedule.wire.itemsize
        self._stats = TransferStats(segments=schedule.segments,
                                    chunks=schedule.chunks,
                                    rounds=schedule.rounds,
                                    local_copy_bytes=sum(chunk.numel
                                                         for chunk in schedule.local) * self._dtype.itemsize,
                                    sent_bytes=schedule.sent_numel * itemsize,
                                    received_bytes=schedule.received_numel * itemsize,
                                    peak_host_staging_bytes=self._layout.arena_bytes,
                                    peak_device_staging_bytes=0,
                                    seconds=0.)


class _Queue:
    """One peer's messages in one direction, of which at most ``depth`` are under way at any time."""

    def __init__(self, transport: Transport, peer: int, loads: List[Load], depth: int):
        self._transport, self._peer = transport, peer
        self._waiting: Deque[Load] = deque(loads)
        self._under_way: Deque[Tuple[Load, PendingMessage]] = deque()
        self._depth = depth

    def fill(self) -> None:
        while self._waiting and len(self._under_way) < self._depth:
            load = self._waiting.popleft()
            self._under_way.append((load, self._start(load)))

    def advance(self) -> None:
        """Wait for the oldest message under way, if any, and start the next one in its place."""
        if not self._under_way:
            return
        load, pending = self._under_way.popleft()
        try:
            pending.wait()
        except RuntimeError as error:
            raise RuntimeError(f'{self._doing} rank {self._peer}: {error}') from error
        self._finish(load)
        self.fill()


class _SendQueue(_Queue):
    _doing = 'sending to'

    def _start(self, load):
        for part, view in load.copies:
            part.copy_(view)
        return self._transport.send(load.tensor, self._peer)

    def _finish(self, load):
        pass


class _ReceiveQueue(_Queue):
    _doing = 'receiving from'

    def _start(self, load):
        return self._transport.receive(load.tensor, self._peer)

    def _finish(self, load):
        for part, view in load.copies:
            view.copy_(part)


def _move(bound: Bound, transport: Transport, depth: int) -> None:
    """Move everything: receives are posted before sends are packed, and local copies fill the waits."""
    queues = [_ReceiveQueue(transport, peer, loads, depth) for peer, loads in bound.receives.items()]
    queues += [_SendQueue(transport, peer, loads, depth) for peer, loads in bound.sends.items()]
    for queue in queues:
        queue.fill()
    rounds = max([len(loads) for side in (bound.sends, bound.receives) for loads in side.values()], default=1)
    for number in range(rounds):
        for target, source in bound.local[number::rounds]:
            target.copy_(source)
        for queue in queues:
            queue.advance()
