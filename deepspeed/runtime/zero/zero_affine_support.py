# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which engines have storage maps: the one list that the refusals, the tests and the documentation use.

All attributes of DeepSpeed's configuration and engine that decide it are read here, and nothing communicates.
"""

from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Tuple

import deepspeed.comm as dist
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.zero_affine_upstream import ranks_of_flats

__all__ = [
    'REFUSED_CONFIGURATIONS', 'REFUSED_ENGINES', 'RefusedConfiguration', 'SUPPORTED_CONFIGURATIONS',
    'SupportedConfiguration', 'UnsupportedEngineError', 'refuse_unsupported'
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


def refuse_unsupported(engine: Any) -> None:
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
    for ranks in ranks_of_flats(engine.optimizer):
        if sorted(ranks) != world:
            raise UnsupportedEngineError(
                f'optimizer storage is not available where ranks {list(ranks)} of a world of {len(world)} share a '
                'partitioned parameter: train with data parallelism over all ranks')
