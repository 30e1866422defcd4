# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What DeepSpeed 0.19.8 keeps of the model's low-precision weights, and under which names.

As in ``zero_affine_upstream.py``, whatever DeepSpeed does not document is read by ``read`` or named by DeepSpeed's own
constants, and nowhere else.
"""

from typing import Any, Dict, NamedTuple, Optional, Set, Tuple

import torch

from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR, is_zero_param
from deepspeed.runtime.zero.zero_affine_upstream import owned_parameters, ranks_of_group, read
from deepspeed.runtime.zero.zero_affine_upstream_parallel import is_moe_param, shape_of
from deepspeed.utils import groups

__all__ = [
    'LpParameter', 'has_quantized_weights', 'lp_parameters', 'lp_tensors', 'obstacle_to_update',
    'ranks_of_lp_parameters', 'update_lp_parameters'
]


class LpParameter(NamedTuple):
    """A parameter as the model computes with it; its shape is that of what ``ranks`` hold together.

    Under stage 3, ``ranks[i]`` holds its elements from ``i * partition_numel`` on, ``partition_numel`` of them where
    there are so many. Under stages 1 and 2 ``partition_numel`` is None and each of ``ranks`` holds all of it.
    """
    shape: Tuple[int, ...]
    ranks: Tuple[int, ...]
    partition_numel: Optional[int]


def lp_parameters(engine: Any) -> Dict[str, LpParameter]:
    """All parameters of ``named_parameters()``; raises RuntimeError for one that stage 3 has not partitioned."""
    ranks_by_group: Dict[Any, Tuple[int, ...]] = {}
    parameters = {}
    for name, parameter in engine.module.named_parameters():
        partition_numel = None
        if engine.zero_optimization_stage() == 3:
            if not is_zero_param(parameter):
                raise RuntimeError(_not_partitioned(name, parameter))
            partition_numel = read(parameter, 'partition_numel')()
        group = _sharing_group(engine, parameter)
        if group not in ranks_by_group:
            ranks_by_group[group] = ranks_of_group(group)
        parameters[name] = LpParameter(shape_of(parameter), ranks_by_group[group], partition_numel)
    return parameters


def _not_partitioned(name: str, parameter: torch.nn.Parameter) -> str:
    return (f'parameter {name} of shape {tuple(parameter.shape)} is not partitioned: add parameters to the model '
            'before deepspeed.initialize')


def _sharing_group(engine: Any, parameter: torch.nn.Parameter) -> Any:
    """The process group that partitions the parameter or, under stages 1 and 2, holds copies of it."""
    if is_zero_param(parameter):
        return read(parameter, 'ds_process_group')
    if is_moe_param(parameter):
        return read(groups, '_get_expert_data_parallel_group')(read(parameter, 'group_name'))
    return read(engine, 'seq_data_parallel_group')


def ranks_of_lp_parameters(engine: Any) -> Set[Tuple[int, ...]]:
    """The ranks that share a low-precision parameter, each set of them once."""
    return {ranks_of_group(group) for group in {_sharing_group(engine, p) for p in engine.module.parameters()}}


def has_quantized_weights(engine: Any) -> bool:
    """Whether ``weight_quantization`` has put codes and scales into parameters, in the dtype and place of weights."""
    return any(getattr(parameter, 'weight_quantized', False) for parameter in engine.module.parameters())


def lp_tensors(engine: Any) -> Dict[str, torch.Tensor]:
    """What this rank keeps of each parameter: under stage 3 its 1-D partition with padding, else the whole.

    Stage 3 knows nothing of parameters that came after ``deepspeed.initialize``; they are left out.
    """
    named = dict(engine.module.named_parameters())
    if engine.zero_optimization_stage() < 3:
        return named
    offloaded = _offloaded_partitions(engine.optimizer)
    return {
        name: offloaded[id(parameter)] if id(parameter) in offloaded else read(parameter, 'ds_tensor')
        for name, parameter in named.items() if is_zero_param(parameter)
    }


def _lp_parameters_offloaded(optimizer: Any) -> bool:
    # These two have no offload_states.
    if type(optimizer).__name__ == 'BF16_Optimizer' or isinstance(optimizer, DeepSpeedZeRoOffload):
        return False
    return OffloadStateTypeEnum.lp_params in read(optimizer, 'offloaded_states')


def _offloaded_partitions(optimizer: Any) -> Dict[int, torch.Tensor]:
    """Where ``offload_states`` put the partitions, by the parameter's id; empty unless it did.

    The buffer keeps the order of the optimizer, while ``ds_tensor`` is set by that of the module: where they differ,
    it shows another parameter's elements until ``reload_states``.
    """
    if not _lp_parameters_offloaded(optimizer):
        return {}
    parameters = [parameter for sub_group in read(optimizer, 'fp16_groups') for parameter in sub_group]
    partitions = read(optimizer,
                      'lp_param_buffer').split([read(parameter, 'partition_numel')() for parameter in parameters])
    return dict(zip(map(id, parameters), partitions))


def obstacle_to_update(engine: Any) -> Optional[str]:
    """Why the low-precision weights cannot be refreshed from the masters on this rank now; None if they can."""
    if _lp_parameters_offloaded(engine.optimizer):
        return 'the low-precision parameters are offloaded: call reload_states first'
    gathered = [
        name for name, parameter in engine.module.named_parameters()
        if getattr(parameter, DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR, 0)
    ]
    if gathered:
        return f'{", ".join(gathered)} are gathered: leave deepspeed.zero.GatheredParameters first'
    return _change_after_initialize(engine)


def _change_after_initialize(engine: Any) -> Optional[str]:
    """What was made of the model so that it computes with weights that no master or partition reaches, if anything."""
    if engine.zero_optimization_stage() == 3:
        strange = [
            _not_partitioned(name, parameter) for name, parameter in engine.module.named_parameters()
            if not is_zero_param(parameter)
        ]
        return '; '.join(strange) or None
    try:
        owned_parameters(engine)
    except RuntimeError as error:
        return str(error)
    return None


def update_lp_parameters(engine: Any) -> None:
    """Make the model compute with the masters' values, and with what its partitions hold where there is no master.

    Collective. DeepSpeed's own update under stage 3 is part of its step, of which these are the pieces.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() < 3:
        optimizer.update_lp_params()
        return
    without_optimizer = isinstance(optimizer, DeepSpeedZeRoOffload)
    offload = optimizer if without_optimizer else read(optimizer, 'parameter_offload')
    # Full copies that are still about would be taken for the new values.
    read(offload, 'partition_all_parameters')()
    if not without_optimizer:
        for sub_group in range(len(read(optimizer, 'fp16_groups'))):
            read(optimizer, '_reassign_or_swap_out_partitioned_parameters')(sub_group)
    for parameter in engine.module.parameters():
        # DeepSpeed drops the secondary partitions (hpZ) of trained parameters only; a frozen one may be written too.
        if read(parameter, 'ds_secondary_tensor') is not None:
            parameter.ds_secondary_tensor = None
    persistent = read(offload, 'persistent_parameters')
    if persistent:
        read(persistent[0], 'all_gather')(persistent)
