# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ways to do a job of the transfer benchmark: what all have in common, ours, and the bare movement of its bytes."""

import functools
from collections import Counter
from typing import Dict, List, Mapping, NamedTuple, Sequence, Tuple

import torch

from deepspeed.checkpoint.affine_transfer import TransferPlan, plan_model
from deepspeed.checkpoint.affine_transfer_executor import AffineTransferExecutor, StagingBudget, TransferEndpoints

from transfer_jobs import TRAINERS, Job, Participant

BYTES_PER_PEER = StagingBudget().bytes_per_peer


class MethodMissing(Exception):
    """A method cannot run here; the text says why."""


class Method:
    """One way to do a job. Every process makes its own and calls each function when all others do.

    A constructor does what is done once before many transfers. ``run`` is what is timed. ``reset`` makes the whole
    outcome of the run before it wrong, ``spoil`` one element of it, ``wrong_elements`` counts what is wrong.
    """
    name: str

    @classmethod
    def prepare(cls, participant: Participant) -> None:
        """Import what the method needs. Raises MethodMissing, on all processes alike, where it cannot run."""

    def __init__(self, participant: Participant):
        self.participant = participant

    def run(self) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        self.participant.spoil_targets()

    def spoil(self) -> None:
        if self.participant.rank == self.participant.job.processes - 1:
            self.participant.flat_target[-1] += 1

    def wrong_elements(self) -> int:
        return self.participant.wrong_elements()

    def file_bytes(self) -> int:
        """What this process keeps in files that lie in memory."""
        return 0


def require_conversion(job: Job) -> None:
    """Raises MethodMissing for a job whose values keep their dtype."""
    if not job.converts:
        raise MethodMissing('this job converts nothing')


@functools.lru_cache(maxsize=None)
def plans_of(participant: Participant) -> Mapping[str, TransferPlan]:
    """The process's part of the plans, planned once for all methods that move the planner's segments."""
    return _plan(participant)


def _plan(participant: Participant) -> Dict[str, TransferPlan]:
    return plan_model(participant.job.target_maps(),
                      participant.source_maps,
                      source_ranks=[] if participant.source is None else [participant.source],
                      target_ranks=[] if participant.target is None else [participant.target])


def processes_of(participant: Participant, segment) -> Tuple[int, int]:
    """The process that holds a segment's source, and the one that holds its target."""
    return segment.source_rank, participant.job.target_ranks[segment.target_rank]


def window(buffer: torch.Tensor, shape, offset: int, strides) -> torch.Tensor:
    """A box of a buffer, ``offset`` elements from its first one."""
    return buffer.as_strided(shape, strides, buffer.storage_offset() + offset)


def peers_of(participant: Participant) -> int:
    """How many processes this one sends to, and how many it receives from, together."""
    pairs = {
        processes_of(participant, segment)
        for plan in plans_of(participant).values()
        for segment in plan.segments
    }
    return sum(source != target for source, target in pairs)


class LaterCalls(Method):
    """``execute`` of an executor that was made before, on the buffers it knows."""
    name = 'ours, later calls'
    shares_memory = True

    def __init__(self, participant):
        super().__init__(participant)
        self._executor = _make_executor(participant, self.shares_memory)
        self._buffers = _buffers_of(participant)
        self.run()

    def run(self):
        self.staging_bytes = self._executor.execute(*self._buffers).peak_host_staging_bytes


class LaterCallsOverGloo(LaterCalls):
    """The same between processes that share no memory, as on several hosts."""
    name = 'ours over gloo, later calls'
    shares_memory = False


class FirstCall(Method):
    """From the maps on: planning, agreeing, and the first ``execute``."""
    name = 'ours, first call'

    def run(self):
        _make_executor(self.participant).execute(*_buffers_of(self.participant))


def _make_executor(participant: Participant, shares_memory: bool = True) -> AffineTransferExecutor:
    endpoints = TransferEndpoints(source={trainer: trainer
                                          for trainer in range(TRAINERS)},
                                  target=participant.job.target_ranks)
    return AffineTransferExecutor(_plan(participant),
                                  endpoints,
                                  source_dtype=torch.float32,
                                  dtype=participant.job.dtype,
                                  budget=StagingBudget(share_memory=shares_memory),
                                  group=participant.group)


def _buffers_of(participant: Participant):
    sources = {name: {participant.source: master} for name, master in participant.sources.items()}
    targets = {name: {participant.target: shard} for name, shard in participant.targets.items()}
    return sources, targets


class Memcpy(Method):
    """Every process copies as many bytes as its targets have, from one piece of its own memory into another."""
    name = 'memcpy'

    def run(self):
        self.participant.copy_expected()


class Message(NamedTuple):
    """A contiguous tensor that travels, and (part of it, view of a buffer) pairs that are packed or unpacked."""
    tensor: torch.Tensor
    copies: Sequence[Tuple[torch.Tensor, torch.Tensor]] = ()


def exchange(group, sends: Mapping[int, Sequence[Message]], receives: Mapping[int, Sequence[Message]],
             local: Sequence[Tuple[torch.Tensor, torch.Tensor]], in_flight: int) -> None:
    """The loop that a person writes: messages to and from each peer in order, ``in_flight`` of each at a time.

    A send is packed before and a receive unpacked after it travels, while others do. Message i may use the memory of
    message i - ``in_flight`` to or from the same peer. ``local`` has (target, source) pairs.
    """
    sending = {peer: [] for peer in sends}
    receiving = {peer: [] for peer in receives}
    steps = max((len(queue) for side in (sends, receives) for queue in side.values()), default=0)
    for step in range(steps + in_flight - 1):
        for peer, queue in receives.items():
            if step < len(queue):
                receiving[peer].append(group.recv([queue[step].tensor], peer, 0))
        for peer, queue in sends.items():
            if step < len(queue):
                if step >= in_flight:
                    sending[peer][step - in_flight].wait()
                for part, view in queue[step].copies:
                    part.copy_(view)
                sending[peer].append(group.send([queue[step].tensor], peer, 0))
        if step == 0:
            for target, source in local:
                target.copy_(source)
        arrived = step - in_flight + 1
        for peer, queue in receives.items():
            if 0 <= arrived < len(queue):
                receiving[peer][arrived].wait()
                for part, view in queue[arrived].copies:
                    view.copy_(part)
    for works in sending.values():
        for work in works[-in_flight:]:
            work.wait()


class Bare(Method):
    """As many bytes between the same processes, from one piece of memory into another, and nothing else.

    What stays within a process is one copy. What comes from each process lies in ``flat_target``, one after another.
    """
    message_bytes: int

    def __init__(self, participant):
        super().__init__(participant)
        outgoing, incoming = Counter(), Counter()
        for plan in plans_of(participant).values():
            for segment in plan.segments:
                source, target = processes_of(participant, segment)
                if source == participant.rank:
                    outgoing[target] += segment.numel
                if target == participant.rank:
                    incoming[source] += segment.numel
        dtype, rank = participant.job.dtype, participant.rank
        parts = participant.flat_target.split([incoming[peer] for peer in sorted(incoming)])
        self._incoming = dict(zip(sorted(incoming), parts))
        outgoing = {peer: pattern(outgoing[peer], rank, dtype) for peer in sorted(outgoing)}
        self._sends = {peer: self._messages(whole) for peer, whole in outgoing.items() if peer != rank}
        self._receives = {peer: self._messages(whole) for peer, whole in self._incoming.items() if peer != rank}
        self._local = [(self._incoming[rank], outgoing[rank])] if rank in outgoing else []

    def _messages(self, whole: torch.Tensor) -> List[Message]:
        return [Message(part) for part in whole.split(self.message_bytes // whole.itemsize)]

    def run(self):
        exchange(self.participant.group, self._sends, self._receives, self._local, in_flight=2)

    def wrong_elements(self):
        return sum(
            int((part != pattern(part.numel(), peer, part.dtype)).sum()) for peer, part in self._incoming.items())


def pattern(numel: int, process: int, dtype: torch.dtype) -> torch.Tensor:
    """What ``process`` sends; bf16 holds these numbers exactly."""
    return torch.arange(process, process + numel, dtype=torch.int32).remainder_(251).to(dtype)


class BareMessages(Bare):
    name = 'bare, messages of 8 MiB'
    message_bytes = 8 << 20


class BareWhole(Bare):
    name = 'bare, one message'
    message_bytes = 1 << 40
