# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One rank's part of a transfer: compiled from what its executor is asked for, and what it asks of buffers."""

import hashlib
from dataclasses import dataclass
from numbers import Integral
from operator import index
from typing import Dict, Mapping

import torch

from .affine_transfer import TransferPlan
from .affine_transfer_agreement import Terms
from .affine_transfer_buffers import BufferKey, Shard, check_buffers, check_disjoint, collect, shards_of
from .affine_transfer_memory import PAGEABLE, Copies, arena, copy
from .affine_transfer_schedule import AffineTransferExecutionError, Schedule, Wire, cutting_of_messages
from .affine_transfer_transport import Transport

__all__ = ['Part', 'StagingBudget', 'TransferEndpoints', 'TransferStats']


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
    """The bytes of staging that one peer may occupy on this rank in one direction, and how many peers a rank may send
    to, and receive from, in one window; both equal on every rank.

    A rank that copies between host and device memory of its own counts as one peer more. With ``share_memory``,
    messages between ranks of one host that all have it, and whose buffers are in host memory, are staged in memory
    that both have mapped instead of being sent. It is the sender's, and counts there alone.
    """
    bytes_per_peer: int = 1 << 24
    max_active_peers: int = 16
    share_memory: bool = True

    def __post_init__(self):
        if not isinstance(self.share_memory, bool):
            raise AffineTransferExecutionError(f'share_memory must be a bool, not {self.share_memory!r}')
        for name in ('bytes_per_peer', 'max_active_peers'):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise AffineTransferExecutionError(f'{name} must be a positive integer, not {value!r}')
            object.__setattr__(self, name, int(value))


@dataclass(frozen=True)
class TransferStats:
    """What one ``execute`` did on this rank.

    A chunk is a segment or a part of one that was cut; a round is at most one message to and from each active peer, so
    a rank that only copies has none.
    Sent and received bytes are those that travelled, through shared memory too; locally copied ones are counted in the
    target's dtype.
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


@dataclass(frozen=True)
class Part:
    """One rank's part of a transfer, as far as the arguments of its construction tell."""
    is_named: bool
    dtype_by_side: Mapping[str, torch.dtype]
    schedule: Schedule
    shards: Mapping[BufferKey, Shard]
    terms: Terms

    @classmethod
    def of(cls, plans, endpoints: TransferEndpoints, source_dtype, dtype, budget: StagingBudget,
           transport: Transport) -> 'Part':
        """The part of this process. Raises AffineTransferExecutionError for arguments that cannot be meant."""
        is_named = isinstance(plans, Mapping)
        plans = plans if is_named else {'': plans}
        for name, plan in plans.items():
            if not isinstance(name, str) or not isinstance(plan, TransferPlan):
                raise AffineTransferExecutionError(f'plans must be a TransferPlan or a dict of them by name, but '
                                                   f'{name!r} has a {type(plan).__name__}')
        _check_dtypes(source_dtype, dtype)
        for what, value, expected in (('endpoints', endpoints, TransferEndpoints), ('budget', budget, StagingBudget)):
            if not isinstance(value, expected):
                raise AffineTransferExecutionError(
                    f'{what} must be of type {expected.__name__}, not {type(value).__name__}')
        endpoints.check_ranks(transport.size)
        wire = Wire.between(source_dtype.itemsize, dtype.itemsize, source_dtype != dtype)
        schedule = Schedule.build(plans, endpoints.source, endpoints.target, transport.rank, wire,
                                  budget.bytes_per_peer)
        source_shapes = {name: plan.source_shard_shapes for name, plan in plans.items()}
        target_shapes = {name: plan.target_shard_shapes for name, plan in plans.items()}
        settings = {
            'dtype': str(dtype),
            'source dtype': str(source_dtype),
            'bytes per peer': str(budget.bytes_per_peer),
            'max active peers': str(budget.max_active_peers),
            'memory of messages': ' and '.join(sorted(transport.memory)),
            'cutting of messages': cutting_of_messages(),
            # Where ranks bind a location to one another, each would leave its copy to the other one.
            'digest of the endpoints': endpoints.digest()
        }
        return cls(is_named=is_named,
                   dtype_by_side={
                       'source': source_dtype,
                       'target': dtype
                   },
                   schedule=schedule,
                   shards={
                       **shards_of('source', source_shapes, endpoints.source, transport.rank, schedule.source_extents),
                       **shards_of('target', target_shapes, endpoints.target, transport.rank, schedule.target_extents)
                   },
                   terms=Terms(settings, schedule.send_digests, schedule.receive_digests))

    @property
    def wire_dtype(self) -> torch.dtype:
        return self.dtype_by_side['source' if self.schedule.wire.source_is_wire else 'target']

    def collect(self, source_buffers, target_buffers) -> Dict[BufferKey, torch.Tensor]:
        """The buffers of both sides; refuses what is no dict of tensors."""
        if not self.is_named:
            source_buffers, target_buffers = {'': source_buffers}, {'': target_buffers}
        return {**collect('source', source_buffers), **collect('target', target_buffers)}

    def check(self, buffers: Mapping[BufferKey, torch.Tensor]) -> None:
        """Refuse buffers that cannot stand for this rank's shards."""
        check_buffers(buffers, self.shards, self.dtype_by_side)
        check_disjoint(buffers)

    def stats(self, schedule: Schedule, rounds: int, host_staging_bytes: int,
              device_staging_bytes: int) -> TransferStats:
        """What every call does that goes by ``schedule`` and stages so much; the seconds are left to it."""
        itemsize = schedule.wire.itemsize
        local_numel = sum(chunk.numel for chunk in schedule.local)
        return TransferStats(segments=schedule.segments,
                             chunks=schedule.chunks,
                             rounds=rounds,
                             local_copy_bytes=local_numel * self.dtype_by_side['target'].itemsize,
                             sent_bytes=schedule.sent_numel * itemsize,
                             received_bytes=schedule.received_numel * itemsize,
                             peak_host_staging_bytes=host_staging_bytes,
                             peak_device_staging_bytes=device_staging_bytes,
                             seconds=0.)


def _check_dtypes(source_dtype, dtype) -> None:
    if not isinstance(dtype, torch.dtype) or not isinstance(source_dtype, torch.dtype):
        raise AffineTransferExecutionError(f'dtypes must be torch dtypes, not {dtype!r} and {source_dtype!r}')
    try:
        copy(Copies([arena(1, dtype, PAGEABLE)], [arena(1, source_dtype, PAGEABLE)]))
    except Exception as error:
        raise AffineTransferExecutionError(
            f'torch cannot copy values of {source_dtype} into {dtype}: {error}') from error
