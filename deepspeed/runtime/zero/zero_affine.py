# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where a ZeRO engine keeps each parameter's master and optimizer states, and the live tensors themselves.

``ZeroAffineEngineMixin`` is a base class of ``DeepSpeedEngine``. It adds

- ``engine.optimizer_storage_maps()``: for every parameter, which global rank holds which range of it;
- ``engine.optimizer_storage(state)``: this rank's live 1-D views of those ranges.

Every ZeRO stage cuts some flattened space into equal partitions, one per rank. Under stage 3 that space is a single
parameter, under stages 1 and 2 it is a parameter group laid out end to end, with padding at its end and, with
``parameter_alignment``, inside. One description, ``_Placement``, serves both. What a rank holds of a parameter is then
a contiguous range of the flattened parameter, kept in one of the flat tensors that the optimizer steps on.

The facts about DeepSpeed are those of release 0.19.8. Its configuration and engine are read in the section "What is
supported", its optimizers and parameters in "What DeepSpeed keeps", nothing elsewhere. ``param._hp_mapping`` is not
used: it is missing on ranks that hold nothing, misses the states of all groups but the first, and is wrong under
``round_robin_gradients``.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.affine import ParamAffineMap, flat_range_map
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

__all__ = [
    'OptimizerStateNotReadyError', 'REFUSED_CONFIGURATIONS', 'REFUSED_ENGINES', 'RefusedConfiguration',
    'SUPPORTED_CONFIGURATIONS', 'SupportedConfiguration', 'UnsupportedEngineError', 'ZeroAffineEngineMixin',
    'zero_storage_affine_map'
]

MASTER_STATE = 'fp32'


class UnsupportedEngineError(NotImplementedError):
    """The engine is configured in a way whose storage is not described; the text names what to use instead."""


class OptimizerStateNotReadyError(RuntimeError):
    """The optimizer creates this state with its first step and has not taken one."""


def zero_storage_affine_map(numel: int, ranks: Sequence[int]) -> ParamAffineMap:
    """The map of one flattened parameter of ``numel`` elements that ZeRO-3 partitions over ``ranks``.

    Rank ``ranks[i]`` holds a 1-D shard, the elements ``[i * k, (i + 1) * k)`` that exist, where
    ``k = ceil(numel / len(ranks))``. The padding that ZeRO-3 adds to the last partitions is not part of the map, and
    a partition that holds nothing is listed as an empty shard. 5 elements on ranks 0, 1, 2, 3 (k = 2):

        rank 0: [0, 1]   rank 1: [2, 3]   rank 2: [4]   rank 3: []

    A pure function: needs no process group. Raises ValueError for a negative size and for ranks that are absent,
    negative or repeated.
    """
    if numel < 0:
        raise ValueError(f'a parameter cannot have {numel} elements')
    if not ranks or min(ranks) < 0 or len(set(ranks)) != len(ranks):
        raise ValueError(f'ranks must be distinct and not negative, at least one: got {list(ranks)}')
    partition_numel = -(-numel // len(ranks))  # -(-a // b) == ceil(a / b)
    bounds = [min(index * partition_numel, numel) for index in range(len(ranks) + 1)]
    return flat_range_map((numel, ), {
        rank: (begin, end - begin)
        for rank, begin, end in zip(ranks, bounds, bounds[1:])
    })


class ZeroAffineEngineMixin:
    """What ``DeepSpeedEngine`` says about where its optimizer's storage lives."""

    def optimizer_storage_maps(self) -> Dict[str, ParamAffineMap]:
        """Where the master and the states of each parameter that the optimizer owns live.

        The keys are names of ``engine.module.named_parameters()``, in that order: frozen parameters and those
        without elements are left out, a tied weight appears under its first name. Each map has the parameter's full
        shape as logical shape, the global ranks of the engine's world as locations, and as shard of a location the
        1-D elements that rank holds, without padding; a rank that holds nothing of a parameter is not in its map.
        The master and every per-element state of a parameter are laid out alike, so one map serves them all.

        Every rank must make the first call, which compares a digest of the layout in one collective of 16 bytes per
        rank and moves nothing else; later calls communicate nothing. Needs no optimizer step. Raises
        UnsupportedEngineError on every rank, before that collective, for what REFUSED_CONFIGURATIONS,
        REFUSED_ENGINES and SUPPORTED_CONFIGURATIONS exclude, and RuntimeError on every rank if the ranks do not
        describe the same layout. All ranks return equal maps. They are kept, and parameters that are laid out alike
        share one: do not change them.
        """
        maps = vars(self).get('_optimizer_storage_maps')
        if maps is None:
            _refuse_unsupported(self)
            layout = _read_layout_together(self)
            maps = self._optimizer_storage_maps = _maps_of(layout.placements)
            self._optimizer_storage_layout = layout
        return dict(maps)

    def optimizer_storage(self, state: str = MASTER_STATE) -> Dict[str, torch.Tensor]:
        """This rank's live views of the master or of one state of each parameter that the optimizer owns.

        The keys are those of ``optimizer_storage_maps()``. Each value is a 1-D view of the tensor that the optimizer
        steps on, holding exactly the elements that the map gives this rank (0 elements where it gives none), in the
        dtype and on the device, accelerator or host, where the optimizer keeps them. ``'fp32'`` is the master in the
        dtype it is really kept in; other names are the inner optimizer's own per-element states, such as
        ``exp_avg``, ``momentum_buffer`` or ``sum``. Nothing is copied; what is written into a view is what the next
        step reads. Views stay live over steps, until ``destroy``, ``offload_states``, ``reload_states`` or
        ``load_checkpoint``; after the last three, ask again.

        Local to the calling rank. Raises UnsupportedEngineError as the maps do, OptimizerStateNotReadyError for a
        state that the first step will create, and ValueError, with the names of those it keeps, for a state that this
        optimizer does not keep for every parameter.
        """
        layout = vars(self).get('_optimizer_storage_layout')
        if layout is None:
            _refuse_unsupported(self)
            layout = self._optimizer_storage_layout = _read_layout(self)
        tensors = _state_tensors(self.optimizer, state)
        return {
            name: tensors[flat].detach().narrow(0, offset, numel)
            for name, (flat, offset, numel) in layout.slices.items()
        }


# ---------------------------------------------------------------------------------------------------------------------
# What is supported. The one list that the refusals, the tests and the documentation use. All attributes of
# DeepSpeed's configuration and engine are read in this section.
# ---------------------------------------------------------------------------------------------------------------------


class SupportedConfiguration(NamedTuple):
    """A combination that is tested on real engines; ``optimizer_class`` is what DeepSpeed builds for it."""
    stage: int
    offload_optimizer: str
    dtype: str
    optimizer_class: str


_OPTIMIZER_CLASS_BY_STAGE = {
    1: 'DeepSpeedZeroOptimizer',
    2: 'DeepSpeedZeroOptimizer',
    3: 'DeepSpeedZeroOptimizer_Stage3',
}

# Each may have any number of parameter groups, frozen and tied parameters, round_robin_gradients, parameter_alignment,
# sub-groups, offload_param on "cpu", secondary partitions (hpZ), torch_autocast and a model built under zero.Init.
SUPPORTED_CONFIGURATIONS: Tuple[SupportedConfiguration, ...] = tuple(
    SupportedConfiguration(stage, device, dtype, optimizer_class)
    for stage, optimizer_class in _OPTIMIZER_CLASS_BY_STAGE.items() for device in ('none', 'cpu')
    for dtype in ('fp32', 'bf16', 'fp16')) + (
        # What data_types.grad_accum_dtype "fp32" makes of stage 1.
        SupportedConfiguration(1, 'none', 'bf16', 'BF16_Optimizer'), )


@dataclass(frozen=True)
class RefusedConfiguration:
    """One thing that is refused: where it is switched on, how it is recognized, and what to use instead."""
    key: str
    found_in: Callable[[Any], bool]
    instead: str


def _offload_device(offload_config: Any) -> str:
    return 'none' if offload_config is None else OffloadDeviceEnum(offload_config.device).value


def _offload_optimizer_option(config: Any, option: str, default: Any) -> Any:
    offload_config = config.zero_config.offload_optimizer
    return default if offload_config is None else getattr(offload_config, option)


# ``found_in`` takes the engine's DeepSpeedConfig.
REFUSED_CONFIGURATIONS: Tuple[RefusedConfiguration, ...] = (
    RefusedConfiguration('zero_optimization.stage', lambda config: config.zero_config.stage == 0,
                         'it is 0, which partitions nothing: use stage 1, 2 or 3'),
    RefusedConfiguration('zero_optimization.offload_optimizer.device',
                         lambda config: _offload_device(config.zero_config.offload_optimizer) == 'nvme',
                         'it is "nvme", where no tensor holds the state: use "cpu" or "none"'),
    RefusedConfiguration('zero_optimization.offload_param.device',
                         lambda config: _offload_device(config.zero_config.offload_param) == 'nvme',
                         'it is "nvme", where no tensor holds the parameter: use "cpu" or "none"'),
    RefusedConfiguration('zero_optimization.offload_optimizer.ratio',
                         lambda config: _offload_optimizer_option(config, 'ratio', 1.0) < 1.0,
                         'states are then split over two optimizers: use 1.0'),
    RefusedConfiguration('zero_optimization.offload_optimizer.super_offload',
                         lambda config: _offload_optimizer_option(config, 'super_offload', False),
                         'a worker process then owns the states: use plain offload_optimizer with device "cpu"'),
    RefusedConfiguration('zero_optimization.zenflow', lambda config: config.zero_config.zenflow is not None,
                         'it steps part of the parameters by itself: use plain offload_optimizer with device "cpu"'),
    RefusedConfiguration('zero_optimization.zero_quantized_weights',
                         lambda config: config.zero_config.zero_quantized_weights,
                         'set it to false and use bf16 or fp16 weights'),
    RefusedConfiguration('zero_optimization.zero_quantized_nontrainable_weights',
                         lambda config: config.zero_config.zero_quantized_nontrainable_weights,
                         'set it to false and use bf16 or fp16 weights'),
    RefusedConfiguration('tensor_parallel.autotp_size', lambda config: config.tensor_parallel_config.autotp_size > 1,
                         'sharded layers are not supported yet: train with data parallelism only'),
    RefusedConfiguration('expert_parallel.enabled', lambda config: config.expert_parallel_config.enabled,
                         'sharded experts are not supported yet: train with data parallelism only'),
    RefusedConfiguration('compile.deepcompile', lambda config: config.compile_config.deepcompile,
                         'its passes move optimizer states by themselves: set it to false'),
    RefusedConfiguration('hybrid_engine.enabled', lambda config: config.hybrid_engine.enabled,
                         'it shares weights with its own inference: set it to false'),
    RefusedConfiguration('bf16.bf16_master_weights_and_grads',
                         lambda config: config.bfloat16_config.bf16_master_weights_and_grads,
                         'not supported yet: keep the masters in fp32'),
    RefusedConfiguration('fp16.fp16_master_weights_and_grads',
                         lambda config: config.float16_config.fp16_master_weights_and_grads,
                         'not supported yet: keep the masters in fp32'),
)

# ``found_in`` takes the engine.
REFUSED_ENGINES: Tuple[RefusedConfiguration, ...] = (
    RefusedConfiguration('PipelineModule', lambda engine: engine.pipeline_parallelism,
                         'a pipeline stage holds part of the model only: use a plain torch.nn.Module'),
    RefusedConfiguration('optimizer', lambda engine: engine.basic_optimizer is None,
                         'none is configured, so there is no storage: give one to deepspeed.initialize'),
    RefusedConfiguration('MoE layers', lambda engine: engine.has_moe_layers,
                         'experts are not supported yet: use a model without deepspeed.moe layers'),
    RefusedConfiguration('mpu', lambda engine: engine.mp_world_size > 1,
                         'model parallelism is not supported yet: train with data parallelism only'),
)


def _refuse(subject: Any, refused: Tuple[RefusedConfiguration, ...]) -> None:
    for rule in refused:
        if rule.found_in(subject):
            raise UnsupportedEngineError(f'optimizer storage is not available with {rule.key}: {rule.instead}')


def _refuse_unsupported(engine: Any) -> None:
    """Raise UnsupportedEngineError unless the engine is one of SUPPORTED_CONFIGURATIONS. Communicates nothing.

    Whatever later releases add ends at the last two checks: an optimizer class that is not listed, or partitions
    that only some of the ranks share.
    """
    config = engine._config
    _refuse(config, REFUSED_CONFIGURATIONS)
    _refuse(engine, REFUSED_ENGINES)
    dtype = 'fp16' if config.float16_config.enabled else 'bf16' if config.bfloat16_config.enabled else 'fp32'
    configuration = SupportedConfiguration(int(config.zero_config.stage),
                                           _offload_device(config.zero_config.offload_optimizer), dtype,
                                           type(engine.optimizer).__name__)
    if configuration not in SUPPORTED_CONFIGURATIONS:
        raise UnsupportedEngineError(f'optimizer storage is not available with {configuration}: use a combination of '
                                     'deepspeed.runtime.zero.zero_affine.SUPPORTED_CONFIGURATIONS')
    world = list(range(dist.get_world_size()))
    for ranks in _ranks_of_flats(engine.optimizer):
        if sorted(ranks) != world:
            raise UnsupportedEngineError(
                f'optimizer storage is not available where ranks {list(ranks)} of a world of {len(world)} share a '
                'partitioned parameter: train with data parallelism over all ranks')


# ---------------------------------------------------------------------------------------------------------------------
# What DeepSpeed keeps. All private attributes of DeepSpeed's optimizers and parameters are read in this section.
#
# Every optimizer here steps on a list of flat 1-D masters, and the inner optimizer's states are keyed by them. A
# "flat" below is an index into that list.
# ---------------------------------------------------------------------------------------------------------------------


class _FlatGroupAttributes(NamedTuple):
    """How an optimizer that flattens whole groups names its lists, each with one entry per group."""
    parameters: str
    buffers: str
    masters: str


_FLAT_GROUP_ATTRIBUTES = {
    'DeepSpeedZeroOptimizer': _FlatGroupAttributes('bit16_groups', 'bit16_groups_flat',
                                                   'single_partition_of_fp32_groups'),
    'BF16_Optimizer': _FlatGroupAttributes('bf16_groups', 'bf16_groups_flat', 'fp32_groups_flat_partition'),
}


class _StoredParameter(NamedTuple):
    """A parameter as its optimizer keeps it; the numbers are those of ``_Placement``."""
    parameter: torch.nn.Parameter
    shape: Tuple[int, ...]
    partition_numel: int
    start: int
    flat: int
    base: int


def _stored_parameters(optimizer: Any) -> Iterator[_StoredParameter]:
    if type(optimizer).__name__ in _FLAT_GROUP_ATTRIBUTES:
        return _stored_in_flat_groups(optimizer, _FLAT_GROUP_ATTRIBUTES[type(optimizer).__name__])
    return _stored_in_own_partitions(optimizer)


def _stored_in_flat_groups(optimizer: Any, attributes: _FlatGroupAttributes) -> Iterator[_StoredParameter]:
    """Stages 1 and 2: a group is one low-precision buffer, cut in equal partitions; parameters are views of it.

    Where a parameter starts is asked of the views themselves: they are right whatever order and padding the
    optimizer chose.
    """
    groups = zip(getattr(optimizer, attributes.parameters), getattr(optimizer, attributes.buffers),
                 optimizer.real_dp_process_group)
    for flat, (parameters, buffer, process_group) in enumerate(groups):
        partition_numel = buffer.numel() // dist.get_world_size(group=process_group)
        for parameter in parameters:
            if parameter.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
                raise RuntimeError(f'a parameter of shape {tuple(parameter.shape)} in group {flat} no longer lies in '
                                   "the optimizer's buffer; was its .data replaced?")
            start = parameter.storage_offset() - buffer.storage_offset()
            yield _StoredParameter(parameter, tuple(parameter.shape), partition_numel, start, flat, 0)


def _stored_in_own_partitions(optimizer: Any) -> Iterator[_StoredParameter]:
    """Stage 3: each parameter is partitioned by itself; a sub-group's master holds its parameters' partitions."""
    for flat, parameters in enumerate(optimizer.fp16_groups):
        base = 0
        for parameter in parameters:
            partition_numel = parameter.partition_numel()
            yield _StoredParameter(parameter, tuple(parameter.ds_shape), partition_numel, 0, flat, base)
            base += partition_numel


def _masters(optimizer: Any) -> List[torch.Tensor]:
    attributes = _FLAT_GROUP_ATTRIBUTES.get(type(optimizer).__name__)
    return list(getattr(optimizer, attributes.masters) if attributes else optimizer.fp32_partitioned_groups_flat)


def _ranks_of_flats(optimizer: Any) -> List[Tuple[int, ...]]:
    """The global ranks that share each flat, in the order of their partitions."""
    ranks_by_group: Dict[Any, Tuple[int, ...]] = {}
    flat_groups = type(optimizer).__name__ in _FLAT_GROUP_ATTRIBUTES
    process_groups = optimizer.real_dp_process_group if flat_groups else optimizer.sub_group_process_groups
    for group in process_groups:
        if group not in ranks_by_group:
            ranks_by_group[group] = tuple(
                dist.get_global_rank(group, rank) for rank in range(dist.get_world_size(group=group)))
    return [ranks_by_group[group] for group in process_groups]


def _per_element_states(optimizer: Any, master: torch.Tensor) -> Dict[str, torch.Tensor]:
    """What the inner optimizer keeps for each element of ``master`` now.

    Left out: the step count (a tensor of 1 element in some optimizers, so its shape alone does not tell), the
    buffers that offloading leaves beside a state, and codes of quantized states, which mean nothing without scales.
    """
    return {
        name: tensor
        for name, tensor in optimizer.optimizer.state.get(master, {}).items()
        if torch.is_tensor(tensor) and tensor.shape == master.shape and tensor.is_floating_point() and name != 'step'
        and not name.endswith('_offload_buffer')
    }


_ADAM_STATES = dict(exp_avg=None, exp_avg_sq=None, max_exp_avg_sq='amsgrad')

# The states that an optimizer's first step creates, each with the option of a parameter group that switches it on
# (None: always there), by top-level package and class. Used before that step only, to tell a state that will come
# from one that never does; of a class that is not listed, every state may still come.
_STATES_OF_FIRST_STEP: Dict[Tuple[str, str], Dict[str, Optional[str]]] = {
    ('torch', 'Adam'): _ADAM_STATES,
    ('torch', 'AdamW'): _ADAM_STATES,
    ('torch', 'SGD'): dict(momentum_buffer='momentum'),
    ('torch', 'RMSprop'): dict(square_avg=None, momentum_buffer='momentum', grad_avg='centered'),
    ('torch', 'Adagrad'): dict(sum=None),
    ('deepspeed', 'DeepSpeedCPUAdam'): _ADAM_STATES,
    ('deepspeed', 'FusedAdam'): _ADAM_STATES,
    ('deepspeed', 'DeepSpeedCPULion'): dict(exp_avg=None),
    ('deepspeed', 'FusedLion'): dict(exp_avg=None),
}


def _states_of_first_step(optimizer: Any) -> Optional[List[str]]:
    """The states that the inner optimizer keeps once it has stepped, None where its class is not known."""
    inner = optimizer.optimizer
    states = _STATES_OF_FIRST_STEP.get((type(inner).__module__.split('.')[0], type(inner).__name__))
    if states is None:
        return None
    return [
        name for name, option in states.items()
        if option is None or any(group.get(option) for group in inner.param_groups)
    ]


def _state_tensors(optimizer: Any, state: str) -> List[torch.Tensor]:
    """The tensors that hold ``state``, one per flat, or the error that says why there are none."""
    masters = _masters(optimizer)
    if state == MASTER_STATE:
        return masters
    kept = [_per_element_states(optimizer, master) for master in masters]
    if all(state in states for states in kept):
        return [states[state] for states in kept]
    class_name = type(optimizer.optimizer).__name__
    names = sorted(set.intersection(*map(set, kept))) if kept else []
    if not any(kept):
        to_come = _states_of_first_step(optimizer)
        if to_come is None or state in to_come:
            raise OptimizerStateNotReadyError(f'{class_name} has no state {state!r} before its first step')
        names = to_come
    extent = 'for some parameters only' if any(state in states for states in kept) else 'for no parameter'
    names = ', '.join([MASTER_STATE] + names)
    raise ValueError(f'{class_name} keeps the state {state!r} {extent}; for all of them it keeps {names}')


# ---------------------------------------------------------------------------------------------------------------------
# Layout: from what DeepSpeed keeps to ranges of parameters.
# ---------------------------------------------------------------------------------------------------------------------


class _Placement(NamedTuple):
    """Where one parameter lies in a flattened space that is cut into partitions of ``partition_numel`` elements.

    The parameter's flattened elements occupy ``[start, start + numel)`` of that space; ``ranks[i]`` holds partition
    ``i``, whose first element is element ``base`` of its flat tensor number ``flat``. For a parameter of 5 elements
    with ``start=2`` and ``partition_numel=4`` on two ranks, ranks[0] holds its elements [0, 1] from element 2 on,
    ranks[1] its elements [2, 3, 4] from element 0 on.
    """
    name: str
    shape: Tuple[int, ...]
    ranks: Tuple[int, ...]
    partition_numel: int
    start: int
    flat: int
    base: int

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape)

    def held_range(self, index: int) -> Tuple[int, int]:
        """(first element, number of elements) that partition ``index`` holds of the flattened parameter."""
        begin = max(self.start, index * self.partition_numel)
        end = min(self.end, (index + 1) * self.partition_numel)
        return (begin - self.start, end - begin) if begin < end else (0, 0)

    def held_ranges(self) -> Dict[int, Tuple[int, int]]:
        """``held_range`` by global rank, for the ranks that hold something."""
        first = self.start // self.partition_numel
        last = (self.end - 1) // self.partition_numel
        return {self.ranks[index]: self.held_range(index) for index in range(first, last + 1)}

    def slice_of(self, rank: int) -> Tuple[int, int, int]:
        """(flat, offset in it, number of elements) of what ``rank`` holds."""
        index = self.ranks.index(rank)
        offset = self.base + max(self.start - index * self.partition_numel, 0)
        _, numel = self.held_range(index)
        return (self.flat, offset, numel) if numel else (self.flat, 0, 0)


class _Layout(NamedTuple):
    """The placements of all parameters, and where this rank's part of each lies: name -> (flat, offset, numel)."""
    placements: Tuple[_Placement, ...]
    slices: Dict[str, Tuple[int, int, int]]


def _read_layout(engine: Any) -> _Layout:
    """The engine's layout in the order of ``named_parameters()``. Communicates nothing.

    Raises RuntimeError for a parameter that the module does not name or that does not fit its partitions.
    """
    stored_by_id = {id(stored.parameter): stored for stored in _stored_parameters(engine.optimizer)}
    ranks_of_flats = _ranks_of_flats(engine.optimizer)
    placements = []
    for name, parameter in engine.module.named_parameters():
        stored = stored_by_id.pop(id(parameter), None)
        if stored is None:
            continue
        placement = _Placement(name, stored.shape, ranks_of_flats[stored.flat], *stored[2:])
        if placement.start < 0 or placement.end > placement.partition_numel * len(placement.ranks):
            raise RuntimeError(f'parameter {name} of shape {placement.shape} starts at {placement.start}, outside '
                               f'{len(placement.ranks)} partitions of {placement.partition_numel} elements')
        placements.append(placement)
    if stored_by_id:
        shapes = [stored.shape for stored in stored_by_id.values()]
        raise RuntimeError(f'the optimizer owns parameters that engine.module does not name, of shapes {shapes}')
    rank = dist.get_rank()
    return _Layout(tuple(placements), {placement.name: placement.slice_of(rank) for placement in placements})


def _read_layout_together(engine: Any) -> _Layout:
    """``_read_layout`` on every rank, once all ranks are known to have read the same. One collective.

    A rank that fails takes part in the collective nevertheless, or the others would wait for it.
    """
    failure = layout = None
    digest = bytes(16)
    try:
        layout = _read_layout(engine)
        digest = _digest(layout.placements)
    except Exception as error:
        failure = error
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=get_accelerator().current_device_name())
    digests = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, mine)
    if failure is not None:
        raise failure
    digests = [bytes(other.tolist()) for other in digests]
    failed = [rank for rank, other in enumerate(digests) if other == bytes(16)]
    if failed:
        raise RuntimeError(f'optimizer storage maps: ranks {failed} could not read their layout, see their errors')
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        raise RuntimeError(f'optimizer storage maps: ranks {different} lay out the optimizer differently from rank 0; '
                           'was the model or the order of the parameter groups built differently there?')
    return layout


def _digest(placements: Sequence[_Placement]) -> bytes:
    # The ranks are many and the groups few: each is hashed once, and referred to by its number.
    number_by_ranks: Dict[Tuple[int, ...], int] = {}
    numbers = [number_by_ranks.setdefault(placement.ranks, len(number_by_ranks)) for placement in placements]
    described = [placement._replace(ranks=number) for placement, number in zip(placements, numbers)]
    return hashlib.blake2b(repr((list(number_by_ranks), described)).encode(), digest_size=16).digest()


def _maps_of(placements: Sequence[_Placement]) -> Dict[str, ParamAffineMap]:
    # Under stage 3 all parameters of one shape are laid out alike, so a deep model needs few different maps.
    map_by_layout: Dict[Any, ParamAffineMap] = {}
    maps = {}
    for placement in placements:
        layout = (placement.shape, placement.ranks, placement.partition_numel, placement.start)
        if layout not in map_by_layout:
            map_by_layout[layout] = flat_range_map(placement.shape, placement.held_ranges())
        maps[placement.name] = map_by_layout[layout]
    return maps
