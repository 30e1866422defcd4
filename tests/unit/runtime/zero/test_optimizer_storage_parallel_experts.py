# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Experts on 4 ranks: those of ``deepspeed.moe``, and those that AutoEP makes of the experts of a model.

DeepSpeed's checkpoint has each expert of ``deepspeed.moe`` in a file of its own, by its number in the whole job, and
everything else in another. Before the first step, AutoEP's experts are those of the model as it was built.
"""

import glob
import math
import os
import re

import numpy
import pytest
import torch
from unit.ranks import rank_folder
from unit.runtime.zero.engines import (arrays_of, assemble, build_engine, collectives_of, config_of, element_order,
                                       observed, own_flats, own_states, plain_maps, start_deepspeed, train)
from unit.runtime.zero.parallel_engines import (AUTOEP_CONFIGS, adam_of_experts, engine_of_autoep, forget_groups)

WORLD_SIZE = 4


class ModelWithExperts(torch.nn.Module):
    """Expert parallel groups of 2, 4 and 1 ranks, with 2, 1 and 3 experts on a rank."""

    def __init__(self):
        super().__init__()
        from deepspeed.moe.layer import MoE
        expert = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 6))
        half_frozen = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Linear(3, 6))
        half_frozen[0].requires_grad_(False)
        self.tokens = torch.nn.Embedding(13, 6)
        self.pairs = MoE(6, expert, num_experts=4, ep_size=2)
        self.fours = MoE(6, half_frozen, num_experts=4, ep_size=4, use_residual=True)
        self.local = MoE(6, torch.nn.Linear(6, 6), num_experts=3, ep_size=1)
        self.head = torch.nn.Linear(6, 13, bias=False)

    def forward(self, tokens):
        hidden = self.tokens(tokens)
        for layer in (self.pairs, self.fours, self.local):
            hidden = hidden + layer(hidden)[0]
        logits = self.head(hidden)
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


CONFIGS = {
    'stage 1':
    config_of(1),
    'stage 2':
    config_of(2),
    'stage 1, data before experts':
    config_of(1) | {
        'use_data_before_expert_parallelism': True
    },
    'stage 2, aligned, round robin, offloaded':
    config_of(2, 'cpu', dtype='bf16', round_robin_gradients=True, parameter_alignment=True),
    'BF16_Optimizer':
    config_of(1, dtype='bf16', grad_accum_dtype='fp32'),
}
each_config = pytest.mark.parametrize('label', CONFIGS)

each_autoep = pytest.mark.parametrize('label', AUTOEP_CONFIGS)
each = pytest.mark.parametrize('label', [*CONFIGS, *AUTOEP_CONFIGS])


def group_of(name):
    return name.endswith('bias')


def observe_experts(rank):
    start_deepspeed()
    seen = {}
    for label, config in CONFIGS.items():
        forget_groups()
        engine = build_engine(config, ModelWithExperts, adam_of_experts, group_of=group_of)
        train(engine, 2)
        folder = os.path.join(rank_folder(), label)
        engine.save_checkpoint(folder, tag='written')
        torch.distributed.barrier()
        weights = weights_of_checkpoint(os.path.join(folder, 'written'))
        seen[label] = observe_storage(engine) | {'weights': weights} | observe_moments(engine)
        engine.destroy()
    for label, config in AUTOEP_CONFIGS.items():
        forget_groups()
        engine, weights = engine_of_autoep(config)
        seen[label] = observe_storage(engine) | {'weights': arrays_of(weights)}
        train(engine, 1)
        seen[label] |= observe_moments(engine)
        engine.destroy()
    return seen


def observe_storage(engine):
    counts = collectives_of(engine.optimizer_storage, engine.optimizer_storage_maps, engine.optimizer_storage_maps)
    views = engine.optimizer_storage()
    storages = {flat.untyped_storage().data_ptr() for flat in own_flats(engine)}
    return {
        'collectives': counts,
        'maps': plain_maps(engine.optimizer_storage_maps()),
        'masters': arrays_of(views),
        'strangers': [name for name, view in views.items() if view.untyped_storage().data_ptr() not in storages],
        'dtype': engine.module.head.weight.dtype,
    }


def observe_moments(engine):
    """Moments that were made equal to their masters, and these."""
    for flat, moment in zip(own_flats(engine), own_states(engine, 'exp_avg')):
        moment.copy_(flat.detach())
    return {
        'moments': arrays_of(engine.optimizer_storage('exp_avg')),
        'their masters': arrays_of(engine.optimizer_storage())
    }


def weights_of_checkpoint(folder):
    """{key: array} of all experts and of what is no expert."""
    weights = torch.load(os.path.join(folder, 'mp_rank_00_model_states.pt'), weights_only=False)['module']
    for path in glob.glob(os.path.join(folder, 'layer_*_expert_*_model_states.pt')):
        weights |= torch.load(path, weights_only=False)
    return arrays_of(weights)


def by_rank(label):
    return [seen[label] for seen in observed(observe_experts, WORLD_SIZE)]


@each
def test_full_tensors_by_the_maps_equal_the_experts_of_the_whole_job(label):
    seen = by_rank(label)
    full = assemble(seen[0]['maps'], [rank['masters'] for rank in seen])
    weights = {key: array for key, array in seen[0]['weights'].items() if not is_frozen(key)}
    assert sorted(full) == sorted(weights)
    for key, array in weights.items():
        masters = arrays_of({key: torch.from_numpy(full[key]).to(seen[0]['dtype'])})[key]
        assert masters.shape == array.shape and numpy.array_equal(masters, array), key


def is_frozen(key):
    return re.fullmatch(r'fours\.(mlp|deepspeed_moe\.experts\.deepspeed_experts\.\d)\.0\.(weight|bias)',
                        key) is not None


@each_config
def test_every_expert_of_the_job_has_a_key_on_every_rank(label):
    for rank in by_rank(label):
        for layer, experts, below in (('pairs', 4, '.2.weight'), ('fours', 4, '.1.weight'), ('local', 3, '.bias')):
            keys = [f'{layer}.deepspeed_moe.experts.deepspeed_experts.{expert}{below}' for expert in range(experts)]
            assert [key for key in rank['maps'] if key in keys] == keys
            assert [key for key in rank['masters'] if key in keys] == keys


@each
def test_maps_and_views_have_the_same_keys_in_the_same_order_on_all_ranks(label):
    first, *others = by_rank(label)
    for other in others:
        assert other['maps'] == first['maps'] and list(other['maps']) == list(first['maps'])
        assert list(other['masters']) == list(first['maps'])


@each_config
def test_an_expert_is_on_no_rank_outside_its_expert_data_parallel_group(label):
    maps = by_rank(label)[0]['maps']
    groups = {'fours': [{0}, {1}, {2}, {3}], 'pairs': [{0, 2}, {0, 2}, {1, 3}, {1, 3}]}
    if 'data before experts' in label:
        groups['pairs'] = [{0, 1}, {0, 1}, {2, 3}, {2, 3}]
    for layer, group_by_expert in groups.items():
        holders = [
            set.union(*(set(parameter_map['ranks']) for key, parameter_map in maps.items()
                        if key.startswith(f'{layer}.deepspeed_moe.experts.deepspeed_experts.{expert}.')))
            for expert in range(len(group_by_expert))
        ]
        assert all(held <= group for held, group in zip(holders, group_by_expert))
        assert set.union(*holders) == set(range(WORLD_SIZE))


@each_autoep
def test_an_expert_of_autoep_is_on_the_ranks_of_its_expert_data_parallel_group_only(label):
    groups = [{0}, {1}, {2}, {3}] if 'over 4' in label else [{0, 2}, {0, 2}, {1, 3}, {1, 3}]
    for key, parameter_map in by_rank(label)[0]['maps'].items():
        if 'experts' in key:
            numel = math.prod(parameter_map['logical_shape']) // 4
            for rank in range(WORLD_SIZE):
                assert all(rank in groups[element // numel] for element in element_order(parameter_map, rank)), key


@each
def test_all_ranks_share_what_is_no_expert(label):
    maps = by_rank(label)[0]['maps']
    dense = [set(parameter_map['ranks']) for key, parameter_map in maps.items() if 'experts' not in key]
    assert set.union(*dense) == set(range(WORLD_SIZE))


@each
def test_moments_of_experts_are_laid_out_as_their_masters(label):
    for rank in by_rank(label):
        for key, masters in rank['their masters'].items():
            assert numpy.array_equal(rank['moments'][key], masters), key


@each
def test_views_of_experts_lie_in_the_optimizers_own_tensors(label):
    for rank in by_rank(label):
        assert rank['strangers'] == []


@each
def test_only_the_first_request_for_maps_communicates_and_only_once(label):
    for rank in by_rank(label):
        assert rank['collectives'] == [0, 1, 0]
