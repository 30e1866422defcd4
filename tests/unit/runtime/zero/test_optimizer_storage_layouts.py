# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Layouts beyond one parameter group in its given order, on real engines.

Under stages 1 and 2 DeepSpeed's own accessors are wrong for several groups and for ``round_robin_gradients``. The
oracle there is the labelled buffer: each element of the flat masters is set to its own position in the whole buffer,
DeepSpeed copies the masters into the model, and the model's parameters then say which position belongs to which
element.
"""

import functools
import itertools

import numpy
import pytest
from unit.runtime.zero.engines import (TinyModel, arrays_of, assemble, build_engine, config_of, full_reference,
                                       label_flats, observed, own_flats, own_states, partitioned, plain_maps,
                                       start_deepspeed, three_groups, train)

WORLD_SIZES = (1, 2, 3)
STAGES_1_AND_2 = list(itertools.product((1, 2), ('none', 'cpu'), (False, True), (False, True)))
BF16_OPTIMIZER = 'BF16_Optimizer'
LABELLED = STAGES_1_AND_2 + [BF16_OPTIMIZER]


def observe_layouts(rank):
    start_deepspeed()
    labelled = {layout: observe_labelled_layout(rank, layout) for layout in LABELLED}
    return labelled | {
        label: observe_layout(config_of(3, 'none', 'bf16', **options), label)
        for label, options in STAGE_3_CONFIGS.items()
    }


def observe_labelled_layout(rank, layout):
    if layout == BF16_OPTIMIZER:
        config = config_of(1, dtype='bf16', grad_accum_dtype='fp32')
    else:
        stage, offload, round_robin, alignment = layout
        config = config_of(stage, offload, round_robin_gradients=round_robin, parameter_alignment=alignment)
    engine = build_engine(config, group_of=three_groups)
    train(engine, 1)
    # Labels stay below 256, which bf16 holds exactly.
    label_flats(own_flats(engine), rank)
    label_flats(own_states(engine, 'exp_avg'), rank)
    engine.optimizer.update_lp_params()
    seen = {
        'maps': plain_maps(engine.optimizer_storage_maps()),
        'masters': arrays_of(engine.optimizer_storage()),
        'moments': arrays_of(engine.optimizer_storage('exp_avg')),
        'labels': arrays_of({
            name: p
            for name, p in engine.module.named_parameters() if p.requires_grad
        }),
    }
    engine.destroy()
    return seen


each_world = pytest.mark.parametrize('world_size', WORLD_SIZES)
each_labelled = pytest.mark.parametrize('layout', LABELLED, ids=str)


@each_world
@each_labelled
@pytest.mark.parametrize('state', ['masters', 'moments'])
def test_full_tensors_by_the_maps_equal_the_labels_that_deepspeed_puts_into_the_model(world_size, layout, state):
    by_rank = [seen[layout] for seen in observed(observe_layouts, world_size)]
    full = assemble(by_rank[0]['maps'], [seen[state] for seen in by_rank])
    for name, labels in by_rank[0]['labels'].items():
        assert numpy.array_equal(full[name], labels), name


@each_world
@each_labelled
def test_maps_of_several_groups_are_equal_on_all_ranks(world_size, layout):
    first, *others = [seen[layout]['maps'] for seen in observed(observe_layouts, world_size)]
    assert all(other == first for other in others)


def first_labels(world_size, layout):
    """{name: position of the parameter's first element}, in the order of the positions."""
    labels = observed(observe_layouts, world_size)[0][layout]['labels']
    return dict(sorted(((name, array.flat[0]) for name, array in labels.items()), key=lambda item: item[1]))


def test_the_round_robin_layouts_really_are_in_another_order():
    assert list(first_labels(2, (1, 'none', True, False))) != list(first_labels(2, (1, 'none', False, False)))


def test_the_aligned_layouts_really_have_padding_inside():
    # In the given order, up.weight (55 elements) directly follows mix (30 elements) in its group.
    plain, aligned = (first_labels(2, (1, 'none', False, alignment)) for alignment in (False, True))
    assert plain['up.weight'] - plain['mix'] == 30
    assert aligned['up.weight'] - aligned['mix'] == 32


STAGE_3_CONFIGS = {
    'several groups': {},
    'sub-groups': {
        'sub_group_size': 40
    },
    'nothing persistent': {
        'stage3_param_persistence_threshold': 0
    },
    'offloaded parameters': {
        'offload_param': {
            'device': 'cpu',
            'pin_memory': False
        }
    },
    'zero.Init': {},
}
# What autocast and secondary partitions switch on is global to a process, so each has processes of its own.
AUTOCAST_STAGES = (1, 2, 3)


def observe_autocast(rank):
    start_deepspeed()
    return {
        stage: observe_layout({
            **config_of(stage), 'torch_autocast': {
                'enabled': True,
                'dtype': 'bfloat16'
            }
        })
        for stage in AUTOCAST_STAGES
    }


def observe_secondary_partitions(rank):
    start_deepspeed()
    return {2: observe_layout(config_of(3, 'none', 'bf16', zero_hpz_partition_size=2))}


def observe_layout(config, label=None):
    model_class = functools.partial(partitioned, TinyModel, config) if label == 'zero.Init' else TinyModel
    engine = build_engine(config, model_class, group_of=three_groups if label == 'several groups' else None)
    seen = {'arrays': {}, 'reference': {}}
    for steps in (0, 1, 2):
        train(engine, min(steps, 1), first=steps)
        for state in ('fp32', 'exp_avg', 'exp_avg_sq') if steps else ('fp32', ):
            seen['arrays'][steps, state] = arrays_of(engine.optimizer_storage(state))
            seen['reference'][steps, state] = arrays_of(full_reference(engine, state))
    seen['maps'] = plain_maps(engine.optimizer_storage_maps())
    engine.destroy()
    return seen


@pytest.mark.parametrize('observe, world_size, label',
                         [(observe_layouts, world_size, label) for world_size in WORLD_SIZES
                          for label in STAGE_3_CONFIGS] + [(observe_autocast, 2, stage) for stage in AUTOCAST_STAGES] +
                         [(observe_secondary_partitions, 4, 2)])
def test_full_tensors_by_the_maps_equal_those_deepspeed_gathers(observe, world_size, label):
    by_rank = [seen[label] for seen in observed(observe, world_size)]
    for moment, reference in by_rank[0]['reference'].items():
        full = assemble(by_rank[0]['maps'], [seen['arrays'][moment] for seen in by_rank])
        assert list(full) == list(reference)
        for name in reference:
            assert numpy.array_equal(full[name], reference[name]), (moment, name)
