# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What DeepSpeed 0.19.8 keeps, and under which names.

All private attributes of DeepSpeed's optimizers and parameters are read here, and nowhere else. Every optimizer steps
on a list of flat 1-D masters, and the inner optimizer's states are keyed by them: a "flat" below is an index into that
list.

``param._hp_mapping`` is not used: it is missing on ranks that hold nothing, misses the states of all groups but the
first, and is wrong under ``round_robin_gradients``.
"""

from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

import deepspeed.comm as dist

__all__ = [
    'MASTER_STATE', 'OptimizerStateNotReadyError', 'StoredParameter', 'masters_of', 'ranks_of_flats', 'state_tensors',
    'stored_parameters'
]

MASTER_STATE = 'fp32'


class OptimizerStateNotReadyError(RuntimeError):
    """The optimizer creates this state with its first step and has not taken one."""


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


def stored_parameters(optimizer: Any) -> Iterator[StoredParameter]:
    if type(optimizer).__name__ in _FLAT_GROUP_ATTRIBUTES:
        return _stored_in_flat_groups(optimizer, _FLAT_GROUP_ATTRIBUTES[type(optimizer).__name__])
    return _stored_in_own_partitions(optimizer)


def _stored_in_flat_groups(optimizer: Any, attributes: _FlatGroupAttributes) -> Iterator[StoredParameter]:
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
            yield StoredParameter(parameter, tuple(parameter.shape), partition_numel, start, flat, 0)


def _stored_in_own_partitions(optimizer: Any) -> Iterator[StoredParameter]:
    """Stage 3: each parameter is partitioned by itself; a sub-group's master holds its parameters' partitions."""
    for flat, parameters in enumerate(optimizer.fp16_groups):
        base = 0
        for parameter in parameters:
            partition_numel = parameter.partition_numel()
            yield StoredParameter(parameter, tuple(parameter.ds_shape), partition_numel, 0, flat, base)
            base += partition_numel


def masters_of(optimizer: Any) -> List[torch.Tensor]:
    attributes = _FLAT_GROUP_ATTRIBUTES.get(type(optimizer).__name__)
    return list(getattr(optimizer, attributes.masters) if attributes else optimizer.fp32_partitioned_groups_flat)


def ranks_of_flats(optimizer: Any) -> List[Tuple[int, ...]]:
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


def state_tensors(optimizer: Any, state: str) -> List[torch.Tensor]:
    """The tensors that hold ``state``, one per flat, or the error that says why there are none."""
    masters = masters_of(optimizer)
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
