# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""``update_lp_params`` on real engines, against twins that DeepSpeed itself brings to the same masters.

A twin gets its masters through ``safe_set_full_fp32_param`` and its weights by a step of learning rate 0.
"""

import functools

import numpy
import pytest
import torch
from unit.runtime.zero.engines import (DTYPES, EvenModel, arrays_of, build_engine, config_of, full_reference, gathered,
                                       losses_of, observed, partitioned, start_deepspeed, train, write_full)

from deepspeed.runtime.zero.zero_affine import SUPPORTED_CONFIGURATIONS

WORLD_SIZES = (1, 2, 3)
VOCABULARY = 6
NOTHING_PERSISTENT = {'stage3_param_persistence_threshold': 0}
STAGE_3_LAYOUTS = {
    'nothing persistent': NOTHING_PERSISTENT,
    'sub-groups': {'sub_group_size': 40},
    'offloaded parameters': {'offload_param': {'device': 'cpu', 'pin_memory': False}},
    'zero.Init': {},
}  # yapf: disable
STAGES = (1, 2, 3)
LOW_PRECISION_MASTERS = {
    'bf16': {
        'enabled': True,
        'bf16_master_weights_and_grads': True,
        'bf16_optimizer_states': True
    }
}
# DeepSpeed offloads masters of stage 3 with its own FusedAdam only.
OTHER_MASTERS = {
    **{f'bf16 masters, stage {stage}': config_of(stage) | LOW_PRECISION_MASTERS for stage in STAGES},
    **{f'offloaded masters, stage {stage}': config_of(stage, dtype='bf16') for stage in (1, 2)},
}  # yapf: disable
HPZ_LAYOUTS = {'hpZ': {}, 'hpZ, nothing persistent': NOTHING_PERSISTENT}
# On 2 ranks the one secondary group is the world, on 4 there are two groups.
HPZ_WORLD_SIZES = (2, 4)


def observe_all(rank):
    start_deepspeed()
    seen = {}
    for configuration in SUPPORTED_CONFIGURATIONS:
        grad_accum_dtype = 'fp32' if configuration.optimizer_class == 'BF16_Optimizer' else None
        config = config_of(configuration.stage, configuration.offload_optimizer, configuration.dtype, grad_accum_dtype)
        seen[configuration] = observe_update(config, DTYPES[configuration.dtype])
    for label, options in STAGE_3_LAYOUTS.items():
        seen[label] = observe_update(config_of(3, dtype='bf16', **options), torch.bfloat16, label == 'zero.Init')
    for label, config in OTHER_MASTERS.items():
        seen[label] = observe_update(config, torch.bfloat16, offloads_masters='offloaded' in label)
    return seen


def observe_secondary_partitions(rank):
    start_deepspeed()
    return {
        label: observe_update(config_of(3, dtype='bf16', zero_hpz_partition_size=2, **options), torch.bfloat16)
        for label, options in HPZ_LAYOUTS.items()
    }


def observe_autocast(rank):
    """In processes of its own: what autocast switches on is global to a process."""
    start_deepspeed()
    autocast = {'torch_autocast': {'enabled': True, 'dtype': 'bfloat16'}}
    return {stage: observe_update(config_of(stage) | autocast, torch.float32) for stage in STAGES}


def observe_update(config, dtype, built_partitioned=False, offloads_masters=False):
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
    from deepspeed.utils import safe_set_full_fp32_param
    written, twin = [build_trained(config, built_partitioned) for _ in range(2)]
    old, views = gathered(written), written.parameter_storage()
    # This makes the gathered copies that stage 3 keeps: persistent parameters and secondary partitions.
    losses_of(written, VOCABULARY)
    new = {name: full * 0.5 + 0.25 for name, full in full_reference(twin, 'fp32').items()}

    if offloads_masters:
        written.offload_states(include={OffloadStateTypeEnum.hp_params})
    write_full(written, 'fp32', new)
    seen = {'old': old}
    written.update_lp_params()

    for name, parameter in twin.module.named_parameters():
        safe_set_full_fp32_param(parameter, new[name])
    for group in twin.optimizer.param_groups:
        group['lr'] = 0.0
    train(twin, 1, first=1)
    seen['statuses'], seen['statuses of the twin'] = statuses_of(written), statuses_of(twin)

    # First of all: after gathering, autocast gathers the parameters anew, rounded to the dtype it communicates in.
    seen['losses'], seen['losses of the twin'] = losses_of(written, VOCABULARY), losses_of(twin, VOCABULARY)
    seen['expected'] = {name: full.to(dtype).float().numpy() for name, full in new.items()}
    seen['gathered'], seen['views'] = gathered(written), arrays_of(written.parameter_storage())
    seen['views taken before'] = arrays_of(views)
    for engine in (written, twin):
        engine.destroy()
    return seen


def build_trained(config, built_partitioned):
    from deepspeed.utils import groups
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    engine = build_engine(config,
                          functools.partial(partitioned, EvenModel, config) if built_partitioned else EvenModel)
    train(engine, 1)
    return engine


def statuses_of(engine):
    """Which parameters stage 3 keeps gathered; None under the others."""
    return {name: getattr(parameter, 'ds_status', None) for name, parameter in engine.module.named_parameters()}


CASES = [
    pytest.param(
        observe_all, world_size, key, id=f'{world_size}-{key if isinstance(key, str) else "-".join(map(str, key))}')
    for world_size in WORLD_SIZES for key in SUPPORTED_CONFIGURATIONS + (*STAGE_3_LAYOUTS, *OTHER_MASTERS)
] + [
    pytest.param(observe_secondary_partitions, world_size, key, id=f'{world_size}-{key}')
    for world_size in HPZ_WORLD_SIZES for key in HPZ_LAYOUTS
] + [pytest.param(observe_autocast, 2, stage, id=f'autocast-{stage}') for stage in STAGES]
each_case = pytest.mark.parametrize('observe, world_size, key', CASES)


@each_case
def test_the_forward_pass_equals_that_of_an_engine_that_deepspeed_brought_to_the_same_masters(
        observe, world_size, key):
    for seen in observed(observe, world_size):
        assert seen[key]['losses'] == seen[key]['losses of the twin']


@each_case
def test_weights_equal_the_masters_in_the_models_dtype(observe, world_size, key):
    for seen in observed(observe, world_size):
        for name, expected in seen[key]['expected'].items():
            assert numpy.array_equal(seen[key]['gathered'][name], expected), name


@each_case
def test_every_weight_really_changes_with_the_update(observe, world_size, key):
    for seen in observed(observe, world_size):
        for name, old in seen[key]['old'].items():
            assert not numpy.isclose(old, seen[key]['expected'][name], atol=1e-3).all(), name


@each_case
def test_views_taken_before_the_update_show_it(observe, world_size, key):
    for seen in observed(observe, world_size):
        for name, view in seen[key]['views'].items():
            assert numpy.array_equal(view, seen[key]['views taken before'][name]), name


@each_case
def test_the_same_parameters_stay_gathered_as_after_a_step(observe, world_size, key):
    for seen in observed(observe, world_size):
        assert seen[key]['statuses'] == seen[key]['statuses of the twin']


def test_the_cases_include_parameters_that_stay_gathered_and_others():
    statuses = [observed(observe_all, 2)[0][key]['statuses'] for key in STAGE_3_LAYOUTS]
    assert len({str(status) for by_name in statuses for status in by_name.values()}) == 2
