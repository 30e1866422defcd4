# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Layouts beyond one parameter group in its given order, and other optimizers than Adam, on real engines.

Under stages 1 and 2 DeepSpeed's own accessors are wrong for several groups and for ``round_robin_gradients``. The
oracle there is the labelled buffer: each element of the flat masters is set to its own position in the whole buffer,
DeepSpeed copies the masters into the model, and the model's parameters then say which position belongs to which
element.
"""

import functools
import itertools

import numpy
import pytest
import torch
from unit.runtime.zero.engines import (TinyModel, arrays_of, assemble, build_engine, config_of, full_reference,
                                       observed, own_flats, own_states, start_deepspeed, train)

from deepspeed.runtime.zero.zero_affine import OptimizerStateNotReadyError

WORLD_SIZES = (1, 2, 3)
STAGES_1_AND_2 = list(itertools.product((1, 2), ('none', 'cpu'), (False, True), (False, True)))
BF16_OPTIMIZER = 'BF16_Optimizer'
LABELLED = STAGES_1_AND_2 + [BF16_OPTIMIZER]


def group_of(name):
    return 0 if name.endswith('bias') or name in ('pair', 'scale') else 1 if name in ('mix', 'up.weight') else 2


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
    engine = build_engine(config, group_of=group_of)
    train(engine, 1)
    # Labels stay below 256, which bf16 holds exactly.
    label_flats(own_flats(engine), rank)
    label_flats(own_states(engine, 'exp_avg'), rank)
    engine.optimizer.update_lp_params()
    seen = {
        'maps': {
            name: parameter_map.to_dict()
            for name, parameter_map in engine.optimizer_storage_maps().items()
        },
        'masters': arrays_of(engine.optimizer_storage()),
        'moments': arrays_of(engine.optimizer_storage('exp_avg')),
        'labels': arrays_of({
            name: p
            for name, p in engine.module.named_parameters() if p.requires_grad
        }),
    }
    engine.destroy()
    return seen


def label_flats(flats, rank):
    """Number the elements of all groups' whole buffers through; a rank's flat tensor is its part of a group's."""
    first = 0
    for flat in flats:
        partition = flat.numel()
        flat.data.copy_(torch.arange(first + rank * partition, first + (rank + 1) * partition))
        first += partition * torch.distributed.get_world_size()


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


def model_of_partitioned_parameters(config):
    import deepspeed
    with deepspeed.zero.Init(config_dict_or_path=config):
        return TinyModel()


def observe_layout(config, label=None):
    model_class = functools.partial(model_of_partitioned_parameters, config) if label == 'zero.Init' else TinyModel
    engine = build_engine(config, model_class, group_of=group_of if label == 'several groups' else None)
    seen = {'arrays': {}, 'reference': {}}
    for steps in (0, 1, 2):
        train(engine, min(steps, 1), first=steps)
        for state in ('fp32', 'exp_avg', 'exp_avg_sq') if steps else ('fp32', ):
            seen['arrays'][steps, state] = arrays_of(engine.optimizer_storage(state))
            seen['reference'][steps, state] = arrays_of(full_reference(engine, state))
    seen['maps'] = {name: parameter_map.to_dict() for name, parameter_map in engine.optimizer_storage_maps().items()}
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


class Unknown(torch.optim.Optimizer):
    """An optimizer of the user's: one per-element state, beside what is none."""

    def __init__(self, params, lr):
        super().__init__(params, {'lr': lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group['params']:
                state = self.state[parameter]
                if not state:
                    state.update(trail=torch.zeros_like(parameter),
                                 step=torch.zeros_like(parameter),
                                 codes=torch.zeros_like(parameter, dtype=torch.uint8),
                                 norm=torch.zeros(1),
                                 trail_offload_buffer=torch.zeros_like(parameter))
                state['trail'].add_(parameter.grad)
                parameter.sub_(state['trail'], alpha=group['lr'])


def half_with_momentum(groups, **options):
    return torch.optim.SGD([{**group, 'momentum': 0.9 * index} for index, group in enumerate(groups)], **options)


# label: (optimizer, its options, states readable before a step, states after it)
OPTIMIZERS = {
    'AdamW amsgrad': (torch.optim.AdamW, {'amsgrad': True}, [], ['exp_avg', 'exp_avg_sq', 'max_exp_avg_sq']),
    'SGD': (torch.optim.SGD, {}, [], []),
    'SGD momentum': (torch.optim.SGD, {'momentum': 0.9}, [], ['momentum_buffer']),
    'RMSprop': (torch.optim.RMSprop, {}, [], ['square_avg']),
    'RMSprop full': (torch.optim.RMSprop, {'momentum': 0.9, 'centered': True}, [],
                     ['grad_avg', 'momentum_buffer', 'square_avg']),
    'Adagrad': (torch.optim.Adagrad, {}, ['sum'], ['sum']),
    'Unknown': (Unknown, {}, [], ['trail']),
    'SGD half with momentum': (half_with_momentum, {}, [], []),
}  # yapf: disable
ALL_STATES = [
    'exp_avg', 'exp_avg_sq', 'max_exp_avg_sq', 'momentum_buffer', 'square_avg', 'grad_avg', 'sum', 'trail', 'step',
    'codes', 'norm', 'trail_offload_buffer', 'variance'
]
OPTIMIZER_CASES = list(itertools.product((1, 2, 3), OPTIMIZERS))
each_optimizer = pytest.mark.parametrize('stage, label', OPTIMIZER_CASES)


def observe_optimizers(rank):
    start_deepspeed()
    return {(stage, label): observe_optimizer(stage, label) for stage, label in OPTIMIZER_CASES}


def observe_optimizer(stage, label):
    optimizer, options, _, kept = OPTIMIZERS[label]
    grouping = group_of if optimizer is half_with_momentum else None
    engine = build_engine(config_of(stage, dtype='bf16'), optimizer=optimizer, group_of=grouping, **options)
    seen = {'before': [outcome_of(engine, state) for state in ALL_STATES]}
    train(engine, 2)
    seen['after'] = [outcome_of(engine, state) for state in ALL_STATES]
    seen['maps'] = {name: parameter_map.to_dict() for name, parameter_map in engine.optimizer_storage_maps().items()}
    seen['arrays'] = {state: arrays_of(engine.optimizer_storage(state)) for state in kept}
    seen['reference'] = {state: arrays_of(full_reference(engine, state)) for state in kept}
    engine.destroy()
    return seen


def outcome_of(engine, state):
    try:
        return sorted(engine.optimizer_storage(state)) == sorted(engine.optimizer_storage())
    except (OptimizerStateNotReadyError, ValueError) as error:
        return error


@each_optimizer
def test_states_of_other_optimizers_equal_those_deepspeed_gathers(stage, label):
    by_rank = [seen[stage, label] for seen in observed(observe_optimizers, 2)]
    for state, reference in by_rank[0]['reference'].items():
        full = assemble(by_rank[0]['maps'], [seen['arrays'][state] for seen in by_rank])
        for name in reference:
            assert numpy.array_equal(full[name], reference[name]), (state, name)


@each_optimizer
@pytest.mark.parametrize('moment', ['before', 'after'])
def test_exactly_the_states_that_an_optimizer_keeps_are_readable(stage, label, moment):
    kept = OPTIMIZERS[label][2 if moment == 'before' else 3]
    for seen in observed(observe_optimizers, 2):
        assert [state for state, outcome in zip(ALL_STATES, seen[stage, label][moment])
                if outcome is True] == [state for state in ALL_STATES if state in kept]


@each_optimizer
def test_states_that_come_with_the_first_step_are_told_from_those_that_never_come(stage, label):
    _, _, early, kept = OPTIMIZERS[label]
    to_come = set(kept) - set(early)
    if label == 'Unknown':
        to_come = set(ALL_STATES)
    elif label == 'SGD half with momentum':
        to_come = {'momentum_buffer'}
    for seen in observed(observe_optimizers, 2):
        for state, outcome in zip(ALL_STATES, seen[stage, label]['before']):
            expected = OptimizerStateNotReadyError if state in to_come else ValueError
            assert outcome is True or type(outcome) is expected, state


@each_optimizer
def test_the_error_for_a_state_that_is_never_kept_lists_those_that_are(stage, label):
    listed = sorted(OPTIMIZERS[label][3])
    for seen in observed(observe_optimizers, 2):
        message = str(seen[stage, label]['after'][ALL_STATES.index('variance')])
        assert message.endswith('it keeps ' + ', '.join(['fp32'] + listed))


@pytest.mark.parametrize('stage', [1, 2, 3])
def test_a_state_kept_for_some_parameters_only_is_refused(stage):
    for seen in observed(observe_optimizers, 2):
        error = seen[stage, 'SGD half with momentum']['after'][ALL_STATES.index('momentum_buffer')]
        assert type(error) is ValueError and 'for some parameters only' in str(error)
