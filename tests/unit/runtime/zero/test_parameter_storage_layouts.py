# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Low-precision weights in the layouts that only ZeRO-3 has, while offloaded, and while gathered, on real engines."""

import functools
import itertools

import numpy
import pytest
import torch
from unit.runtime.zero.engines import (TinyModel, TrainedModel, arrays_of, build_engine, config_of, element_order,
                                       gathered, losses_of, observed, partitioned, plain_maps, start_deepspeed,
                                       three_groups, train, write_full)

VOCABULARY = 13
WORLD_SIZES = (1, 2, 3)
# Each is a configuration of ZeRO-3 in bf16; what is persistent or has a secondary partition is kept gathered too.
LAYOUTS = {
    'persistent': {},
    'nothing persistent': {'stage3_param_persistence_threshold': 0},
    'sub-groups': {'sub_group_size': 40},
    'several groups': {},
    'offloaded parameters': {'offload_param': {'device': 'cpu', 'pin_memory': False}},
    'offloaded parameters, nothing persistent': {
        'offload_param': {'device': 'cpu', 'pin_memory': False},
        'stage3_param_persistence_threshold': 0
    },
    'zero.Init': {},
    'without optimizer': {},
    'zero.Init without optimizer': {},
}  # yapf: disable
HPZ_LAYOUTS = {
    'persistent': {},
    'nothing persistent': {'stage3_param_persistence_threshold': 0},
    'without optimizer': {},
}  # yapf: disable
# On 2 ranks the one secondary group is the world, on 4 there are two groups.
HPZ_WORLD_SIZES = (2, 4)
# (stage, pin_memory)
OFFLOADINGS = list(itertools.product((1, 2, 3), (False, True)))


def observe_layouts(rank):
    start_deepspeed()
    return {label: observe_layout(label, options) for label, options in LAYOUTS.items()}


def observe_secondary_partitions(rank):
    start_deepspeed()
    return {
        label: observe_layout(label, {'zero_hpz_partition_size': 2} | options)
        for label, options in HPZ_LAYOUTS.items()
    }


def observe_layout(label, options):
    engine = engine_of(label, config_of(3, dtype='bf16', **options))
    rank = torch.distributed.get_rank()
    maps = plain_maps(engine.parameter_storage_maps())
    seen = {'maps': maps, 'arrays': {}, 'reference': {}}
    note_parameters(engine, seen, 'built')
    if not label.endswith('without optimizer'):
        train(engine, 1)
    losses_of(engine, VOCABULARY)
    note_parameters(engine, seen, 'run')

    plain = plain_model()
    new = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    # This makes the gathered copies that the engine keeps.
    losses_of(engine, VOCABULARY)
    for name, view in engine.parameter_storage().items():
        if label.endswith('without optimizer') or name.startswith('frozen'):
            view.copy_(new[name].flatten()[element_order(maps[name], rank)])
    if not label.endswith('without optimizer'):
        write_full(engine, 'fp32', new)
    engine.update_lp_params()
    seen['losses'], seen['plain losses'] = losses_of(engine, VOCABULARY), losses_of(plain, VOCABULARY)
    note_parameters(engine, seen, 'written')
    engine.destroy()
    return seen


def engine_of(label, config):
    from deepspeed.utils import groups
    if 'without optimizer' not in label:
        # Secondary groups are global to the process. Without optimizer DeepSpeed cannot make them, only find them.
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    return build_engine(config,
                        functools.partial(partitioned, TinyModel, config) if 'zero.Init' in label else TinyModel,
                        None if 'without optimizer' in label else torch.optim.Adam,
                        three_groups if label == 'several groups' else None)


def plain_model():
    """A model outside DeepSpeed, of values that bf16 holds exactly."""
    generator = torch.Generator().manual_seed(3)
    model = TinyModel().bfloat16()
    for parameter in model.parameters():
        parameter.data = (torch.randint(-30, 31, parameter.shape, generator=generator) / 64).bfloat16()
    return model


def note_parameters(engine, seen, moment):
    seen['arrays'][moment] = arrays_of(engine.parameter_storage())
    seen['reference'][moment] = gathered(engine)


each_layout = pytest.mark.parametrize('observe, world_size, label',
                                      [(observe_layouts, world_size, label) for world_size in WORLD_SIZES
                                       for label in LAYOUTS] + [(observe_secondary_partitions, world_size, label)
                                                                for world_size in HPZ_WORLD_SIZES
                                                                for label in HPZ_LAYOUTS])


@each_layout
def test_each_ranks_views_hold_what_the_maps_say_of_the_gathered_parameters(observe, world_size, label):
    for rank, seen in enumerate(observed(observe, world_size)):
        for moment, reference in seen[label]['reference'].items():
            assert list(reference) == list(seen[label]['arrays'][moment])
            for name, full in reference.items():
                order = element_order(seen[label]['maps'][name], rank)
                assert numpy.array_equal(seen[label]['arrays'][moment][name], full.flatten()[order]), (moment, name)


@each_layout
def test_maps_give_every_element_to_one_rank(observe, world_size, label):
    for name, plain_map in observed(observe, world_size)[0][label]['maps'].items():
        held = [element for rank in range(world_size) for element in element_order(plain_map, rank)]
        assert held == list(range(numpy.prod(plain_map['logical_shape']))), name


@each_layout
def test_written_weights_are_read_by_every_forward_pass_once_update_lp_params_was_called(observe, world_size, label):
    for seen in observed(observe, world_size):
        assert seen[label]['losses'] == seen[label]['plain losses']


def observe_offloading(rank):
    start_deepspeed()
    return {(stage, pinned): observe_offloaded(stage, pinned) for stage, pinned in OFFLOADINGS}


def observe_offloaded(stage, pinned):
    """Views before, during and after two cycles of offloading; during the second, each is written."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
    # DeepSpeed cannot offload frozen parameters under stage 3; the groups put its buffer into another order.
    engine = build_engine(config_of(stage, dtype='bf16'), TrainedModel, group_of=three_groups)
    train(engine, 1)
    seen = {'before': arrays_of(engine.parameter_storage()), 'reference': gathered(engine)}
    for cycle in ('first', 'second'):
        engine.offload_states(include={OffloadStateTypeEnum.lp_params}, pin_memory=pinned)
        seen[cycle] = arrays_of(engine.parameter_storage())
        if cycle == 'second':
            for view in engine.parameter_storage().values():
                view.mul_(2)
        engine.reload_states()
    seen['after'], seen['reference after'] = arrays_of(engine.parameter_storage()), gathered(engine)
    engine.destroy()
    return seen


each_offloading = pytest.mark.parametrize('stage, pinned', OFFLOADINGS)


@each_offloading
@pytest.mark.parametrize('cycle', ['first', 'second'])
def test_views_show_the_same_weights_while_offloaded(stage, pinned, cycle):
    for seen in observed(observe_offloading, 2):
        for name, before in seen[stage, pinned]['before'].items():
            assert numpy.array_equal(seen[stage, pinned][cycle][name], before), name


@each_offloading
def test_what_is_written_while_offloaded_comes_back_with_the_weights(stage, pinned):
    for seen in observed(observe_offloading, 2):
        for name, reference in seen[stage, pinned]['reference'].items():
            assert numpy.array_equal(seen[stage, pinned]['reference after'][name], 2 * reference), name
            assert numpy.array_equal(seen[stage, pinned]['after'][name], 2 * seen[stage, pinned]['before'][name]), name
