# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which engines have storage maps: the one list that the refusals, the tests and the documentation use.

All attributes of DeepSpeed's configuration and engine that decide it are read here, and nothing communicates.
"""

from dataclasses import dataclass
from typing import Any, Callable, Iterable, NamedTuple, Tuple

import deepspeed.comm as dist
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.zero_affine_upstream import ranks_of_flats, read
from deepspeed.runtime.zero.zero_affine_upstream_parameters import (has_quantized_weights, ranks_of_lp_parameters)

__all__ = [
    'REFUSED_CONFIGURATIONS', 'REFUSED_ENGINES', 'RefusedConfiguration', 'SUPPORTED_CONFIGURATIONS',
    'SUPPORTED_WITHOUT_OPTIMIZER', 'SupportedConfiguration', 'UnsupportedEngineError', 'refuse_unsupported',
    'refuse_unsupported_parameters'
]


class UnsupportedEngineError(NotImplementedError):
    """The engine is configured in a way whose storage is not described; the text names what to use instead."""


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
# sub-groups, offload_param on "cpu", secondary partitions (hpZ), torch_autocast, a model built under zero.Init and the
# sequence parallel groups of Ulysses' mpu; and, where DeepSpeed accepts it, deepspeed.moe layers, AutoEP
# (expert_parallel), AutoTP (tensor_parallel.autotp_size), masters in bf16 or fp16 (bf16_master_weights_and_grads,
# fp16_master_weights_and_grads), states in bf16 (bf16_optimizer_states) and partial offload (offload_optimizer.ratio).
SUPPORTED_CONFIGURATIONS: Tuple[SupportedConfiguration, ...] = tuple(
    SupportedConfiguration(stage, device, dtype, optimizer_class)
    for stage, optimizer_class in _OPTIMIZER_CLASS_BY_STAGE.items() for device in ('none', 'cpu')
    for dtype in ('fp32', 'bf16', 'fp16')) + (
        # What data_types.grad_accum_dtype "fp32" makes of stage 1.
        SupportedConfiguration(1, 'none', 'bf16', 'BF16_Optimizer'), )

# A model that is only run, such as a reference model: it has low-precision weights and no optimizer storage. DeepSpeed
# builds it under stage 3 only.
SUPPORTED_WITHOUT_OPTIMIZER: Tuple[SupportedConfiguration, ...] = tuple(
    SupportedConfiguration(3, device, dtype, 'DeepSpeedZeRoOffload') for device in ('none', 'cpu')
    for dtype in ('fp32', 'bf16', 'fp16'))


@dataclass(frozen=True)
class RefusedConfiguration:
    """One thing that is refused: where it is switched on, how it is recognized, and what to use instead."""
    key: str
    found_in: Callable[[Any], bool]
    instead: str


def _dtype(config: Any) -> str:
    if read(config, 'float16_config.enabled'):
        return 'fp16'
    return 'bf16' if read(config, 'bfloat16_config.enabled') else 'fp32'


def _offload_device(offload_config: Any) -> str:
    return 'none' if offload_config is None else OffloadDeviceEnum(read(offload_config, 'device')).value


def _super_offload(config: Any) -> bool:
    offload_config = read(config, 'zero_config.offload_optimizer')
    return offload_config is not None and read(offload_config, 'super_offload')


# ``found_in`` takes the engine's DeepSpeedConfig.
REFUSED_CONFIGURATIONS: Tuple[RefusedConfiguration, ...] = (
    RefusedConfiguration('zero_optimization.stage', lambda config: read(config, 'zero_config.stage') == 0,
                         'it is 0, which partitions nothing: use stage 1, 2 or 3'),
    RefusedConfiguration('zero_optimization.offload_optimizer.device',
                         lambda config: _offload_device(read(config, 'zero_config.offload_optimizer')) == 'nvme',
                         'it is "nvme", where no tensor holds the state: use "cpu" or "none"'),
    RefusedConfiguration('zero_optimization.offload_param.device',
                         lambda config: _offload_device(read(config, 'zero_config.offload_param')) == 'nvme',
                         'it is "nvme", where no tensor holds the parameter: use "cpu" or "none"'),
    RefusedConfiguration('zero_optimization.offload_optimizer.super_offload', _super_offload,
                         'a worker process then owns the states: use plain offload_optimizer with device "cpu"'),
    RefusedConfiguration('zero_optimization.zenflow', lambda config: read(config, 'zero_config.zenflow') is not None,
                         'it steps part of the parameters by itself: use plain offload_optimizer with device "cpu"'),
    RefusedConfiguration('zero_optimization.zero_quantized_weights',
                         lambda config: read(config, 'zero_config.zero_quantized_weights'),
                         'set it to false and use bf16 or fp16 weights'),
    RefusedConfiguration('zero_optimization.zero_quantized_nontrainable_weights',
                         lambda config: read(config, 'zero_config.zero_quantized_nontrainable_weights'),
                         'set it to false and use bf16 or fp16 weights'),
    RefusedConfiguration('compile.deepcompile', lambda config: read(config, 'compile_config.deepcompile'),
                         'its passes move optimizer states by themselves: set it to false'),
    RefusedConfiguration('hybrid_engine.enabled', lambda config: read(config, 'hybrid_engine.enabled'),
                         'it shares weights with its own inference: set it to false'),
)

# ``found_in`` takes the engine.
REFUSED_ENGINES: Tuple[RefusedConfiguration, ...] = (
    RefusedConfiguration('PipelineModule', lambda engine: read(engine, 'pipeline_parallelism'),
                         'a pipeline stage holds part of the model only: use a plain torch.nn.Module'),
    RefusedConfiguration('weight_quantization', has_quantized_weights,
                         'codes are then kept in place of weights: leave it out and use bf16 or fp16 weights'),
    RefusedConfiguration(
        'optimizer', lambda engine: read(engine, 'basic_optimizer') is None,
        'without one there are no masters: give one to deepspeed.initialize, or use parameter_storage() '
        'under stage 3'),
    RefusedConfiguration('MoE layers and tensor_parallel.autotp_size',
                         lambda engine: read(engine, 'has_moe_layers') and engine.autotp_size() > 1,
                         'who holds which expert then is not described: use one of the two'),
    RefusedConfiguration('mpu', lambda engine: read(engine, 'mp_world_size') > 1 and engine.autotp_size() <= 1,
                         'nobody publishes the maps of its shards: use tensor_parallel.autotp_size, without an mpu'),
    RefusedConfiguration(
        'sequence_parallel_size', lambda engine: read(engine, 'mesh_device') is not None and read(
            engine, 'sequence_parallel_size') > 1 and engine.zero_optimization_stage() < 3,
        'stages 1 and 2 then keep one copy of the masters per sequence rank, and the copies drift apart: pass the mpu '
        'deepspeed.runtime.sequence_parallel.parallel_state_sp instead of a mesh, or use stage 3'),
)


def _refuse(subject: Any, refused: Tuple[RefusedConfiguration, ...]) -> None:
    for rule in refused:
        if rule.found_in(subject):
            raise UnsupportedEngineError(f'ZeRO storage is not available with {rule.key}: {rule.instead}')


def refuse_unsupported(engine: Any) -> None:
    """Raise UnsupportedEngineError unless the engine is one of SUPPORTED_CONFIGURATIONS. Communicates nothing.

    Whatever later releases add ends at the last two checks: an optimizer class that is not listed, or partitions
    that only some of the ranks share, without experts or tensor parallelism that say who holds the rest.
    """
    _refuse(read(engine, '_config'), REFUSED_CONFIGURATIONS)
    _refuse(engine, REFUSED_ENGINES)
    _refuse_unlisted(engine, SUPPORTED_CONFIGURATIONS)
    if _is_data_parallel_only(engine):
        _refuse_part_of_the_world(ranks_of_flats(engine.optimizer))


def refuse_unsupported_parameters(engine: Any) -> None:
    """As ``refuse_unsupported``, for the model's weights: the engine need not have an optimizer under stage 3."""
    _refuse(read(engine, '_config'), REFUSED_CONFIGURATIONS)
    _refuse(engine, tuple(rule for rule in REFUSED_ENGINES if rule.key != 'optimizer'))
    _refuse_unlisted(engine, SUPPORTED_CONFIGURATIONS + SUPPORTED_WITHOUT_OPTIMIZER)
    if _is_data_parallel_only(engine):
        _refuse_part_of_the_world(ranks_of_lp_parameters(engine))


def _is_data_parallel_only(engine: Any) -> bool:
    return not read(engine, 'has_moe_layers') and engine.autotp_size() <= 1


def _refuse_unlisted(engine: Any, supported: Tuple[SupportedConfiguration, ...]) -> None:
    config = read(engine, '_config')
    configuration = SupportedConfiguration(int(read(config, 'zero_config.stage')),
                                           _offload_device(read(config, 'zero_config.offload_optimizer')),
                                           _dtype(config),
                                           type(engine.optimizer).__name__)
    if configuration not in supported:
        stage, device, dtype, optimizer_class = configuration
        raise UnsupportedEngineError(f'ZeRO storage is not available for an {optimizer_class} of stage {stage}, '
                                     f'offload_optimizer.device "{device}" and {dtype} weights: use a combination of '
                                     'deepspeed.runtime.zero.zero_affine.SUPPORTED_CONFIGURATIONS')


def _refuse_part_of_the_world(sharing_ranks: Iterable[Tuple[int, ...]]) -> None:
    world = list(range(dist.get_world_size()))
    for ranks in sharing_ranks:
        if sorted(ranks) != world:
            raise UnsupportedEngineError(
                f'ZeRO storage is not available where ranks {list(ranks)} of a world of {len(world)} share a '
                'parameter: train with data parallelism over all ranks')
