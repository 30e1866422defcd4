# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What DeepSpeed 0.19.8 keeps of experts and of tensor parallel shards, and under which names.

As in ``zero_affine_upstream.py``, whatever DeepSpeed does not document is read by ``read`` or named by DeepSpeed's own
constants, and nowhere else.
"""

import math
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch

from deepspeed.checkpoint.constants import AFFINE_MAP, DS_AUTOEP_UC_META, DS_AUTOTP_UC_META
from deepspeed.module_inject.layers import (DS_TENSOR_MODEL_PARALLEL, Conv_LinearALlreduce, TensorParallel_Layer,
                                            TensorParallelConv2d, conv_LinearLayer)
from deepspeed.moe.experts import Experts
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from deepspeed.runtime.zero.zero_affine_upstream import ranks_of_group, read
from deepspeed.utils import groups

__all__ = [
    'FlatRule', 'LocalExpert', 'PublishedSplit', 'expert_parallel_ranks', 'flat_rules', 'is_moe_param',
    'local_experts', 'published_split', 'shape_of', 'sharded_layers', 'tensor_parallel_ranks'
]


def shape_of(parameter: torch.nn.Parameter) -> Tuple[int, ...]:
    """The shape of what this rank and those that partition the parameter with it hold together."""
    return tuple(read(parameter, 'ds_shape') if is_zero_param(parameter) else parameter.shape)


def tensor_parallel_ranks() -> Tuple[int, ...]:
    """The global ranks of this rank's tensor parallel group, in its order."""
    return ranks_of_group(groups.get_tensor_model_parallel_group())


def expert_parallel_ranks(parameter: torch.nn.Parameter) -> Tuple[int, ...]:
    """The global ranks of the expert parallel group that an expert's parameter belongs to, in its order."""
    return ranks_of_group(read(groups, '_get_expert_parallel_group')(read(parameter, 'group_name')))


class LocalExpert(NamedTuple):
    """The list of experts, by name, that an expert of this rank is in, its index there and their number."""
    experts: str
    index: int
    count: int


def local_experts(model: torch.nn.Module) -> Dict[int, Optional[LocalExpert]]:
    """The expert of a ``deepspeed.moe`` layer that each parameter belongs to, by the parameter's id.

    None for one in the experts of several layers, such as of a layer within an expert: no single number is its own.
    """
    expert_by_id: Dict[int, Optional[LocalExpert]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            experts = read(module, 'deepspeed_experts')
            for index, expert in enumerate(experts):
                local = LocalExpert(f'{name}.deepspeed_experts'.lstrip('.'), index, len(experts))
                for parameter in expert.parameters():
                    expert_by_id[id(parameter)] = None if id(parameter) in expert_by_id else local
    return expert_by_id


def sharded_layers(model: torch.nn.Module) -> Dict[int, type]:
    """The class of the AutoTP layer that each parameter belongs to, by the parameter's id."""
    class_by_id = {}
    for module in model.modules():
        if isinstance(module, (TensorParallel_Layer, TensorParallelConv2d)):
            class_by_id.update((id(parameter), type(module)) for parameter in module.parameters())
    return class_by_id


class PublishedSplit(NamedTuple):
    """What the layer that splits a parameter says of it: the shape of the whole, and the map in its plain form.

    The map may be of a view of the whole with more leading dimensions. Without a right one ``entry`` is None, and
    ``reason`` says why, if that is known. ``layer`` names the layer's class.
    """
    layer: str
    shape: Tuple[int, ...]
    entry: Optional[Dict[str, Any]]
    reason: Optional[str] = None


def published_split(parameter: torch.nn.Parameter, layer_class: Optional[type]) -> Optional[PublishedSplit]:
    """What AutoEP, or the AutoTP layer of that class, published of the parameter; None where neither splits it."""
    if hasattr(parameter, DS_AUTOEP_UC_META):
        entry = getattr(parameter, DS_AUTOEP_UC_META)[AFFINE_MAP]
        return PublishedSplit('AutoEP', tuple(entry['logical_shape']), entry)
    if layer_class is None:
        sharded = getattr(parameter, DS_TENSOR_MODEL_PARALLEL, False)
        return PublishedSplit('an unknown layer', shape_of(parameter), None) if sharded else None
    if issubclass(layer_class, (conv_LinearLayer, Conv_LinearALlreduce)):
        reason = 'it cuts the transposed weight of a Conv1D and publishes the map of a Linear of the same shape'
        return PublishedSplit(layer_class.__name__, shape_of(parameter), None, reason)
    meta = getattr(parameter, DS_AUTOTP_UC_META, {}).get('conversion', {})
    shape = meta.get('original_shape') or shape_of(parameter)
    return PublishedSplit(layer_class.__name__, tuple(shape), meta.get(AFFINE_MAP), meta.get('unsupported_reason'))


class FlatRule(NamedTuple):
    """How a flat space is laid out: each parameter starts at a multiple of one number of elements, and each
    partition has a multiple of another.
    """
    parameter_alignment_numel: int
    partition_alignment_numel: int

    def lay_out(self, numels: List[int], partitions: int) -> Tuple[List[int], int]:
        """(start of each parameter, number of elements of a partition)."""
        starts, end = [], 0
        for numel in numels:
            starts.append(_round_up(end, self.parameter_alignment_numel))
            end = starts[-1] + numel
        return starts, _round_up(end, self.partition_alignment_numel * partitions) // partitions


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def flat_rules(optimizer: Any) -> List[FlatRule]:
    """The rule of each flat's spaces; under stage 3 every parameter is a space of its own."""
    class_name = type(optimizer).__name__
    if class_name == 'BF16_Optimizer':
        rule = FlatRule(1, read(optimizer, 'nccl_start_alignment_factor'))
        return [rule] * len(read(optimizer, 'bf16_groups_flat'))
    if class_name != 'DeepSpeedZeroOptimizer':
        return [FlatRule(1, 1)] * len(read(optimizer, 'fp16_groups'))
    aligned_bytes = 16 if read(optimizer, 'parameter_alignment') else 1
    return [
        FlatRule(aligned_bytes // math.gcd(aligned_bytes, buffer.element_size()),
                 read(optimizer, 'nccl_start_alignment_factor')) for buffer in read(optimizer, 'bit16_groups_flat')
    ]
