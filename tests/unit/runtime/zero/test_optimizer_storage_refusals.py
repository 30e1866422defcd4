# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What is refused: by configuration, on every rank and before any communication; and ranks that disagree."""

import pytest
import torch
from unit.runtime.zero.engines import (EvenModel, TinyModel, build_engine, collectives_so_far, config_of, observed,
                                       reversed_adam, start_deepspeed)
from unit.runtime.zero.parallel_engines import adam_of_experts, forget_groups

from deepspeed.runtime.zero.zero_affine import (REFUSED_CONFIGURATIONS, REFUSED_ENGINES, OptimizerStateNotReadyError,
                                                UnsupportedEngineError)

# One configuration per key of REFUSED_CONFIGURATIONS, each of which DeepSpeed accepts.
OFFLOAD = 'zero_optimization.offload_optimizer.'
EXAMPLES = {
    'zero_optimization.stage': config_of(0),
    OFFLOAD + 'device': config_of(3, {'device': 'nvme', 'nvme_path': '/nvme'}),
    'zero_optimization.offload_param.device': config_of(3, offload_param={'device': 'nvme', 'nvme_path': '/nvme'}),
    OFFLOAD + 'super_offload': config_of(3, {'device': 'cpu', 'super_offload': True}),
    'zero_optimization.zenflow': config_of(2, 'cpu', zenflow={'topk_ratio': 0.1}),
    'zero_optimization.zero_quantized_weights': config_of(3, zero_quantized_weights=True),
    'zero_optimization.zero_quantized_nontrainable_weights': config_of(3, zero_quantized_nontrainable_weights=True),
    'compile.deepcompile': config_of(3) | {'compile': {'deepcompile': True}},
    'hybrid_engine.enabled': config_of(3) | {'hybrid_engine': {'enabled': True}},
}  # yapf: disable


def initialize(model, optimizer, config, **options):
    """``deepspeed.initialize``'s engine; the mpu that it leaves behind for later engines is taken away again."""
    import deepspeed
    from deepspeed.utils import groups
    engine, *_ = deepspeed.initialize(model=model,
                                      optimizer=optimizer,
                                      config=config,
                                      dist_init_required=False,
                                      **options)
    groups.mpu = None
    return engine


def refusal_of(engine):
    """The text of each refusal of ``engine``, and the collectives that this rank began meanwhile."""
    before = collectives_so_far()
    texts = []
    calls = [engine.optimizer_storage_maps, engine.optimizer_storage]
    if engine.basic_optimizer is not None:
        # Without one, the model's weights are described nevertheless.
        calls += [engine.parameter_storage_maps, engine.parameter_storage, engine.update_lp_params]
    for call in calls:
        try:
            call()
            texts.append(None)
        except UnsupportedEngineError as error:
            texts.append(str(error))
    return texts, collectives_so_far() - before


def observe_refusals(rank):
    from deepspeed.runtime.config import DeepSpeedConfig
    start_deepspeed()
    seen = {build.__name__: refusal_of(build(rank)) for build in ENGINES.values()}
    engine = build_engine(config_of(2), EvenModel)
    for key, config in EXAMPLES.items():
        engine._config = DeepSpeedConfig(config)
        seen[key] = refusal_of(engine)
    return seen


def engine_without_partitioning(rank):
    return build_engine(config_of(0), EvenModel)


# DeepSpeed builds plain CPU offload of stages 1 and 2 where NVMe is asked for.
NVME = {'device': 'nvme', 'nvme_path': '/nvme'}


def engine_of_stage_2_with_optimizer_on_nvme(rank):
    return build_engine(config_of(2, NVME), EvenModel)


def engine_of_stage_1_with_parameters_on_nvme(rank):
    return build_engine(config_of(1, offload_param=NVME), EvenModel)


def engine_of_stage_1_with_quantized_weights(rank):
    return build_engine(config_of(1, zero_quantized_weights=True), EvenModel)


def engine_with_quantized_initialization(rank):
    import deepspeed
    quantized = {'num_bits': 8, 'group_size': 6, 'group_dim': 1, 'symmetric': False}
    config = config_of(3, dtype='bf16') | {'weight_quantization': {'quantized_initialization': quantized}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = EvenModel()
    return initialize(model, torch.optim.Adam(model.parameters()), config)


def engine_without_optimizer(rank):
    return initialize(EvenModel(), None, config_of(3))


def pipeline_engine(rank):
    from deepspeed.pipe import PipelineModule
    model = PipelineModule([torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)], num_stages=2)
    return initialize(model, torch.optim.Adam(model.parameters()), config_of(1))


def engine_with_experts_and_tensor_parallelism(rank):
    from deepspeed.moe.layer import MoE
    forget_groups()
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), MoE(6, torch.nn.Linear(6, 6), num_experts=2, ep_size=1))
    split = {'patterns': [r'^0\.weight$'], 'partition_type': 'column'}
    tensor_parallel = {'autotp_size': 2, 'partition_config': {'use_default_specs': False, 'layer_specs': [split]}}
    return initialize(model, adam_of_experts([{
        'params': list(model.parameters())
    }]),
                      config_of(1) | {'tensor_parallel': tensor_parallel})


def engine_of_a_mesh(rank):
    forget_groups()
    engine = build_engine(config_of(1) | {'data_parallel_size': 1, 'sequence_parallel_size': 2}, EvenModel)
    forget_groups()
    return engine


class ModelParallelism:
    """An ``mpu`` that says how many ranks share the model; each rank trains on data of its own group of one."""

    def __init__(self, world_size, model_parallel_world_size):
        groups = [torch.distributed.new_group([rank]) for rank in range(world_size)]
        self.own_group = groups[torch.distributed.get_rank()]
        self.model_parallel_world_size = model_parallel_world_size

    def get_model_parallel_world_size(self):
        return self.model_parallel_world_size

    def get_model_parallel_rank(self):
        return torch.distributed.get_rank() if self.model_parallel_world_size > 1 else 0

    def get_model_parallel_group(self):
        return torch.distributed.group.WORLD if self.model_parallel_world_size > 1 else self.own_group

    def get_data_parallel_world_size(self):
        return 1

    def get_data_parallel_rank(self):
        return 0

    def get_data_parallel_group(self):
        return self.own_group


def engine_with_mpu(model_parallel_world_size):
    model = EvenModel()
    return initialize(model,
                      torch.optim.Adam(model.parameters()),
                      config_of(1),
                      mpu=ModelParallelism(2, model_parallel_world_size))


def engine_with_model_parallelism(rank):
    return engine_with_mpu(2)


def engine_of_independent_replicas(rank):
    return engine_with_mpu(1)


def engine_with_an_optimizer_of_a_later_release(rank):
    engine = build_engine(config_of(1), EvenModel)
    engine.optimizer.__class__ = type('LaterZeroOptimizer', (type(engine.optimizer), ), {})
    return engine


# What the text must name: how to build an engine that is refused for it.
ENGINES = {
    'zero_optimization.stage': engine_without_partitioning,
    OFFLOAD + 'device': engine_of_stage_2_with_optimizer_on_nvme,
    'zero_optimization.offload_param.device': engine_of_stage_1_with_parameters_on_nvme,
    'zero_optimization.zero_quantized_weights': engine_of_stage_1_with_quantized_weights,
    'weight_quantization': engine_with_quantized_initialization,
    'optimizer': engine_without_optimizer,
    'PipelineModule': pipeline_engine,
    'MoE layers and tensor_parallel.autotp_size': engine_with_experts_and_tensor_parallelism,
    'sequence_parallel_size': engine_of_a_mesh,
    'mpu': engine_with_model_parallelism,
    'of a world of 2': engine_of_independent_replicas,
    'LaterZeroOptimizer': engine_with_an_optimizer_of_a_later_release,
}
REASONS = [(key, key) for key in EXAMPLES] + [(name, build.__name__) for name, build in ENGINES.items()]


def test_every_refusal_has_an_example():
    assert sorted(EXAMPLES) == sorted(rule.key for rule in REFUSED_CONFIGURATIONS)
    assert set(ENGINES) >= {rule.key for rule in REFUSED_ENGINES}


@pytest.mark.parametrize('key', EXAMPLES)
def test_a_configuration_is_refused_for_its_own_key_alone(key):
    from deepspeed.runtime.config import DeepSpeedConfig
    config = DeepSpeedConfig(EXAMPLES[key])
    assert [rule.key for rule in REFUSED_CONFIGURATIONS if rule.found_in(config)] == [key]


@pytest.mark.parametrize('named, label', REASONS)
def test_every_rank_refuses_maps_and_views_and_names_the_reason(named, label):
    for seen in observed(observe_refusals, 2):
        texts, _ = seen[label]
        assert all(text is not None and named in text for text in texts), texts


@pytest.mark.parametrize('named, label', REASONS)
def test_a_refusal_says_what_to_use_instead(named, label):
    texts, _ = observed(observe_refusals, 2)[0][label]
    assert all(any(word in text for word in ('use ', 'set it', 'keep ', 'train with', 'give ')) for text in texts)


@pytest.mark.parametrize('named, label', REASONS)
def test_a_refusal_comes_before_any_communication(named, label):
    for seen in observed(observe_refusals, 2):
        assert seen[label][1] == 0


def test_a_refusal_is_not_mistaken_for_a_state_that_is_not_ready_or_never_kept():
    assert not issubclass(UnsupportedEngineError, (OptimizerStateNotReadyError, ValueError))


def errors_of_disagreement(rank):
    start_deepspeed()
    seen = {}
    # The same parameters and sizes on every rank, so nothing in DeepSpeed notices.
    seen['order'] = error_of_maps(
        build_engine(config_of(1), EvenModel, reversed_adam if rank == 1 else torch.optim.Adam))
    engine = build_engine(config_of(1), TinyModel)
    if rank == 1:
        engine.module.up.weight.data = torch.zeros(11, 5)
    seen['replaced'] = error_of_maps(engine)
    return seen


def error_of_maps(engine):
    try:
        engine.optimizer_storage_maps()
    except RuntimeError as error:
        return str(error)


def test_every_rank_raises_and_names_the_rank_that_lays_out_the_optimizer_differently():
    for seen in observed(errors_of_disagreement, 3):
        assert 'ranks [1] lay out the optimizer differently from rank 0' in seen['order']


def test_a_rank_that_cannot_read_its_layout_says_why_and_the_others_name_it():
    others = [seen['replaced'] for rank, seen in enumerate(observed(errors_of_disagreement, 3)) if rank != 1]
    assert 'shape (11, 5)' in observed(errors_of_disagreement, 3)[1]['replaced']
    assert all('ranks [1] could not read their layout' in text for text in others)
