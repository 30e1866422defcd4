# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps and live views over an engine's life: offloaded states, checkpoints, accumulated gradients, skipped steps.

An engine that lives through something is compared, bit for bit, with a twin that does not.
"""

import functools

import numpy
import pytest
import torch
from unit.ops import use_compiled_ops
from unit.ranks import rank_folder
from unit.runtime.zero.engines import (TrainedModel, arrays_of, assemble, build_engine, config_of, full_reference,
                                       observed, own_flats, own_states, start_deepspeed, train)

from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.zero_affine import OptimizerStateNotReadyError

ADAM_STATES = ('fp32', 'exp_avg', 'exp_avg_sq')


def arrays_of_states(engine, states=ADAM_STATES):
    return {state: arrays_of(engine.optimizer_storage(state)) for state in states}


def strangers(engine, views_by_state):
    """The states whose views share no storage with what the optimizer steps on now."""
    found = []
    for state, views in views_by_state.items():
        flats = own_flats(engine) if state == 'fp32' else own_states(engine, state)
        storages = {flat.untyped_storage().data_ptr() for flat in flats}
        if any(view.untyped_storage().data_ptr() not in storages for view in views.values()):
            found.append(state)
    return found


def error_of(engine, state):
    try:
        engine.optimizer_storage(state)
    except Exception as error:
        return error


def assert_same(got, expected):
    for state in expected:
        assert list(got[state]) == list(expected[state])
        for name in expected[state]:
            assert numpy.array_equal(got[state][name], expected[state][name]), (state, name)


def differ(got, expected):
    return any(not numpy.array_equal(got[name], expected[name]) for name in expected)


# offload_states and reload_states

ALL_KINDS = 'all'
KINDS = (ALL_KINDS, ) + tuple(OffloadStateTypeEnum)
CELLS = {stage: [(kind, pinned) for kind in KINDS for pinned in (True, False)] for stage in (1, 2, 3)}
MOMENTS = ['before', 'offloaded', 'reloaded', 'one step later', 'offloaded again', 'a second step later']
each_stage = pytest.mark.parametrize('stage', [1, 2, pytest.param(3, marks=pytest.mark.compiled_ops)])
each_cell = pytest.mark.parametrize(
    'stage, kind, pinned',
    [pytest.param(stage, *cell, marks=pytest.mark.compiled_ops if stage == 3 else ())
     for stage, cells in CELLS.items() for cell in cells])  # yapf: disable


def observe_offloading_flat_groups(rank):
    start_deepspeed()
    return {stage: observe_offloading(stage, torch.optim.Adam) for stage in (1, 2)}


def observe_offloading_own_partitions(rank):
    start_deepspeed()
    use_compiled_ops()
    from deepspeed.ops.adam import FusedAdam
    return {3: observe_offloading(3, FusedAdam)}


def offloading_by_rank(stage):
    observe = observe_offloading_own_partitions if stage == 3 else observe_offloading_flat_groups
    return [seen[stage] for seen in observed(observe, 2)]


def observe_offloading(stage, optimizer):
    build = functools.partial(build_engine, config_of(stage, dtype='bf16'), TrainedModel, optimizer)
    twin = build()
    seen = {'twin': observe_cycles(twin, lambda: None, lambda: None, reference=True)}
    twin.destroy()
    for kind, pinned in CELLS[stage]:
        engine = build()
        include = None if kind == ALL_KINDS else [kind]
        offload = functools.partial(engine.offload_states, include=include, pin_memory=pinned)
        seen[kind, pinned] = observe_cycles(engine, offload, engine.reload_states)
        engine.destroy()
    return seen


def observe_cycles(engine, offload, reload, reference=False):
    """Two cycles with steps and writes in between; the maps are asked for while the states are offloaded."""
    seen = {'arrays': {}, 'strangers': {}, 'reference': {}}

    def note(moment):
        seen['arrays'][moment] = arrays_of_states(engine)
        seen['strangers'][moment] = strangers(engine,
                                              {state: engine.optimizer_storage(state)
                                               for state in ADAM_STATES})
        if reference:
            seen['reference'][moment] = {state: arrays_of(full_reference(engine, state)) for state in ADAM_STATES}

    train(engine, 1)
    note('before')
    early_views = {state: engine.optimizer_storage(state) for state in ADAM_STATES}
    offload()
    note('offloaded')
    seen['stale'] = strangers(engine, early_views)
    seen['maps'] = {name: parameter_map.to_dict() for name, parameter_map in engine.optimizer_storage_maps().items()}
    for state in ADAM_STATES:
        for view in engine.optimizer_storage(state).values():
            view.mul_(0.5).add_(0.25)
    reload()
    note('reloaded')
    train(engine, 1, first=1)
    note('one step later')
    offload()
    note('offloaded again')
    reload()
    train(engine, 1, first=2)
    note('a second step later')
    return seen


@each_cell
@pytest.mark.parametrize('moment', MOMENTS)
def test_views_asked_for_again_equal_those_of_an_engine_that_never_offloads(stage, kind, pinned, moment):
    for seen in offloading_by_rank(stage):
        assert_same(seen[kind, pinned]['arrays'][moment], seen['twin']['arrays'][moment])


@each_stage
def test_values_change_from_moment_to_moment(stage):
    # Or their equality with the twin's would prove little.
    arrays = offloading_by_rank(stage)[0]['twin']['arrays']
    for earlier, later in (('offloaded', 'reloaded'), ('reloaded', 'one step later'), ('offloaded again',
                                                                                       'a second step later')):
        for state in ADAM_STATES:
            assert differ(arrays[later][state], arrays[earlier][state])


@each_stage
@pytest.mark.parametrize('moment', MOMENTS)
def test_full_tensors_of_the_twin_equal_those_deepspeed_gathers(stage, moment):
    by_rank = [seen['twin'] for seen in offloading_by_rank(stage)]
    for state, reference in by_rank[0]['reference'][moment].items():
        full = assemble(by_rank[0]['maps'], [seen['arrays'][moment][state] for seen in by_rank])
        for name in reference:
            assert numpy.array_equal(full[name], reference[name]), (state, name)


@each_cell
def test_views_asked_for_again_lie_in_the_optimizers_own_tensors(stage, kind, pinned):
    for seen in offloading_by_rank(stage):
        assert seen[kind, pinned]['strangers'] == {moment: [] for moment in MOMENTS}


@each_cell
def test_maps_first_asked_for_while_states_are_offloaded_are_the_same(stage, kind, pinned):
    for seen in offloading_by_rank(stage):
        assert seen[kind, pinned]['maps'] == seen['twin']['maps']


@each_stage
@pytest.mark.parametrize('kind, states', [(OffloadStateTypeEnum.hp_params, ['fp32']),
                                          (OffloadStateTypeEnum.optim_states, ['exp_avg', 'exp_avg_sq'])])
def test_views_from_before_offloading_to_pinned_memory_are_stale(stage, kind, states):
    # Stages 1 and 2 leave states that are in host memory already where they are.
    stale = states if stage == 3 or kind == OffloadStateTypeEnum.hp_params else []
    for seen in offloading_by_rank(stage):
        assert seen[kind, True]['stale'] == stale


# save_checkpoint and load_checkpoint

CHECKPOINTS = [(stage, offload, None) for stage in (1, 2, 3) for offload in ('none', 'cpu')] + [(1, 'none', 'fp32')]
each_checkpoint = pytest.mark.parametrize('configuration', CHECKPOINTS, ids=str)


def observe_checkpoints(rank):
    start_deepspeed()
    return {
        (configuration, steps): observe_checkpoint(configuration, steps)
        for configuration in CHECKPOINTS
        for steps in (0, 2)
    }


def observe_checkpoint(configuration, steps):
    """An engine that saves, trains on and loads, and another that only loads; then one step more."""
    stage, offload, grad_accum_dtype = configuration
    build = functools.partial(build_engine, config_of(stage, offload, 'bf16', grad_accum_dtype))
    states = ADAM_STATES if steps else ADAM_STATES[:1]
    tag = f'{stage}-{offload}-{grad_accum_dtype}-{steps}'
    saving, fresh = build(), build(seed=8)
    train(saving, steps)
    seen = {'saved': arrays_of_states(saving, states), 'maps': list(saving.optimizer_storage_maps())}
    saving.save_checkpoint(rank_folder(), tag=tag)
    train(saving, 1, first=steps)
    seen['trained on'] = arrays_of_states(saving)
    train(fresh, 1)
    for label, engine in (('saving', saving), ('fresh', fresh)):
        early_views = {state: engine.optimizer_storage(state) for state in states}
        engine.load_checkpoint(rank_folder(), tag=tag)
        views = {state: engine.optimizer_storage(state) for state in states}
        seen[label] = {
            'loaded': arrays_of_states(engine, states),
            'strangers': strangers(engine, views),
            'stale': strangers(engine, early_views),
            'error': error_of(engine, 'exp_avg'),
            'maps': list(engine.optimizer_storage_maps())
        }
        train(engine, 1, first=steps)
        seen[label]['trained on'] = arrays_of_states(engine)
        engine.destroy()
    return seen


@each_checkpoint
@pytest.mark.parametrize('steps', [0, 2])
@pytest.mark.parametrize('label', ['saving', 'fresh'])
def test_views_asked_for_after_loading_hold_what_was_saved(configuration, steps, label):
    for seen in observed(observe_checkpoints, 2):
        loaded = seen[configuration, steps]
        assert_same(loaded[label]['loaded'], loaded['saved'])
        assert loaded[label]['strangers'] == []
        assert loaded[label]['maps'] == loaded['maps']


@each_checkpoint
@pytest.mark.parametrize('steps', [0, 2])
@pytest.mark.parametrize('label', ['saving', 'fresh'])
def test_the_step_after_loading_equals_the_one_after_saving(configuration, steps, label):
    for seen in observed(observe_checkpoints, 2):
        assert_same(seen[configuration, steps][label]['trained on'], seen[configuration, steps]['trained on'])


@each_checkpoint
def test_moments_are_not_ready_after_loading_a_checkpoint_from_before_the_first_step(configuration):
    for seen in observed(observe_checkpoints, 2):
        for label in ('saving', 'fresh'):
            assert isinstance(seen[configuration, 0][label]['error'], OptimizerStateNotReadyError)
            assert seen[configuration, 2][label]['error'] is None


@each_checkpoint
def test_views_of_moments_from_before_loading_are_stale(configuration):
    for seen in observed(observe_checkpoints, 2):
        assert seen[configuration, 2]['saving']['stale'] == ['exp_avg', 'exp_avg_sq']


# Gradient accumulation and skipped steps

ACCUMULATING = [(1, None), (2, None), (3, None), (1, 'fp32')]
SKIPPING = [(stage, offload) for stage in (1, 2, 3) for offload in ('none', 'cpu')]


def observe_steps(rank):
    start_deepspeed()
    seen = {configuration: observe_accumulation(*configuration) for configuration in ACCUMULATING}
    return seen | {configuration: observe_skipped_steps(*configuration) for configuration in SKIPPING}


def observe_accumulation(stage, grad_accum_dtype):
    config = config_of(stage, dtype='bf16', grad_accum_dtype=grad_accum_dtype) | {'gradient_accumulation_steps': 3}
    engine = build_engine(config)
    views = engine.optimizer_storage()
    seen = {'at first': arrays_of(views)}
    train(engine, 2)
    seen['between'] = arrays_of(views)
    seen['error'] = error_of(engine, 'exp_avg')
    train(engine, 1, first=2)
    views = {state: engine.optimizer_storage(state) for state in ADAM_STATES}
    seen['boundary'] = arrays_of_states(engine)
    train(engine, 2, first=3)
    seen['between later'] = {state: arrays_of(views[state]) for state in ADAM_STATES}
    seen['stale'] = strangers(engine, views)
    engine.destroy()
    return seen


@pytest.mark.parametrize('configuration', ACCUMULATING, ids=str)
def test_views_do_not_change_while_gradients_accumulate(configuration):
    for seen in observed(observe_steps, 2):
        accumulated = seen[configuration]
        assert_same({'fp32': accumulated['between']}, {'fp32': accumulated['at first']})
        assert_same(accumulated['between later'], accumulated['boundary'])
        assert accumulated['stale'] == []
        assert differ(accumulated['boundary']['fp32'], accumulated['at first'])


@pytest.mark.parametrize('configuration', ACCUMULATING, ids=str)
def test_moments_are_not_ready_while_the_first_gradients_accumulate(configuration):
    for seen in observed(observe_steps, 2):
        assert isinstance(seen[configuration]['error'], OptimizerStateNotReadyError)


def observe_skipped_steps(stage, offload):
    """Three steps in fp16, the first and the third with a loss scale that overflows."""
    config = config_of(stage, offload) | {'fp16': {'enabled': True, 'initial_scale_power': 40, 'hysteresis': 1}}
    engine = build_engine(config)
    seen = {'at first': arrays_of_states(engine, ['fp32'])}
    train(engine, 1)
    seen['skipped first'] = arrays_of_states(engine, ['fp32'])
    seen['skipped'] = [engine.skipped_steps]
    seen['errors'] = {state: error_of(engine, state) for state in ('exp_avg', 'momentum_buffer')}
    engine.optimizer.loss_scaler.cur_scale = 8.0
    train(engine, 1)
    views = {state: engine.optimizer_storage(state) for state in ADAM_STATES}
    seen['taken'] = arrays_of_states(engine)
    engine.optimizer.loss_scaler.cur_scale = 2.0**40
    train(engine, 1)
    seen['skipped later'] = {state: arrays_of(views[state]) for state in ADAM_STATES}
    seen['skipped'].append(engine.skipped_steps)
    seen['stale'] = strangers(engine, views)
    engine.destroy()
    return seen


each_skipping = pytest.mark.parametrize('configuration', SKIPPING, ids=str)


@each_skipping
def test_views_do_not_change_in_a_step_that_is_skipped_for_overflow(configuration):
    for seen in observed(observe_steps, 2):
        skipping = seen[configuration]
        assert skipping['skipped'] == [1, 2]
        assert_same(skipping['skipped first'], skipping['at first'])
        assert_same(skipping['skipped later'], skipping['taken'])
        assert skipping['stale'] == []
        assert differ(skipping['taken']['fp32'], skipping['at first']['fp32'])


@each_skipping
def test_a_first_step_that_is_skipped_creates_no_state(configuration):
    for seen in observed(observe_steps, 2):
        errors = seen[configuration]['errors']
        assert isinstance(errors['exp_avg'], OptimizerStateNotReadyError)
        assert type(errors['momentum_buffer']) is ValueError


def observe_a_group_that_overflows(rank):
    """torch_autocast with fp16 checks each parameter group for overflow by itself; here the second overflows."""
    start_deepspeed()
    seen = {}
    for stage in (1, 3):
        config = config_of(stage) | {'torch_autocast': {'enabled': True, 'dtype': 'float16'}}
        engine = build_engine(config, group_of=lambda name: name == 'mix')
        engine.optimizer.torch_autocast_gradscaler = torch.amp.GradScaler(device='cpu', init_scale=8.0)
        take_step = engine.optimizer._optimizer_step

        def step_with_overflow(group):
            if group == 1:
                own_flats(engine)[1].grad.fill_(float('inf'))
            take_step(group)

        engine.optimizer._optimizer_step = step_with_overflow
        train(engine, 1)
        seen[stage] = [len(engine.optimizer.optimizer.state.get(flat, {})) > 0 for flat in own_flats(engine)]
        seen[stage] += [error_of(engine, state) for state in ('exp_avg', 'momentum_buffer')]
    return seen


@pytest.mark.parametrize('stage', [1, 3])
def test_a_state_is_not_ready_while_the_first_step_of_one_group_was_skipped(stage):
    for seen in observed(observe_a_group_that_overflows, 2):
        *stepped, error, error_of_no_state = seen[stage]
        assert stepped == [True, False]
        assert isinstance(error, OptimizerStateNotReadyError)
        assert type(error_of_no_state) is ValueError and str(error_of_no_state).endswith('fp32, exp_avg, exp_avg_sq')
