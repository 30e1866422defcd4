# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The states of every optimizer, torch's and DeepSpeed's own, with masters in fp32 and lower, and partial offload."""

import itertools

import numpy
import pytest
import torch
from unit.ops import use_compiled_ops
from unit.ranks import rank_folder
from unit.runtime.zero.engines import (EvenModel, TinyModel, arrays_of, assemble, build_engine, config_of,
                                       full_reference, label_flats, observed, own_flats, start_deepspeed, train)

from deepspeed.runtime.zero.zero_affine import OptimizerStateNotReadyError


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


def optimizer_of_deepspeed(class_name):

    def build(groups, **options):
        import deepspeed.ops.adam
        import deepspeed.ops.lion
        optimizer_class = getattr(deepspeed.ops.adam, class_name, None) or getattr(deepspeed.ops.lion, class_name)
        return optimizer_class(groups, **options)

    return build


# label: (optimizer, its options, states readable before a step, states after it)
ADAM_STATES = ['exp_avg', 'exp_avg_sq']
OPTIMIZERS_OF_TORCH = {
    'Adam': (torch.optim.Adam, {}, [], ADAM_STATES),
    'AdamW amsgrad': (torch.optim.AdamW, {'amsgrad': True}, [], ADAM_STATES + ['max_exp_avg_sq']),
    'SGD': (torch.optim.SGD, {}, [], []),
    'SGD momentum': (torch.optim.SGD, {'momentum': 0.9}, [], ['momentum_buffer']),
    'RMSprop': (torch.optim.RMSprop, {}, [], ['square_avg']),
    'RMSprop full': (torch.optim.RMSprop, {'momentum': 0.9, 'centered': True}, [],
                     ['grad_avg', 'momentum_buffer', 'square_avg']),
    'Adagrad': (torch.optim.Adagrad, {}, ['sum'], ['sum']),
    'Unknown': (Unknown, {}, [], ['trail']),
    'SGD half with momentum': (half_with_momentum, {}, [], []),
}  # yapf: disable
OPTIMIZERS_OF_DEEPSPEED = {
    'DeepSpeedCPUAdam': (optimizer_of_deepspeed('DeepSpeedCPUAdam'), {}, [], ADAM_STATES),
    # The second of its states is kept without being used.
    'DeepSpeedCPULion': (optimizer_of_deepspeed('DeepSpeedCPULion'), {}, [], ADAM_STATES),
    'FusedAdam': (optimizer_of_deepspeed('FusedAdam'), {}, [], ADAM_STATES),
}
OPTIMIZERS = OPTIMIZERS_OF_TORCH | OPTIMIZERS_OF_DEEPSPEED
ALL_STATES = [
    'exp_avg', 'exp_avg_sq', 'max_exp_avg_sq', 'momentum_buffer', 'square_avg', 'grad_avg', 'sum', 'trail', 'step',
    'codes', 'norm', 'trail_offload_buffer', 'variance'
]
CASES_OF_TORCH = list(itertools.product((1, 2, 3), ('none', ), OPTIMIZERS_OF_TORCH))
CASES_OF_DEEPSPEED = list(itertools.product((1, 2, 3), ('none', 'cpu'), OPTIMIZERS_OF_DEEPSPEED))


def each(cases, *marks):
    return [pytest.param(case, id='-'.join(map(str, case)), marks=marks) for case in cases]


each_optimizer = pytest.mark.parametrize('case',
                                         each(CASES_OF_TORCH) + each(CASES_OF_DEEPSPEED, pytest.mark.compiled_ops))


def observe_optimizers_of_torch(rank):
    start_deepspeed()
    return {case: observe_optimizer(*case) for case in CASES_OF_TORCH}


def observe_optimizers_of_deepspeed(rank):
    start_deepspeed()
    use_compiled_ops()
    seen = {case: observe_optimizer(*case) for case in CASES_OF_DEEPSPEED}
    seen |= {case: observe_low_precision(rank, case) for case in LOW_PRECISION}
    return seen | {case: observe_partial_offload(rank, case) for case in PARTIAL}


def of_each_rank(case):
    observe = observe_optimizers_of_torch if case in CASES_OF_TORCH else observe_optimizers_of_deepspeed
    return [seen[case] for seen in observed(observe, 2)]


def observe_optimizer(stage, offload, label):
    optimizer, options, _, kept = OPTIMIZERS[label]
    grouping = (lambda name: name == 'mix') if optimizer is half_with_momentum else None
    engine = build_engine(config_of(stage, offload, dtype='bf16'), optimizer=optimizer, group_of=grouping, **options)
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


def assert_full(by_rank, label, reference):
    full = assemble(by_rank[0]['maps'], [seen['arrays'][label] for seen in by_rank])
    assert list(full) == list(reference)
    for name in reference:
        assert numpy.array_equal(full[name], reference[name]), name


@each_optimizer
def test_states_equal_those_deepspeed_gathers(case):
    by_rank = of_each_rank(case)
    assert sorted(by_rank[0]['reference']) == sorted(OPTIMIZERS[case[2]][3])
    for state, reference in by_rank[0]['reference'].items():
        assert_full(by_rank, state, reference)


@each_optimizer
@pytest.mark.parametrize('moment', ['before', 'after'])
def test_exactly_the_states_that_an_optimizer_keeps_are_readable(case, moment):
    kept = OPTIMIZERS[case[2]][2 if moment == 'before' else 3]
    for seen in of_each_rank(case):
        readable = [state for state, outcome in zip(ALL_STATES, seen[moment]) if outcome is True]
        assert readable == [state for state in ALL_STATES if state in kept]


@each_optimizer
def test_states_that_come_with_the_first_step_are_told_from_those_that_never_come(case):
    _, _, early, kept = OPTIMIZERS[case[2]]
    # Of an optimizer that is not known, every state may still come.
    to_come = ALL_STATES if case[2] == 'Unknown' else set(kept) - set(early)
    for seen in of_each_rank(case):
        for state, outcome in zip(ALL_STATES, seen['before']):
            expected = OptimizerStateNotReadyError if state in to_come else ValueError
            assert outcome is True or type(outcome) is expected, state


@each_optimizer
@pytest.mark.parametrize('moment', ['before', 'after'])
def test_the_error_for_a_state_that_is_never_kept_lists_those_that_are(case, moment):
    if case[2] == 'Unknown' and moment == 'before':
        return
    listed = sorted(OPTIMIZERS[case[2]][3])
    for seen in of_each_rank(case):
        message = str(seen[moment][ALL_STATES.index('variance')])
        assert message.endswith('it keeps ' + ', '.join(['fp32'] + listed))


@pytest.mark.parametrize('stage', [1, 2, 3])
@pytest.mark.parametrize('moment', ['before', 'after'])
def test_a_state_kept_for_some_parameters_only_is_refused(stage, moment):
    for seen in of_each_rank((stage, 'none', 'SGD half with momentum')):
        error = seen[moment][ALL_STATES.index('momentum_buffer')]
        assert type(error) is ValueError and 'for some parameters only' in str(error)


# Masters, and in part states, in the dtype of the model

# (stage, offload, optimizer, dtype of model and masters, dtype of the states)
LOW_PRECISION = [(stage, *case) for stage in (1, 2, 3)
                 for case in (('cpu', 'DeepSpeedCPUAdam', 'bf16', 'fp32'), ('cpu', 'DeepSpeedCPUAdam', 'fp16', 'fp32'),
                              ('cpu', 'DeepSpeedCPUAdam', 'bf16', 'bf16'), ('none', 'DeepSpeedCPUAdam', 'bf16',
                                                                            'bf16'),
                              ('none', 'FusedAdam', 'bf16', 'bf16'), ('none', 'Adam', 'bf16', 'bf16'))]
TORCH_DTYPES = {'fp32': 'torch.float32', 'bf16': 'torch.bfloat16', 'fp16': 'torch.float16'}
# What the labels of each state are multiplied by, exactly in any dtype, so that no state passes for another.
LABEL_FACTORS = {'fp32': 1, 'exp_avg': -1, 'exp_avg_sq': 0.5}
each_low_precision = pytest.mark.parametrize('case', each(LOW_PRECISION, pytest.mark.compiled_ops))
each_labelled_state = pytest.mark.parametrize('state', LABEL_FACTORS)


def low_precision_engine(case, model_class):
    stage, offload, label, dtype, state_dtype = case
    config = config_of(stage, offload, dtype)
    config[dtype][f'{dtype}_master_weights_and_grads'] = True
    if state_dtype == 'bf16':
        config[dtype]['bf16_optimizer_states'] = True
    options = {'fp32_optimizer_states': state_dtype == 'fp32'} if label == 'DeepSpeedCPUAdam' else {}
    return build_engine(config, model_class, OPTIMIZERS[label][0], **options)


def observe_low_precision(rank, case):
    engine = low_precision_engine(case, TinyModel)
    seen = {'error': outcome_of(engine, 'exp_avg')}
    train(engine, 2)
    seen['dtypes'] = dtypes_of(engine)
    seen |= observe_labels(engine, rank)
    tag = '-'.join(map(str, case))
    engine.save_checkpoint(rank_folder(), tag=tag)
    engine.load_checkpoint(rank_folder(), tag=tag)
    seen['loaded dtypes'] = dtypes_of(engine)
    seen['loaded'] = {state: arrays_of(engine.optimizer_storage(state)) for state in LABEL_FACTORS}
    engine.destroy()
    return seen | observe_writes(low_precision_engine(case, EvenModel), low_precision_engine(case, EvenModel))


def dtypes_of(engine):
    return {state: {str(view.dtype) for view in engine.optimizer_storage(state).values()} for state in LABEL_FACTORS}


def observe_labels(engine, rank):
    """Views of labelled masters and moments, and the labels as DeepSpeed gathers them from the masters."""
    for state, factor in LABEL_FACTORS.items():
        flats = flats_of(engine, state)
        label_flats(flats, rank)
        for flat in flats:
            flat.data.mul_(factor)
    return {
        'maps': {
            name: parameter_map.to_dict()
            for name, parameter_map in engine.optimizer_storage_maps().items()
        },
        'arrays': {
            state: arrays_of(engine.optimizer_storage(state))
            for state in LABEL_FACTORS
        },
        'labels': arrays_of(full_reference(engine, 'fp32')),
    }


def flats_of(engine, state):
    """The flat tensors of a state, from whichever of the two optimizers of partial offload has it."""
    if state == 'fp32':
        return own_flats(engine)
    inner = [engine.optimizer.optimizer, getattr(engine.optimizer, 'backup_optimizer', engine.optimizer.optimizer)]
    return [next(one.state[flat][state] for one in inner if flat in one.state) for flat in own_flats(engine)]


def observe_writes(written, twin):
    """The same new values, through the views of one engine and into the flat tensors of its twin; two steps."""
    seen = {}
    for engine in (written, twin):
        train(engine, 1)
    for state in LABEL_FACTORS:
        for view in written.optimizer_storage(state).values():
            view.mul_(0.5).add_(0.25)
        for flat in flats_of(twin, state):
            flat.data.mul_(0.5).add_(0.25)
    for label, engine in (('written', written), ('twin', twin)):
        train(engine, 2, first=1)
        seen[label] = {state: arrays_of(engine.optimizer_storage(state)) for state in LABEL_FACTORS}
        engine.destroy()
    return seen


def assert_labelled(by_rank, state):
    assert_full(by_rank, state, {name: labels * LABEL_FACTORS[state] for name, labels in by_rank[0]['labels'].items()})


def assert_same(got, expected):
    for state in expected:
        for name in expected[state]:
            assert numpy.array_equal(got[state][name], expected[state][name]), (state, name)


@each_low_precision
def test_views_have_the_dtype_in_which_masters_and_states_are_kept(case):
    *_, dtype, state_dtype = case
    dtypes = {state: {TORCH_DTYPES[dtype if state == 'fp32' else state_dtype]} for state in LABEL_FACTORS}
    assert all(seen['dtypes'] == dtypes for seen in of_each_rank(case))


@each_low_precision
@each_labelled_state
def test_low_precision_masters_and_their_states_are_where_the_maps_say(case, state):
    assert_labelled(of_each_rank(case), state)


@each_low_precision
def test_views_after_loading_have_the_dtype_in_which_deepspeed_then_keeps_the_states(case):
    # torch's load_state_dict gives every state the dtype of its master, and labels are exact in any.
    *_, dtype, _ = case
    for seen in of_each_rank(case):
        assert seen['loaded dtypes'] == dict.fromkeys(LABEL_FACTORS, {TORCH_DTYPES[dtype]})
        assert_same(seen['loaded'], seen['arrays'])


@each_low_precision
def test_moments_of_low_precision_masters_are_not_ready_before_a_step(case):
    for seen in of_each_rank(case):
        assert isinstance(seen['error'], OptimizerStateNotReadyError)


@each_low_precision
def test_steps_follow_what_is_written_into_views_of_low_precision_masters(case):
    for seen in of_each_rank(case):
        assert_same(seen['written'], seen['twin'])


# Partial offload: two optimizers, each with the states of its own sub-groups

PARTIAL = [('partial', dtype) for dtype in ('fp32', 'bf16')]
each_partial = pytest.mark.parametrize('case', each(PARTIAL, pytest.mark.compiled_ops))


def partial_offload_engine(case, model_class):
    config = config_of(3, {'device': 'cpu', 'pin_memory': False, 'ratio': 0.5}, case[1], sub_group_size=40)
    engine = build_engine(config, model_class, optimizer_of_deepspeed('DeepSpeedCPUAdam'), adamw_mode=True)
    # DeepSpeed steps what lies on 'cpu' with one optimizer and the rest, on a CPU the same, with the other.
    for sub_group in range(len(own_flats(engine)) // 2):
        engine.optimizer.subgroup_to_device[sub_group] = 'cpu:0'
    return engine


def observe_partial_offload(rank, case):
    engine = partial_offload_engine(case, TinyModel)
    seen = {'error': outcome_of(engine, 'exp_avg')}
    train(engine, 2)
    inner = [engine.optimizer.optimizer, engine.optimizer.backup_optimizer]
    seen['owners'] = [[flat in one.state for flat in own_flats(engine)] for one in inner]
    seen['outcomes'] = [outcome_of(engine, state) for state in ALL_STATES]
    seen |= observe_labels(engine, rank)
    engine.destroy()
    return seen | observe_writes(partial_offload_engine(case, EvenModel), partial_offload_engine(case, EvenModel))


@each_partial
def test_both_optimizers_of_partial_offload_own_sub_groups(case):
    for seen in of_each_rank(case):
        main, backup = seen['owners']
        assert any(main) and any(backup) and all(one != other for one, other in zip(main, backup))


@each_partial
@each_labelled_state
def test_states_of_partial_offload_are_where_the_maps_say(case, state):
    assert_labelled(of_each_rank(case), state)


@each_partial
def test_steps_follow_what_is_written_into_views_of_partial_offload(case):
    for seen in of_each_rank(case):
        assert_same(seen['written'], seen['twin'])


@each_partial
def test_the_states_of_partial_offload_are_not_ready_before_a_step_and_all_there_after_it(case):
    for seen in of_each_rank(case):
        assert isinstance(seen['error'], OptimizerStateNotReadyError)
        assert [state for state, outcome in zip(ALL_STATES, seen['outcomes']) if outcome is True] == ADAM_STATES
