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
is undefined, and neither the executor nor the group can be used again. Another exchange ends each ``execute``, so a
rank without any traffic to the lost one learns of it too. When a rank dies within that very exchange, some survivors
may return, with all of their targets written, and learn of it in their next call. A rank that is done waits for the
others in it, so the timeout must be longer than any one ``execute``. Over NCCL a lost peer is noticed by PyTorch's
watchdog, which by default ends the process instead.

*Bound.* Messages are staged in at most

    bytes_per_peer * (min(S, max_active_peers) + min(R, max_active_peers) + L)

bytes of host memory, and in at most as many of device memory, where S and R are the peers that this rank sends to and
receives from, and L is 1 when it copies between host and device memory of its own, else 0. Only messages that must be
packed, converted or brought from one memory into the other count: one that is a single run of elements in this rank's
buffer, in the form and memory in which they travel, is sent from or received into the buffer itself. Where neither
buffers nor messages are in device memory, none of it is used. Peers that this rank shares memory with count apart: to
them it stages in at most ``bytes_per_peer * min(H, max_active_peers)`` bytes of shared memory, where H are those it
sends to, and S and R the others. The stats tell what was really allocated.

*Residency.* Each buffer may be in pageable or pinned host memory or on the accelerator. Messages lie in the memory
that the group's backends take; where they take both, in device memory if all of the sender's sources and all of the
receiver's targets do, else in host memory. Copies within this process stay in device memory when both ends are there.
Ranks of one host whose buffers are all in host memory share memory in place of sending messages to one another.
When the kind or the strides of a rank's buffers change, that call lays messages out anew.

*Concurrency.* Messages are handed over in windows, in which no rank has more than ``max_active_peers`` peers in one
direction, nor more than one message to or from each. A window begins while the one before it travels, so half of a
peer's budget is on the wire while the other half is packed or unpacked; windows that stage nothing may overlap as long
as no more than ``4 * max_active_peers`` messages are under way.

*Numbers.* Values become what ``tensor.to(dtype)`` makes of them, converted once: by the sender when the target's
elements are no larger than the source's, else by the receiver. (NaN stays NaN; which bits it has is torch's affair.)
"""

import time
from contextlib import contextmanager
from dataclasses import replace
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from .affine_transfer import TransferPlan
from .affine_transfer_agreement import Agreement, Refused, ranks_text
from .affine_transfer_buffers import BufferKey, signature
from .affine_transfer_memory import (HOST, PAGEABLE, PINNED, accelerator_device, may_send_device_memory, memory_of,
                                     residency_of, wire_memory_by_peer)
from .affine_transfer_mover import Mover
from .affine_transfer_part import Part, StagingBudget, TransferEndpoints, TransferStats
from .affine_transfer_schedule import AffineTransferExecutionError
from .affine_transfer_shared import SharedSlots
from .affine_transfer_staging import Layout, lay_out
from .affine_transfer_transport import lock_over, refuse_within, transport_over
from .affine_transfer_windows import Window, windows_of

__all__ = [
    'AffineTransferExecutionError', 'AffineTransferExecutor', 'StagingBudget', 'TransferEndpoints', 'TransferStats',
    'execute_transfer'
]

Buffers = Union[Mapping[int, torch.Tensor], Mapping[str, Mapping[int, torch.Tensor]]]


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


class _Geometry(NamedTuple):
    """What a layout depends on of this rank's buffers; ``device`` is the accelerator's, None where it is not used."""
    device: Optional[torch.device]
    forms: Dict[BufferKey, Tuple[torch.Size, Tuple[int, ...]]]
    memory: Dict[BufferKey, str]
    residency: int

    @classmethod
    def of(cls, buffers: Mapping[BufferKey, torch.Tensor], device: Optional[torch.device]) -> '_Geometry':
        forms = {key: (tensor.shape, tensor.stride()) for key, tensor in buffers.items()}
        memory = {key: memory_of(tensor, device is not None) for key, tensor in buffers.items()}
        return cls(device, forms, memory, residency_of(memory))


class _Ready(NamedTuple):
    """A layout, and what it was made for: this rank's geometry, and where all ranks' buffers are if that matters."""
    geometry: _Geometry
    residencies: Optional[List[int]]
    layout: Layout
    stats: TransferStats


class AffineTransferExecutor:
    """A transfer made ready once, to be executed many times.

    ``plans`` is one TransferPlan, or a dict of them by parameter name; all parameters share messages. Buffers of
    ``source_dtype`` (``dtype`` when left out) become values of ``dtype``. ``group`` is a process group object whose
    ranks the endpoints name, inside or outside the default world; without one, all copies are within this process.
    Constructed by every rank of the group. Raises AffineTransferExecutionError on all of them when one refuses (a
    budget below one element, a location bound to no rank of the group, ...), or when they disagree; TypeError for what
    is no group that this process could exchange messages with.
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
        self._lock = lock_over(group)
        self._budget = budget
        self._part: Optional[Part] = None
        self._mover: Optional[Mover] = None
        # Of the buffers that passed the checks last.
        self._signature: Optional[Tuple] = None
        self._geometry: Optional[_Geometry] = None
        self._host = 0
        self._shared: Optional[SharedSlots] = None
        self._windows: Sequence[Window] = ()
        self._ready: Optional[_Ready] = None
        self._broken: Optional[str] = None
        self._doing = 'the ranks could not agree on a transfer, nothing was moved'
        refuse_within(self._lock)
        with self._lock, self._giving_up():
            fault, terms = None, None
            try:
                self._part = Part.of(plans, endpoints, source_dtype or dtype, dtype, budget, self._transport)
                # Twice as many messages under way as one window may have.
                self._mover = Mover(self._transport, self._part.schedule.depth, 4 * budget.max_active_peers)
                self._host = self._transport.host if budget.share_memory else 0
                terms = self._part.terms
            except Exception as error:
                fault = error
            try:
                self._agreement.construct(fault, terms)
            finally:
                fault = None  # whose traceback leads to this frame, and with it to itself

    def execute(self, source_buffers: Buffers, target_buffers: Buffers) -> TransferStats:
        """Write the values of all ranks' source buffers into their target buffers. Called by every rank.

        Buffers are ``{location: tensor}``, or ``{name: {location: tensor}}`` for named plans. A tensor has the shape
        of its shard, or is flat and has as many elements. Its strides are free, as long as each one steps over all
        that the smaller ones reach. It may be in host memory, pageable or pinned, or on the accelerator's current
        device. Buffers without elements are ignored.
        Calls from several threads take turns, as do those of all executors of one group object; a call from within
        another one, as a signal handler's can be, raises RuntimeError.
        Device buffers are read and written after what is queued on the current stream. Host buffers are read and
        written at once, so copies of the caller's own to or from pinned ones must be over. On return sources may be
        overwritten and targets read, by the host and on any stream.
        Raises AffineTransferExecutionError: on all ranks, with targets untouched, when one of them refuses; with
        targets undefined where the text says that the transfer failed after it began.
        """
        refuse_within(self._lock)
        # Targets may be inference tensors, which can be written only in this mode; others are written as ever.
        with self._lock, torch.inference_mode():
            if self._broken:
                raise AffineTransferExecutionError(f'this executor can no longer be used: {self._broken}')
            started = time.perf_counter()
            self._doing = 'transfer failed before it began, targets are untouched'
            with self._giving_up():
                buffers = self._open(source_buffers, target_buffers)
                self._doing = 'transfer failed after it began, targets are undefined'
                self._void_what_autograd_saved(buffers)
                self._mover.move(self._ready.layout.bound(buffers))
                self._agreement.close()
            return replace(self._ready.stats, seconds=time.perf_counter() - started)

    def _void_what_autograd_saved(self, buffers: Mapping[BufferKey, torch.Tensor]) -> None:
        """Let a backward that needs a target's old values fail; what is received, no operator of torch writes."""
        for key, tensor in buffers.items():
            if key[0] == 'target' and self._part.shards[key].extent > 0:
                torch.autograd.graph.increment_version(tensor)

    @contextmanager
    def _giving_up(self):
        """Whatever fails but a refusal, which all ranks share, ends this executor and lets its peers know at once."""
        try:
            yield
        except Refused as refused:
            raise AffineTransferExecutionError(str(refused)) from refused.__cause__
        except BaseException as error:
            self._broken = f'{self._doing}: {str(error) or type(error).__name__}'
            try:
                if self._shared is not None:
                    self._shared.abandon()
                gone = self._transport.abandon()
                if gone:
                    self._broken += f'; no longer reachable: {ranks_text(gone)}'
                # Buffers may be freed once this has raised. What waits for peers on a stream was ended by the above.
                if self._mover is not None:
                    self._mover.until_done()
            except Exception as second:
                self._broken += f'; giving up failed as well: {second}'
            finally:
                # It keeps messages that were under way, and with them buffers.
                self._mover = self._ready = self._shared = None
            if not isinstance(error, Exception):
                raise
            raise AffineTransferExecutionError(self._broken) from error

    def _open(self, source_buffers, target_buffers) -> Mapping[BufferKey, torch.Tensor]:
        """This call's buffers, once all ranks have accepted theirs and have laid their messages out for them."""
        fault, buffers, residency, host, lays_out = None, {}, 0, 0, False
        try:
            try:
                buffers = self._accept(source_buffers, target_buffers)
                residency = self._geometry.residency
                host = self._host if self._geometry.device is None else 0
                lays_out = self._ready is None or self._ready.geometry != self._geometry
            except Exception as error:
                fault = error
            opening = self._agreement.open(fault, residency, host, lays_out)
            if opening.lays_out:
                self._share(opening.hosts)
                try:
                    self._lay_out(buffers, opening.residencies)
                except Exception as error:
                    fault = error
                self._agreement.ready(fault)
                if len(self._transport.memory) > 1 and may_send_device_memory(opening.residencies):
                    self._transport.connect_devices()
            return buffers
        finally:
            fault = None  # whose traceback leads to this frame, and with it to itself and to buffers

    def _accept(self, source_buffers, target_buffers) -> Mapping[BufferKey, torch.Tensor]:
        """The buffers of both sides, checked unless the last ones were like them."""
        buffers = self._part.collect(source_buffers, target_buffers)
        uses_device = HOST not in self._transport.memory or not all(tensor.is_cpu for tensor in buffers.values())
        device = accelerator_device() if uses_device else None
        seen = (device, signature(buffers))
        if seen != self._signature:
            self._signature = None
            self._part.check(buffers)
            self._geometry = _Geometry.of(buffers, device)
            self._signature = seen
        return buffers

    def _share(self, hosts: List[int]) -> None:
        """Set up what is shared with others of this rank's host, unless that at hand serves for these hosts of all."""
        if self._shared is not None and self._shared.hosts == hosts:
            return
        # The old slots are given back before new ones are taken.
        self._ready = self._shared = None
        transport, most = self._transport, self._budget.max_active_peers
        name = f'deepspeed-affine-transfer-{self._agreement.executor:016x}'
        self._shared = SharedSlots.agreed(hosts, self._agreement.share, transport.rank, self._part.schedule, most,
                                          name, transport.timeout_s)
        self._windows = windows_of(self._shared.schedule, transport.rank, transport.size, most)
        if self._shared.hosts[transport.rank] != hosts[transport.rank]:
            self._host = 0

    def _lay_out(self, buffers: Mapping[BufferKey, torch.Tensor], residencies: List[int]) -> None:
        """Make a layout for these buffers and what peers have, unless the present one serves them."""
        memory, geometry, schedule = self._transport.memory, self._geometry, self._shared.schedule
        mattering = residencies if len(memory) > 1 else None
        if self._ready is not None and self._ready[:2] == (geometry, mattering):
            return
        # The old layout's slots are given back before new ones are taken.
        self._ready = None
        if geometry.device is not None:
            self._mover.prepare_device(geometry.device)
        wire_memory = wire_memory_by_peer(memory, residencies, self._transport.rank, schedule.sends, schedule.receives)
        layout = lay_out(self._shared, self._windows, self._part.wire_dtype, buffers, geometry.memory, wire_memory,
                         PAGEABLE if geometry.device is None else PINNED)
        stats = self._part.stats(schedule, len(self._windows), layout.host_staging_bytes, layout.device_staging_bytes)
        self._ready = _Ready(geometry, mattering, layout, stats)
