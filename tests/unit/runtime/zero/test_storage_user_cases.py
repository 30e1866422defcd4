# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Faults that people met with partitioned optimizer state, and what the storage API answers there, element by element.

Each engine's parameters hold distinct numbers. A *picture* of a rank is its flat master with every element that some
view covers, at the place where the view has it, and ``None`` where none does: padding.
"""

import functools

import pytest
import torch
from unit.runtime.zero.engines import (arrays_of, assemble, build_engine, config_of, observed, own_flats, own_states,
                                       start_deepspeed)

from deepspeed.runtime.zero.zero_affine import OptimizerStateNotReadyError, zero_storage_affine_map

PAD = None
STAGES = (1, 2, 3)


class Numbered(torch.nn.Module):
    """Parameters of the given shapes: the first holds 0, 1, 2, ..., the second 100, 101, ..., and so on."""

    def __init__(self, shapes):
        super().__init__()
        for index, (name, shape) in enumerate(shapes.items()):
            values = 100.0 * index + torch.arange(torch.Size(shape).numel())
            self.register_parameter(name, torch.nn.Parameter(values.reshape(shape)))

    def forward(self):
        return sum(parameter.sum() for parameter in self.parameters())


def numbered_engine(stage, shapes, optimizer=torch.optim.Adam, **options):
    return build_engine(config_of(stage), functools.partial(Numbered, shapes), optimizer, **options)


def step(engine):
    engine.backward(engine())
    engine.step()


def picture(engine, state='fp32'):
    """This rank's buffer of ``state`` as the views show it; the engines here have one."""
    buffer, = own_flats(engine) if state == 'fp32' else own_states(engine, state)
    drawn = [PAD] * buffer.numel()
    for view in engine.optimizer_storage(state).values():
        start = view.storage_offset() - buffer.storage_offset()
        for position, value in enumerate(view.tolist(), start):
            assert drawn[position] is PAD, f'two views cover element {position} of the buffer'
            drawn[position] = value
    return drawn


def numbers(first, last):
    """first, first + 1, ..., last"""
    return [float(value) for value in range(first, last + 1)]


def lengths_of(maps):
    return {name: {rank: shape[0] for rank, shape in map_.shard_shapes.items()} for name, map_ in maps.items()}


# What an engine has for parameters, by label; and the pictures of all ranks, by (label, stage, number of ranks).
SHAPES = {
    'two': {
        'A': (3, 5),
        'B': (7, )
    },
    '57': {
        'only': (57, )
    },
    '10': {
        'only': (10, )
    },
    '5 and 5': {
        'first': (5, ),
        'second': (5, )
    },
    '1 x 5': {
        'only': (1, 5)
    },
    '6': {
        'only': (6, )
    },
    '2': {
        'only': (2, )
    },
}
Z12, Z3 = (1, 2), (3, )
PICTURES = {
    ('two', Z3, 2): [numbers(0, 7) + numbers(100, 103),
                     numbers(8, 14) + [PAD] + numbers(104, 106) + [PAD]],
    ('two', Z3, 3): [numbers(0, 4) + numbers(100, 102), numbers(5, 9) + numbers(103, 105),
                     numbers(10, 14) + [106.0, PAD, PAD]],
    ('two', Z12, 2): [numbers(0, 11), numbers(12, 14) + numbers(100, 106) + [PAD, PAD]],
    ('two', Z12, 3): [numbers(0, 7), numbers(8, 14) + [100.0], numbers(101, 106) + [PAD, PAD]],
    ('57', Z12, 2): [numbers(0, 29), numbers(30, 56) + [PAD] * 3],
    ('10', Z12, 2): [numbers(0, 5), numbers(6, 9) + [PAD] * 2],
    ('10', Z12, 4): [numbers(0, 3), numbers(4, 7), numbers(8, 9) + [PAD] * 2, [PAD] * 4],
    # Each rank has room for 3 of 5, so that the two ranks together have 6 elements before the second parameter.
    ('5 and 5', Z3, 2): [numbers(0, 2) + numbers(100, 102), numbers(3, 4) + [PAD] + numbers(103, 104) + [PAD]],
    ('1 x 5', Z3, 2): [numbers(0, 2), numbers(3, 4) + [PAD]],
    ('6', Z3, 4): [numbers(0, 1), numbers(2, 3), numbers(4, 5), [PAD] * 2],
    ('2', Z3, 4): [[0.0], [1.0], [PAD], [PAD]],
    ('2', Z12, 4): [numbers(0, 1), [PAD] * 2, [PAD] * 2, [PAD] * 2],
}  # yapf: disable
DRAWN = [(label, stage, world_size) for label, stages, world_size in PICTURES for stage in stages]


def expected_pictures(drawn):
    label, stage, world_size = drawn
    return PICTURES[label, Z3 if stage == 3 else Z12, world_size]


def observe_buffers(world_size, rank):
    start_deepspeed()
    return {drawn: observe_buffer(*drawn[:2]) for drawn in DRAWN if drawn[2] == world_size}


def observe_buffer(label, stage):
    """The picture of the masters, and of moments that are given the masters' buffer as it was before the step."""
    engine = numbered_engine(stage, SHAPES[label])
    seen = {'fp32': picture(engine), 'lengths': lengths_of(engine.optimizer_storage_maps())}
    masters, = [flat.detach().clone() for flat in own_flats(engine)]
    step(engine)
    for state in ('exp_avg', 'exp_avg_sq'):
        own_states(engine, state)[0].copy_(masters)
        seen[state] = picture(engine, state)
    seen['maps'] = {name: parameter_map.to_dict() for name, parameter_map in engine.optimizer_storage_maps().items()}
    seen['moments'] = arrays_of(engine.optimizer_storage('exp_avg'))
    seen['concatenated'] = masters.tolist()
    engine.destroy()
    return seen


OBSERVE_BUFFERS = {world_size: functools.partial(observe_buffers, world_size) for world_size in (2, 3, 4)}


def of_each_rank(drawn):
    return [seen[drawn] for seen in observed(OBSERVE_BUFFERS[drawn[2]], drawn[2])]


# Cases 1 and 10: other numbers of ranks, and padding that shifts what follows it; case 20: ranks without elements


@pytest.mark.parametrize('drawn', DRAWN, ids=str)
@pytest.mark.parametrize('state', ['fp32', 'exp_avg', 'exp_avg_sq'])
def test_masters_and_moments_lie_where_the_layout_rule_puts_them(drawn, state):
    assert [seen[state] for seen in of_each_rank(drawn)] == expected_pictures(drawn)


@pytest.mark.parametrize('drawn, lengths', [
    (('57', 1, 2), [30, 27]),
    (('10', 1, 2), [6, 4]),
    (('10', 1, 4), [4, 4, 2]),
    (('6', 3, 4), [2, 2, 2]),
    (('2', 3, 4), [1, 1]),
    (('2', 2, 4), [2]),
], ids=str)  # yapf: disable
def test_maps_count_real_elements_and_leave_out_a_rank_that_has_only_padding(drawn, lengths):
    for seen in of_each_rank(drawn):
        assert seen['lengths'] == {'only': dict(enumerate(lengths))}


@pytest.mark.parametrize('drawn', [('10', 1, 4), ('6', 3, 4), ('2', 3, 4), ('2', 2, 4)], ids=str)
def test_a_rank_that_has_only_padding_has_a_view_of_no_elements_under_every_name(drawn):
    last = of_each_rank(drawn)[-1]
    assert [len(array) for array in last['moments'].values()] == [0] and list(last['moments']) == ['only']


@pytest.mark.parametrize('numel, world_size, lengths', [(512, 30, [18] * 28 + [8, 0]), (6, 4, [2, 2, 2, 0]),
                                                        (1, 2, [1, 0])])
def test_partitions_without_elements_are_described_as_empty(numel, world_size, lengths):
    parameter_map = zero_storage_affine_map(numel, range(world_size))
    assert [parameter_map.shard_shapes[rank] for rank in range(world_size)] == [(length, ) for length in lengths]
    parameter_map.validate_coverage()


# Case 15: states and step counts of other optimizers, and moments read in the order of the ranks


def test_a_moment_read_by_the_maps_is_never_the_concatenation_of_the_ranks_buffers():
    by_rank = of_each_rank(('two', 3, 2))
    full = assemble(by_rank[0]['maps'], [seen['moments'] for seen in by_rank])
    assert full['A'].flatten().tolist() == numbers(0, 14)
    concatenated = sum((seen['concatenated'] for seen in by_rank), [])
    assert concatenated[:15] == numbers(0, 7) + numbers(100, 103) + numbers(8, 10)


class StatesByGroup(torch.optim.Optimizer):
    """Momentum for the first parameter group, Adam's moments and step count for the others."""

    def __init__(self, groups, lr):
        momentum, *adam = groups
        super().__init__([{**momentum, 'adam': False}] + [{**group, 'adam': True} for group in adam], {'lr': lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group['params']:
                state = self.state[parameter]
                if group['adam']:
                    state['step'] = state.get('step', 0) + 1
                for name in ('exp_avg', 'exp_avg_sq') if group['adam'] else ('momentum_buffer', ):
                    state[name] = torch.zeros_like(parameter)


OPTIMIZERS = {
    'momentum only': functools.partial(torch.optim.SGD, momentum=0.9),
    'states by group': StatesByGroup,
    'no step count': torch.optim.Adam,
    'step count of no dimension': torch.optim.Adam,
    'step count of one element': torch.optim.Adam,
}
ALL_STATES = ('momentum_buffer', 'exp_avg', 'exp_avg_sq', 'step')


def observe_states(rank):
    start_deepspeed()
    seen = {(label, stage): observe_states_of(label, stage) for label in OPTIMIZERS for stage in STAGES}
    return seen | observe_other_cases(rank)


def observe_states_of(label, stage):
    # Of two elements each of two ranks has one under stage 3, just as a step count may have one.
    shapes = {'A': (3, 5), 'B': (4, )} if label == 'states by group' else {'A': (2, )}
    grouping = (lambda name: name) if label == 'states by group' else None
    engine = numbered_engine(stage, shapes, OPTIMIZERS[label], group_of=grouping)
    step(engine)
    for states in engine.optimizer.optimizer.state.values():
        if label == 'no step count':
            del states['step']
        elif label.startswith('step count'):
            states['step'] = torch.tensor(3.0) if label.endswith('no dimension') else torch.tensor([3.0])
    outcomes = {}
    for state in ALL_STATES:
        try:
            outcomes[state] = sorted(engine.optimizer_storage(state))
        except (OptimizerStateNotReadyError, ValueError) as error:
            outcomes[state] = error
    engine.destroy()
    return outcomes


each_stage = pytest.mark.parametrize('stage', STAGES)


@each_stage
def test_an_optimizer_with_momentum_only_has_no_other_state(stage):
    for seen in observed(observe_states, 2):
        outcomes = seen['momentum only', stage]
        assert outcomes['momentum_buffer'] == ['A']
        for state in ALL_STATES[1:]:
            assert type(outcomes[state]) is ValueError
            assert str(outcomes[state]).endswith('it keeps fp32, momentum_buffer')


@each_stage
def test_no_state_is_invented_for_a_group_that_does_not_keep_it(stage):
    for seen in observed(observe_states, 2):
        for state in ALL_STATES[:3]:
            error = seen['states by group', stage][state]
            assert type(error) is ValueError
            assert str(error).endswith('for some parameters only; for all of them it keeps fp32')


@each_stage
@pytest.mark.parametrize('label', ['no step count', 'step count of no dimension', 'step count of one element'])
def test_a_step_count_is_no_state_of_the_elements_whatever_form_it_has(stage, label):
    for seen in observed(observe_states, 2):
        outcomes = seen[label, stage]
        assert outcomes['exp_avg'] == outcomes['exp_avg_sq'] == ['A']
        assert type(outcomes['step']) is ValueError and str(outcomes['step']).endswith('fp32, exp_avg, exp_avg_sq')


# Case 22: parameters without elements

ORDERS = {
    'first': ['empty', 'before', 'after'],
    'inside': ['before', 'empty', 'after'],
    'last': ['before', 'after', 'empty'],
}
SHAPE_BY_NAME = {'before': (8, ), 'empty': (0, 8), 'after': (24, )}
each_place = pytest.mark.parametrize('place', ORDERS)


def observe_other_cases(rank):
    seen = {(place, stage): observe_empty_parameter(place, stage) for place in ORDERS for stage in STAGES}
    seen |= {('tied', stage): observe_tied(stage) for stage in STAGES}
    # Under stage 3 DeepSpeed itself gathers other parameters on the other rank, and waits forever.
    return seen | {('frozen on one rank', stage): observe_frozen_on_one_rank(stage, rank) for stage in Z12}


def observe_empty_parameter(place, stage):
    engine = numbered_engine(stage, {name: SHAPE_BY_NAME[name] for name in ORDERS[place]})
    seen = {'lengths': lengths_of(engine.optimizer_storage_maps())}
    # Each parameter's numbers start at the next hundred: what is left are its flat indices.
    seen['held'] = {
        name: (view.storage_offset(), (view % 100).tolist())
        for name, view in engine.optimizer_storage().items()
    }
    # DeepSpeed cannot gather such a parameter under stage 3, so it cannot step there.
    if stage < 3:
        step(engine)
        seen['moments'] = list(engine.optimizer_storage('exp_avg'))
    engine.destroy()
    return seen


@each_place
@pytest.mark.parametrize('stage', Z12)
def test_a_parameter_without_elements_takes_no_room_among_the_others(place, stage):
    first, second = [seen[place, stage] for seen in observed(observe_states, 2)]
    assert first['held'] == {'before': (0, numbers(0, 7)), 'after': (8, numbers(0, 7))}
    assert second['held'] == {'before': (0, []), 'after': (0, numbers(8, 23))}
    for seen in (first, second):
        assert seen['lengths'] == {'before': {0: 8}, 'after': {0: 8, 1: 16}}
        assert seen['moments'] == ['before', 'after']


@each_place
def test_a_parameter_without_elements_takes_no_room_in_the_partitions_of_stage_3(place):
    first, second = [seen[place, 3] for seen in observed(observe_states, 2)]
    assert first['held'] == {'before': (0, numbers(0, 3)), 'after': (4, numbers(0, 11))}
    assert second['held'] == {'before': (0, numbers(4, 7)), 'after': (4, numbers(12, 23))}


# Case 24: one name and several owners


def observe_frozen_on_one_rank(stage, rank):

    def model():
        numbered = Numbered(SHAPES['two'])
        numbered.B.requires_grad_(rank != 1)
        return numbered

    try:
        build_engine(config_of(stage), model).optimizer_storage_maps()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize('stage', Z12)
def test_a_parameter_that_one_rank_alone_does_not_train_is_an_error_on_every_rank_that_names_it(stage):
    for seen in observed(observe_states, 2):
        assert 'ranks [1] lay out the optimizer differently from rank 0' in seen['frozen on one rank', stage]


class Tied(Numbered):

    def __init__(self):
        super().__init__(SHAPES['two'])
        self.also_A = self.A


def observe_tied(stage):
    engine = build_engine(config_of(stage), Tied)
    maps = {name: parameter_map.to_dict() for name, parameter_map in engine.optimizer_storage_maps().items()}
    return {'maps': maps, 'arrays': arrays_of(engine.optimizer_storage())}


@each_stage
def test_a_tied_parameter_has_one_name_and_one_holder_of_each_element(stage):
    by_rank = [seen['tied', stage] for seen in observed(observe_states, 2)]
    full = assemble(by_rank[0]['maps'], [seen['arrays'] for seen in by_rank])
    assert list(full) == ['A', 'B']
    assert full['A'].flatten().tolist() == numbers(0, 14)
