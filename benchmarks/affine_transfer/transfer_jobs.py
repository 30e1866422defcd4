# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The jobs of the transfer benchmark, and the oracle of what they must bring where.

Two trainers hold fp32 masters in a real DeepSpeed engine (ZeRO-3, CPU offload). Every element's value follows from its
parameter and its index in it; what a location must hold is a ``Region`` of it. Neither is worked out from maps or
plans.
"""

import json
import math
from abc import ABC, abstractmethod
from typing import Dict, List, Mapping, NamedTuple, Tuple

import torch

import deepspeed
from deepspeed.checkpoint.affine import ParamAffineMap, flat_range_map

from layouts import SPLIT_DIM_BY_LAYER, rollout_maps
from meeting import Meeting
from models import Shape

TRAINERS = 2

_ELEMENTS_PER_BLOCK = 1 << 20
_BITS_BY_ITEMSIZE = {2: torch.int16, 4: torch.int32}


class Region(NamedTuple):
    """A box of a parameter seen in ``full_shape``."""
    full_shape: Shape
    offsets: Shape
    sizes: Shape

    def of(self, full: torch.Tensor) -> torch.Tensor:
        box = tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes))
        return full.reshape(self.full_shape)[box]


class Job(ABC):
    """A model of ``shapes``, from the masters of two trainers, processes 0 and 1, to ``target_ranks``' processes.

    ``target_ranks`` gives the process of each target location.
    """
    name: str
    title: str
    processes: int
    dtype: torch.dtype
    target_ranks: Mapping[int, int]

    def __init__(self, shapes: Mapping[str, Shape]):
        self.shapes = dict(shapes)

    @property
    def converts(self) -> bool:
        """Whether values change their dtype on the way."""
        return self.dtype != torch.float32

    @abstractmethod
    def target_maps(self) -> Dict[str, ParamAffineMap]:
        """What every target location is to hold."""

    @abstractmethod
    def target_region(self, name: str, location: int) -> Region:
        """The same, for the oracle."""

    @abstractmethod
    def source_region(self, name: str, location: int) -> Region:
        """What a trainer holds of a parameter, in the ``full_shape`` of the target regions."""

    def values(self, name: str, start: int, numel: int) -> torch.Tensor:
        """The fp32 values of ``numel`` elements of a flattened parameter from ``start`` on.

        All 24 bits of the significand vary, so that a conversion must round.
        """
        result = torch.empty(numel, dtype=torch.float32)
        salt = list(self.shapes).index(name) * 0x5851F42D + 0x14057B7E
        for begin in range(0, numel, _ELEMENTS_PER_BLOCK):
            block = result[begin:begin + _ELEMENTS_PER_BLOCK]
            hashes = torch.arange(start + begin, start + begin + len(block), dtype=torch.int64)
            hashes.mul_(2654435761).add_(salt).bitwise_and_(0xFFFFFFFF).bitwise_right_shift_(8)
            block.copy_(hashes).div_(1 << 24).sub_(0.5)
        return result

    def master(self, name: str, trainer: int) -> torch.Tensor:
        """What ZeRO-3 gives a trainer of a flattened parameter: an equal share, the last one shorter."""
        numel = math.prod(self.shapes[name])
        share = -(-numel // TRAINERS)
        return self.values(name, trainer * share, min(share, numel - trainer * share))


class WeightSync(Job):
    name = 'weight-sync'
    title = 'ZeRO-3 fp32 masters on 2 trainers to bf16 tensor parallel shards on 2 other processes'
    processes = 4
    dtype = torch.bfloat16
    target_ranks = {0: 2, 1: 3}

    def target_maps(self):
        return rollout_maps(self.shapes, len(self.target_ranks), 1)

    def target_region(self, name, location):
        return self._part(name, SPLIT_DIM_BY_LAYER.get(name.split('.')[-2]), location)

    def source_region(self, name, location):
        return self._part(name, 0, location)

    def _part(self, name, split_dim, location):
        shape = self.shapes[name]
        offsets, sizes = [0] * len(shape), list(shape)
        if split_dim is not None:
            half, odd = divmod(shape[split_dim], 2)
            if odd:
                raise ValueError(f'{name} of shape {shape} cannot be halved along dimension {split_dim}')
            offsets[split_dim], sizes[split_dim] = half * location, half
        return Region(shape, tuple(offsets), tuple(sizes))


class Resize(Job):
    name = 'resize'
    title = 'ZeRO-3 fp32 masters on 2 processes to the layout of ZeRO-1 on these 2 and a third one'
    processes = 3
    dtype = torch.float32
    target_ranks = {0: 0, 1: 1, 2: 2}

    def __init__(self, shapes):
        super().__init__(shapes)
        self._first_element, total = {}, 0
        for name, shape in self.shapes.items():
            self._first_element[name] = total
            total += math.prod(shape)
        # ZeRO-1 pads its flat buffer to a multiple of twice the ranks.
        self._partition_numel = 2 * -(-total // (2 * len(self.target_ranks)))

    def target_maps(self):
        maps = {}
        for name, shape in self.shapes.items():
            ranges = {location: self._range(name, location) for location in self.target_ranks}
            maps[name] = flat_range_map(shape, {
                location: (begin, end - begin)
                for location, (begin, end) in ranges.items() if begin < end
            })
        return maps

    def target_region(self, name, location):
        begin, end = self._range(name, location)
        return Region((math.prod(self.shapes[name]), ), (begin, ), (end - begin, ))

    def source_region(self, name, location):
        numel = math.prod(self.shapes[name])
        share = -(-numel // TRAINERS)
        begin = location * share
        return Region((numel, ), (begin, ), (min(share, numel - begin), ))

    def _range(self, name, location) -> Tuple[int, int]:
        """Where the partition of ``location`` in the flat buffer meets a parameter: [begin, end) of its elements."""
        first, numel = self._first_element[name], math.prod(self.shapes[name])
        begin = location * self._partition_numel - first
        return min(max(begin, 0), numel), min(max(begin + self._partition_numel, 0), numel)


JOBS = {job.name: job for job in (WeightSync, Resize)}


class Participant:
    """What one process holds in a job; ``rank`` is its number.

    ``sources`` are this process's live masters (none where it is no trainer), ``targets`` its part of the target
    layout, name -> tensor each, its location being ``source`` and ``target`` (None without one). ``flat_target`` holds
    all targets of the process in one piece.
    """

    def __init__(self, job: Job, meeting: Meeting):
        self.job, self.meeting = job, meeting
        self.rank, self.group = meeting.rank, meeting.group
        self.source = self.rank if self.rank < TRAINERS else None
        self.target = {rank: location for location, rank in job.target_ranks.items()}.get(self.rank)
        self.engine, self.source_maps, self.sources = None, None, {}
        if self.source is not None:
            meeting.start_world(TRAINERS)
            self.engine = build_engine(job.shapes)
            self.source_maps, self.sources = self.engine.optimizer_storage_maps(), self.engine.optimizer_storage()
            for name, master in self.sources.items():
                master.copy_(job.master(name, self.source))
        self.source_maps = _told_by_trainer_0(meeting, self.source_maps)
        self.flat_target, self.targets, self._expected = self._make_targets()

    def _make_targets(self):
        regions = {} if self.target is None else {
            name: self.job.target_region(name, self.target)
            for name in self.job.shapes
        }
        numels = [math.prod(region.sizes) for region in regions.values()]
        flat = torch.empty(sum(numels), dtype=self.job.dtype)
        targets = {name: part.view(regions[name].sizes) for name, part in zip(regions, flat.split(numels))}
        expected = torch.empty_like(flat)
        for (name, region), part in zip(regions.items(), expected.split(numels)):
            full = self.job.values(name, 0, math.prod(self.job.shapes[name]))
            part.view(region.sizes).copy_(region.of(full))
        return flat, targets, expected

    def spoil_targets(self) -> None:
        """Overwrite the targets, so that what a method does not write is wrong."""
        self.flat_target.fill_(float('nan'))

    def copy_expected(self) -> None:
        """Overwrite the targets with what they are to hold."""
        self.flat_target.copy_(self._expected)

    def wrong_elements(self) -> int:
        """How many elements of this process's targets are not what they are to be, bit by bit."""
        return differing_elements(self.flat_target, self._expected)

    def changed_masters(self) -> List[str]:
        """The parameters whose masters this process no longer holds as they were."""
        return [
            name for name, master in self.sources.items()
            if not torch.equal(master, self.job.master(name, self.source))
        ]


def differing_elements(tensor: torch.Tensor, other: torch.Tensor) -> int:
    """How many elements of two tensors of one dtype differ, bit by bit."""
    bits = _BITS_BY_ITEMSIZE[tensor.dtype.itemsize]
    return int((tensor.view(bits) != other.view(bits)).sum())


def _told_by_trainer_0(meeting: Meeting, maps) -> Dict[str, ParamAffineMap]:
    """Trainer 0's maps on every process, as they travel in a real job: as plain data."""
    if meeting.rank == 0:
        meeting.store.set('source maps', json.dumps({name: map_.to_dict() for name, map_ in maps.items()}))
    plain = json.loads(meeting.store.get('source maps'))
    return {name: ParamAffineMap.from_dict(map_) for name, map_ in plain.items()}


def build_engine(shapes: Mapping[str, Shape]) -> 'deepspeed.DeepSpeedEngine':
    """A ZeRO-3 engine with offloaded optimizer state around parameters of these names and shapes; on all trainers."""
    # Else DeepSpeed would compile shared-memory collectives first, for minutes.
    deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
    deepspeed.init_distributed('gloo')
    model = _module_of(shapes)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        config={
            'train_micro_batch_size_per_gpu': 1,
            'bf16': {
                'enabled': True
            },
            'zero_optimization': {
                'stage': 3,
                'offload_optimizer': {
                    'device': 'cpu'
                }
            },
            # Torch's own Adam then steps on the masters, and no extension is compiled.
            'zero_force_ds_cpu_optimizer': False
        })
    return engine


def _module_of(shapes: Mapping[str, Shape]) -> torch.nn.Module:
    """A module whose parameters have these names and shapes, and that computes nothing."""
    root = torch.nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split('.')
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, torch.nn.Parameter(torch.zeros(shape)))
    return root
