# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What DeepSpeed 0.19.8 keeps, and under which names.

Private attributes of DeepSpeed's optimizers and parameters are read here and in the files whose names begin alike, and
nowhere else. Every optimizer steps on a list of flat 1-D masters, and the inner optimizer's states are keyed by them:
a "flat" below is an index into that list.

Whatever DeepSpeed does not document is read by ``read(owner, 'attribute')``, methods too: should a later release move
it, the user is told what is missing, instead of meeting an AttributeError. ``test_upstream_attributes.py`` finds these
calls, takes each attribute away from a real engine, and fails on one that is read without ``read``.

``param._hp_mapping`` is not used: it is missing on ranks that hold nothing, misses the states of all groups but the
first, and is wrong under ``round_robin_gradients``.
"""

from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

import deepspeed.comm as dist

__all__ = [
    'MASTER_STATE', 'OptimizerStateNotReadyError', 'StoredParameter', 'masters_of', 'owned_parameters',
    'parameters_of', 'ranks_of_flats', 'ranks_of_group', 'read', 'state_tensors'
]

MASTER_STATE = 'fp32'
UPSTREAM_RELEASE = '0.19.8'


class OptimizerStateNotReadyError(RuntimeError):
    """The optimizer creates this state with its first step and has not taken one."""


def read(owner: Any, path: str) -> Any:
    """The attribute of ``owner`` that ``path`` names; dots lead on to attributes of attributes.

    Raises RuntimeError, naming the class, the attribute and the release it was looked up in, where one is missing.
    """
    for name in path.split('.'):
        try:
            owner = getattr(owner, name)
        except AttributeError:
            owner_name = getattr(owner, '__name__', type(owner).__name__)
            raise RuntimeError(f'{owner_name} has no attribute {name!r}: ZeRO storage was written for DeepSpeed '
                               f'{UPSTREAM_RELEASE}, and this release keeps it elsewhere') from None
    return owner


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


class StoredParameter(NamedTuple):
    """A parameter as its optimizer keeps it; the numbers are those of ``Placement``."""
    parameter: torch.nn.Parameter
    shape: Tuple[int, ...]
    partition_numel: int
    start: int
    flat: int
    base: int


def _stored_parameters(optimizer: Any) -> Iterator[StoredParameter]:
    if _flattens_groups(optimizer):
        return _stored_in_flat_groups(optimizer, _FLAT_GROUP_ATTRIBUTES[type(optimizer).__name__])
    return _stored_in_own_partitions(optimizer)


def owned_parameters(engine: Any) -> Dict[int, StoredParameter]:
    """What the optimizer keeps of each parameter, by the parameter's id; RuntimeError for one without a name."""
    stored_by_id = {id(stored.parameter): stored for stored in _stored_parameters(engine.optimizer)}
    named = set(map(id, engine.module.parameters()))
    shapes = [stored.shape for key, stored in stored_by_id.items() if key not in named]
    if shapes:
        raise RuntimeError(f'the optimizer owns parameters that engine.module does not name, of shapes {shapes}')
    return stored_by_id


def _stored_in_flat_groups(optimizer: Any, attributes: _FlatGroupAttributes) -> Iterator[StoredParameter]:
    """Stages 1 and 2: a group is one low-precision buffer, cut in equal partitions; parameters are views of it.

    Where a parameter starts is asked of the views themselves: they are right whatever order and padding the
    optimizer chose.
    """
    groups = zip(read(optimizer, attributes.parameters), read(optimizer, attributes.buffers),
                 read(optimizer, 'real_dp_process_group'))
    for flat, (parameters, buffer, process_group) in enumerate(groups):
        partition_numel = buffer.numel() // dist.get_world_size(group=process_group)
        for parameter in parameters:
            if parameter.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
                raise RuntimeError(f'a parameter of shape {tuple(parameter.shape)} in group {flat} no longer lies in '
                                   "the optimizer's buffer; was its .data replaced?")
            start = parameter.storage_offset() - buffer.storage_offset()
            yield StoredParameter(parameter, tuple(parameter.shape), partition_numel, start, flat, 0)


def _stored_in_own_partitions(optimizer: Any) -> Iterator[StoredParameter]:
    """Stage 3: each parameter is partitioned by itself; a sub-group's master holds its parameters' partitions."""
    for flat, parameters in enumerate(read(optimizer, 'fp16_groups')):
        base = 0
        for parameter in parameters:
            partition_numel = read(parameter, 'partition_numel')()
            yield StoredParameter(parameter, tuple(read(parameter, 'ds_shape')), partition_numel, 0, flat, base)
            base += partition_numel


def parameters_of(optimizer: Any) -> List[torch.nn.Parameter]:
    """The parameters of which this rank's optimizer steps on some range, whatever their data are now."""
    attributes = _FLAT_GROUP_ATTRIBUTES.get(type(optimizer).__name__)
    groups = read(optimizer, attributes.parameters if attributes else 'fp16_groups')
    return [parameter for parameters in groups for parameter in parameters]


def _flattens_groups(optimizer: Any) -> bool:
    return type(optimizer).__name__ in _FLAT_GROUP_ATTRIBUTES


def masters_of(optimizer: Any) -> List[torch.Tensor]:
    attributes = _FLAT_GROUP_ATTRIBUTES.get(type(optimizer).__name__)
    return list(read(optimizer, attributes.masters if attributes else 'fp32_partitioned_groups_flat'))


def ranks_of_group(group: Any) -> Tuple[int, ...]:
    """The global ranks of a process group, in its order."""
    return tuple(dist.get_global_rank(group, rank) for rank in range(dist.get_world_size(group=group)))


def ranks_of_flats(optimizer: Any) -> List[Tuple[int, ...]]:
    """The global ranks that share each flat, in the order of their partitions."""
    ranks_by_group: Dict[Any, Tuple[int, ...]] = {}
    process_groups = read(optimizer,
                          'real_dp_process_group' if _flattens_groups(optimizer) else 'sub_group_process_groups')
    for group in process_groups:
        if group not in ranks_by_group:
            ranks_by_group[group] = ranks_of_group(group)
    return [ranks_by_group[group] for group in process_groups]


def _inner_optimizers(optimizer: Any) -> List[Any]:
    """The optimizers that step on the flats: two under partial offload, each with the states of its own flats."""
    inner = [read(optimizer, 'optimizer')]
    if _flattens_groups(optimizer) or not read(optimizer, 'offload_optimizer'):
        return inner
    return inner if read(optimizer, 'partial_offload') == 1.0 else inner + [read(optimizer, 'backup_optimizer')]


def _per_element_states(optimizer: Any, master: torch.Tensor) -> Dict[str, torch.Tensor]:
    """What the inner optimizer keeps for each element of ``master`` now.

    Left out: the step count (a tensor of 1 element in some optimizers, so its shape alone does not tell), the
    buffers that offloading leaves beside a state, and codes of quantized states, which mean nothing without scales.
    """
    return {
        name: tensor
        for inner in _inner_optimizers(optimizer)
        for name, tensor in inner.state.get(master, {}).items()
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
    # It has no use for the second.
    ('deepspeed', 'DeepSpeedCPULion'): dict(exp_avg=None, exp_avg_sq=None),
    ('deepspeed', 'FusedLion'): dict(exp_avg=None),
}


def _states_of_first_step(optimizer: Any, flat: int) -> Optional[List[str]]:
    """The states that the first step will create for ``flat``, None where the optimizer's class is not known."""
    inner = read(optimizer, 'optimizer')
    states = _STATES_OF_FIRST_STEP.get((type(inner).__module__.split('.')[0], type(inner).__name__))
    if states is None:
        return None
    group = inner.param_groups[flat if _flattens_groups(optimizer) else read(optimizer, 'sub_group_to_group_id')[flat]]
    return [name for name, option in states.items() if option is None or group.get(option)]


def state_tensors(optimizer: Any, state: str) -> List[torch.Tensor]:
    """The tensors that hold ``state``, one per flat, or the error that says why there are none."""
    masters = masters_of(optimizer)
    if state == MASTER_STATE:
        return masters
    kept = [_per_element_states(optimizer, master) for master in masters]
    if all(state in states for states in kept):
        return [states[state] for states in kept]
    class_name = type(read(optimizer, 'optimizer')).__name__
    # A step may be skipped for some flats only: under torch_autocast with fp16, each has an overflow check of its own.
    names_by_flat = [states or _states_of_first_step(optimizer, flat) for flat, states in enumerate(kept)]
    may_come = not any(kept) and None in names_by_flat
    names_by_flat = [set(names or ()) for names in names_by_flat]
    if may_come or all(state in names for names in names_by_flat):
        raise OptimizerStateNotReadyError(f'{class_name} has no state {state!r} before its first step; one that is '
                                          'skipped for overflow does not count')
    extent = 'for some parameters only' if any(state in names for names in names_by_flat) else 'for no parameter'
    names = ', '.join([MASTER_STATE] + sorted(set.intersection(*names_by_flat)))
    raise ValueError(f'{class_name} keeps the state {state!r} {extent}; for all of them it keeps {names}')
