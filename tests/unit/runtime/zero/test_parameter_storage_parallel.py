# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Low-precision weights of experts and of tensor parallel shards, on real engines.

Experts are known by labels that each rank gives to its own; shards, and the experts of AutoEP, are compared with the
model before DeepSpeed split it.
"""

import math
import re

import numpy
import pytest
import torch
from unit.runtime.zero.engines import (arrays_of, build_engine, collectives_of, config_of, element_order, observed,
                                       plain_maps, start_deepspeed)
from unit.runtime.zero.parallel_engines import AUTOEP_CONFIGS, adam_of_experts, engine_of_autoep, forget_groups

# The number of the expert and of its layer.
EXPERT = re.compile(r'deepspeed_experts\.(\d)\.(\d)')
EXPERT_RANKS = 4
EXPERT_CONFIGS = {
    'stage 1': config_of(1),
    'stage 2, offloaded': config_of(2, 'cpu', dtype='bf16'),
    'BF16_Optimizer': config_of(1, dtype='bf16', grad_accum_dtype='fp32'),
}
SHARD_WORLD_SIZES = (2, 4)
SEED = 11
UPDATED = 0.5


class ModelWithExperts(torch.nn.Module):
    """Four experts on expert parallel groups of two ranks: ranks 0 and 2 have experts 0 and 1, the others 2 and 3."""

    def __init__(self):
        super().__init__()
        from deepspeed.moe.layer import MoE
        expert = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 4))
        expert[0].requires_grad_(False)
        self.embed = torch.nn.Embedding(5, 4)
        self.experts = MoE(4, expert, num_experts=4, ep_size=2)


def observe_experts(rank):
    start_deepspeed()
    return {label: observe_labelled_experts(config) for label, config in EXPERT_CONFIGS.items()}


def observe_labelled_experts(config):
    forget_groups()
    engine = build_engine(config, ModelWithExperts, adam_of_experts)
    for name, parameter in engine.module.named_parameters():
        parameter.data.copy_(label_of(global_name(name, torch.distributed.get_rank()), parameter.shape))
    seen = observe_storage_and_update(engine)
    seen['trained'] = [
        global_name(name, torch.distributed.get_rank()) for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    ]
    engine.destroy()
    return seen


def observe_storage_and_update(engine):
    counts = collectives_of(engine.parameter_storage, engine.parameter_storage_maps, engine.parameter_storage_maps)
    seen = {
        'collectives': counts,
        'maps': plain_maps(engine.parameter_storage_maps()),
        'arrays': arrays_of(engine.parameter_storage()),
    }
    for master in engine.optimizer_storage().values():
        master.fill_(UPDATED)
    engine.update_lp_params()
    return seen | {'updated': arrays_of(engine.parameter_storage())}


def global_name(name, rank):
    """The name of a parameter with the expert's number in the whole job, in place of that on ``rank``."""
    return EXPERT.sub(lambda found: f'deepspeed_experts.{2 * (rank % 2) + int(found[1])}.{found[2]}', name)


def label_of(name, shape):
    """Values that bf16 holds exactly, and that differ between all parameters of one shape."""
    found = EXPERT.search(name)
    expert, layer = (int(found[1]), int(found[2])) if found else (4, 0)
    return 32.0 * expert + 16 * layer + torch.arange(math.prod(shape)).view(shape)


def ranks_with(name):
    found = EXPERT.search(name)
    if found is None:
        return [0, 1, 2, 3]
    return [0, 2] if int(found[1]) < 2 else [1, 3]


each_expert_config = pytest.mark.parametrize('label', EXPERT_CONFIGS)


@each_expert_config
def test_every_rank_names_every_expert_by_its_number_in_the_whole_job(label):
    for seen in observed(observe_experts, EXPERT_RANKS):
        names = [name for name in seen[label]['maps'] if name.endswith('0.weight')]
        numbers = [int(EXPERT.search(name)[1]) for name in names]
        assert numbers == [0, 1, 2, 3]
        assert list(seen[label]['maps']) == list(seen[label]['arrays'])


@each_expert_config
def test_an_expert_is_located_on_the_ranks_that_have_it_and_everything_else_on_all(label):
    for seen in observed(observe_experts, EXPERT_RANKS):
        for name, plain_map in seen[label]['maps'].items():
            assert sorted(plain_map['ranks']) == ranks_with(name), name


@each_expert_config
def test_views_hold_the_labels_of_the_experts_they_are_named_for(label):
    for rank, seen in enumerate(observed(observe_experts, EXPERT_RANKS)):
        for name, plain_map in seen[label]['maps'].items():
            expected = label_of(name, plain_map['logical_shape']).numpy()
            if rank not in ranks_with(name):
                expected = numpy.zeros(0)
            assert numpy.array_equal(seen[label]['arrays'][name], expected), name


@each_expert_config
def test_update_lp_params_reaches_trained_experts_and_leaves_frozen_ones(label):
    for seen in observed(observe_experts, EXPERT_RANKS):
        for name, updated in seen[label]['updated'].items():
            trained = name in seen[label]['trained']
            expected = numpy.full_like(updated, UPDATED) if trained else seen[label]['arrays'][name]
            assert numpy.array_equal(updated, expected), name


class ShardedModel(torch.nn.Module):
    """Layers split by columns and by rows, of odd sizes, trained and frozen, and a norm that every rank keeps."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(6)
        self.up = torch.nn.Linear(6, 7)
        self.down = torch.nn.Linear(7, 6)
        self.frozen_up = torch.nn.Linear(6, 5)
        self.frozen_up.requires_grad_(False)


def split(pattern, partition_type):
    return {'patterns': [rf'^{pattern}\.weight$'], 'partition_type': partition_type}


TENSOR_PARALLEL = {
    'tensor_parallel': {
        'autotp_size': 2,
        'partition_config': {
            'use_default_specs': False,
            'layer_specs': [split('(up|frozen_up)', 'column'), split('down', 'row')]
        }
    }
}
SHARD_CONFIGS = {
    'stage 1': config_of(1) | TENSOR_PARALLEL,
    'stage 2, bf16': config_of(2, dtype='bf16') | TENSOR_PARALLEL,
    'stage 3': config_of(3) | TENSOR_PARALLEL,
    'stage 3, bf16, offloaded': config_of(3, 'cpu', dtype='bf16') | TENSOR_PARALLEL,
}
each_sharding = pytest.mark.parametrize('world_size, label', [(world_size, label) for world_size in SHARD_WORLD_SIZES
                                                              for label in SHARD_CONFIGS])


def observe_shards(rank):
    start_deepspeed()
    seen = {}
    for label, config in SHARD_CONFIGS.items():
        forget_groups()
        engine = build_engine(config, ShardedModel, seed=SEED)
        seen[label] = observe_storage_and_update(engine)
        engine.destroy()
    return seen


def unsplit_weights(label):
    torch.manual_seed(SEED)
    model = ShardedModel().to(torch.bfloat16 if 'bf16' in label else torch.float32)
    return arrays_of(dict(model.named_parameters()))


@each_sharding
def test_views_hold_what_the_maps_say_of_the_model_before_it_was_split(world_size, label):
    weights = unsplit_weights(label)
    for rank, seen in enumerate(observed(observe_shards, world_size)):
        assert list(seen[label]['maps']) == list(seen[label]['arrays']) == list(weights)
        for name, full in weights.items():
            assert tuple(seen[label]['maps'][name]['logical_shape']) == full.shape
            order = element_order(seen[label]['maps'][name], rank)
            assert numpy.array_equal(seen[label]['arrays'][name].flatten(), full.flatten()[order]), name


@each_sharding
def test_maps_give_every_element_to_some_rank(world_size, label):
    for name, plain_map in observed(observe_shards, world_size)[0][label]['maps'].items():
        held = {element for rank in range(world_size) for element in element_order(plain_map, rank)}
        assert held == set(range(math.prod(plain_map['logical_shape']))), name


@each_sharding
def test_each_rank_has_only_its_shards_of_split_layers(world_size, label):
    for rank, seen in enumerate(observed(observe_shards, world_size)):
        for name in ('up.weight', 'up.bias', 'down.weight', 'frozen_up.weight'):
            plain_map = seen[label]['maps'][name]
            assert 0 < len(element_order(plain_map, rank)) < math.prod(plain_map['logical_shape']), name


@each_sharding
def test_update_lp_params_reaches_the_shards_of_trained_parameters_only(world_size, label):
    for seen in observed(observe_shards, world_size):
        for name, updated in seen[label]['updated'].items():
            frozen = name.startswith('frozen')
            expected = seen[label]['arrays'][name] if frozen else numpy.full_like(updated, UPDATED)
            assert numpy.array_equal(updated, expected), name


def observe_autoep(rank):
    start_deepspeed()
    seen = {}
    for label, config in AUTOEP_CONFIGS.items():
        forget_groups()
        engine, weights = engine_of_autoep(config)
        seen[label] = observe_storage_and_update(engine) | {'weights': arrays_of(weights)}
        engine.destroy()
    return seen


each_autoep = pytest.mark.parametrize('label', AUTOEP_CONFIGS)


@each_autoep
def test_views_hold_what_the_maps_say_of_the_experts_that_autoep_stacked(label):
    for rank, seen in enumerate(observed(observe_autoep, EXPERT_RANKS)):
        weights = seen[label]['weights']
        assert set(seen[label]['maps']) == set(seen[label]['arrays']) == set(weights)
        for name, full in weights.items():
            assert tuple(seen[label]['maps'][name]['logical_shape']) == full.shape
            order = element_order(seen[label]['maps'][name], rank)
            assert 0 < len(order)
            assert numpy.array_equal(seen[label]['arrays'][name].flatten(), full.flatten()[order]), name


@each_autoep
def test_update_lp_params_reaches_the_experts_that_autoep_stacked(label):
    for seen in observed(observe_autoep, EXPERT_RANKS):
        for name, updated in seen[label]['updated'].items():
            assert numpy.array_equal(updated, numpy.full_like(updated, UPDATED)), name


PARALLEL = [(observe_autoep, EXPERT_RANKS, label) for label in AUTOEP_CONFIGS]
PARALLEL += [(observe_experts, EXPERT_RANKS, label) for label in EXPERT_CONFIGS]
PARALLEL += [(observe_shards, world_size, label) for world_size in SHARD_WORLD_SIZES for label in SHARD_CONFIGS]
each_parallelism = pytest.mark.parametrize('observe, world_size, label', PARALLEL)


@each_parallelism
def test_maps_are_equal_on_all_ranks(observe, world_size, label):
    first, *others = [seen[label]['maps'] for seen in observed(observe, world_size)]
    assert all(other == first and list(other) == list(first) for other in others)


@each_parallelism
def test_only_the_first_request_for_maps_communicates_and_only_once(observe, world_size, label):
    for seen in observed(observe, world_size):
        assert seen[label]['collectives'] == [0, 1, 0]
