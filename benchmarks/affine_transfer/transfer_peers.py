# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What people use today for the jobs of the transfer benchmark."""

import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from deepspeed.utils import safe_get_full_fp32_param

from transfer_jobs import TRAINERS, Region
from transfer_methods import Method, MethodMissing, plans_of, processes_of, require_conversion, window

SHARED_MEMORY = Path('/dev/shm')


class Gather(Method):
    """DeepSpeed gathers each parameter, trainer 0 broadcasts it, and who needs a part of it cuts it out.

    Trainers that are targets have gathered it themselves. Elements are converted before they are broadcast.
    """
    name = 'gather + broadcast + slice'

    def __init__(self, participant):
        super().__init__(participant)
        members = [0, *range(TRAINERS, participant.job.processes)]
        self._group = participant.meeting.group_of(members) if participant.rank in members else None
        self._parameters = dict(participant.engine.module.named_parameters()) if participant.engine else {}

    def run(self):
        job = self.participant.job
        for name, shape in job.shapes.items():
            if self.participant.engine:
                full = safe_get_full_fp32_param(self._parameters[name]).to(job.dtype)
            else:
                full = torch.empty(shape, dtype=job.dtype)
            if self._group is not None:
                self._group.broadcast(full, 0).wait()
            if self.participant.target is not None:
                part = job.target_region(name, self.participant.target).of(full)
                self.participant.targets[name].copy_(part)


class Checkpoint(Method):
    """torch.distributed.checkpoint: trainers save the converted masters to files in memory, targets load their part.

    The trainers agree on what they save; each target reads on its own.
    """
    name = 'checkpoint through /dev/shm'

    @classmethod
    def prepare(cls, participant):
        if not Path(participant.meeting.folder).is_relative_to(SHARED_MEMORY):
            raise MethodMissing(f'{SHARED_MEMORY} is not there')

    def __init__(self, participant):
        super().__init__(participant)
        self._folder = Path(participant.meeting.folder, 'checkpoint')

    def run(self):
        job, source, target = self.participant.job, self.participant.source, self.participant.target
        if source is not None:
            regions = {name: job.source_region(name, source) for name in job.shapes}
            saved = {
                name: _Part(self.participant.sources[name].to(job.dtype).view(region.sizes), region)
                for name, region in regions.items()
            }
            dcp.save(saved, checkpoint_id=self._folder)
            del saved
        self.participant.meeting.barrier()
        if target is not None:
            regions = {name: job.target_region(name, target) for name in job.shapes}
            parts = {name: _Part(self.participant.targets[name], region) for name, region in regions.items()}
            with warnings.catch_warnings():
                # That no world takes part.
                warnings.simplefilter('ignore', UserWarning)
                dcp.load(parts, checkpoint_id=self._folder, no_dist=True)

    def reset(self):
        super().reset()
        self.participant.meeting.barrier()
        if self.participant.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def file_bytes(self):
        return sum(path.stat().st_size for path in self._folder.iterdir()) if self.participant.rank == 0 else 0


class _Part(torch.Tensor):
    """A process's region of a tensor as checkpoints see it: nothing but its place and, when asked, ``held``."""

    @staticmethod
    def __new__(cls, held: torch.Tensor, region: Region):
        part = torch.Tensor._make_wrapper_subclass(cls, region.full_shape, dtype=held.dtype)
        part.held, part.region = held, region
        return part

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f'{function} on a part of a checkpoint')

    def __create_chunk_list__(self):
        offsets, sizes = torch.Size(self.region.offsets), torch.Size(self.region.sizes)
        return [ChunkStorageMetadata(offsets=offsets, sizes=sizes)] if self.held.numel() > 0 else []

    def __create_write_items__(self, name, _):
        return [
            WriteItem(index=MetadataIndex(name, chunk.offsets),
                      type=WriteItemType.SHARD,
                      tensor_data=TensorWriteData(chunk=chunk,
                                                  properties=TensorProperties.create_from_tensor(self.held),
                                                  size=torch.Size(self.region.full_shape)))
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index):
        return self.held


class Megatron(Method):
    """Megatron-Core's execute_reshard_plan over gloo, moving the planner's segments.

    It moves between parameters of one dtype, so each run begins by converting the masters. Every segment is a
    parameter of its own there, a view of its buffer.
    """
    name = 'Megatron-Core'

    @classmethod
    def prepare(cls, participant):
        _Megatron(participant.meeting)

    def __init__(self, participant):
        super().__init__(participant)
        megatron = _Megatron(participant.meeting)
        dtype, rank = participant.job.dtype, participant.rank
        self._masters = participant.sources
        # The masters themselves where nothing is converted.
        self._converted = {name: master.to(dtype) for name, master in self._masters.items()}
        sends, receives = [], []
        self._modules = torch.nn.Module(), torch.nn.Module()
        for name, plan in sorted(plans_of(participant).items()):
            for segment in plan.segments:
                source, target = processes_of(participant, segment)
                task = len(sends) + len(receives)
                if source == rank:
                    view = window(self._converted[name], segment.shape, segment.source_offset, segment.source_strides)
                    sends.append(megatron.operation(self._modules[0], view, target, task, is_send=True))
                if target == rank:
                    view = window(participant.targets[name], segment.shape, segment.target_offset,
                                  segment.target_strides)
                    receives.append(megatron.operation(self._modules[1], view, source, task, is_send=False))
        self._execute = megatron.executor(sends, receives)

    def run(self):
        if self.participant.job.converts:
            for name, master in self._masters.items():
                self._converted[name].copy_(master)
        self._execute(*self._modules)


class MegatronOfConverted(Megatron):
    """The same from a converted copy of the masters, made beforehand and kept."""
    name = 'Megatron-Core, conversion not counted'

    @classmethod
    def prepare(cls, participant):
        require_conversion(participant.job)
        super().prepare(participant)

    def run(self):
        self._execute(*self._modules)


class _Megatron:
    """Megatron-Core in a process without CUDA, whose default world is not the one to transfer in.

    Its modules get ``_World`` for torch.distributed, and its copy service no CUDA stream.
    """

    def __init__(self, meeting):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')
                from megatron.core.resharding import execution, utils
                from megatron.core.resharding.copy_services import gloo_copy_service
        except ImportError as error:
            raise MethodMissing(f'megatron-core is not installed: {error}') from error
        self._plan, self._operation, self._run = utils.ReshardPlan, utils.TransferOp, execution.execute_reshard_plan
        execution.dist = gloo_copy_service.dist = _World(meeting)

        class Service(gloo_copy_service.GlooCopyService):

            def __init__(self):
                self.rank, self.world_size, self.gloo_pg = meeting.rank, meeting.size, meeting.group
                self.send_ops, self.recv_ops = [], []
                self._copy_stream = None

        self._service = Service()

    def operation(self, module: torch.nn.Module, view: torch.Tensor, peer: int, task: int, is_send: bool):
        name = f'segment {len(list(module.parameters()))}'
        module.register_parameter(name, torch.nn.Parameter(view, requires_grad=False))
        return self._operation(name, peer, is_send, my_slice=(..., ), peer_slice=(..., ), task_id=task)

    def executor(self, sends, receives):
        plan = self._plan(send_ops=sends, recv_ops=receives)
        return lambda source, target: self._run(plan, source, target, service=self._service)


class _World:
    """What Megatron-Core asks of torch.distributed, answered by a group that is no default world, as gloo would."""

    def __init__(self, meeting):
        self._meeting = meeting

    def P2POp(self, operation, tensor, peer, group):
        return operation, tensor, peer

    def isend(self, tensor, peer):
        return self._meeting.group.send([tensor], peer, 0)

    def irecv(self, tensor, peer):
        return self._meeting.group.recv([tensor], peer, 0)

    def batch_isend_irecv(self, operations):
        return [operation(tensor, peer) for operation, tensor, peer in operations]

    def barrier(self):
        self._meeting.barrier()
