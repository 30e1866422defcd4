# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Every supported configuration on real engines: maps and live views against DeepSpeed's own accessors.

Where the optimizer is offloaded, some engines have ``pin_memory`` on and others off; a CPU pins nothing either way.

All configurations of one world size are observed in one start of its ranks; the tests judge what was observed.
"""

import numpy
import pytest
import torch
from unit.runtime.zero.engines import (EvenModel, TinyModel, arrays_of, assemble, build_engine, collectives_so_far,
                                       config_of, full_reference, observed, operators_of, own_flats, own_states,
                                       start_deepspeed, train, write_full)

from deepspeed.runtime.zero.zero_affine import (SUPPORTED_CONFIGURATIONS, OptimizerStateNotReadyError)

ADAM_STATES = ('fp32', 'exp_avg', 'exp_avg_sq')
WORLD_SIZES = (1, 2, 3)
CONFIGURATIONS = [
    pytest.param(world_size, configuration, id='-'.join(map(str, (world_size, ) + configuration)))
    for world_size in WORLD_SIZES for configuration in SUPPORTED_CONFIGURATIONS
]
each_configuration = pytest.mark.parametrize('world_size, configuration', CONFIGURATIONS)


def engine_of(configuration, model_class, pin_memory):
    stage, offload, dtype, optimizer_class = configuration
    if offload == 'cpu':
        offload = {'device': 'cpu', 'pin_memory': pin_memory}
    grad_accum_dtype = 'fp32' if optimizer_class == 'BF16_Optimizer' else None
    return build_engine(config_of(stage, offload, dtype, grad_accum_dtype), model_class)


def of_configuration(world_size, configuration):
    """What each rank saw of the configuration, in rank order."""
    return [observations[configuration] for observations in observed(observe_all, world_size)]


def observe_all(rank):
    start_deepspeed()
    return {
        configuration: {
            **observe_storage(configuration),
            **observe_writing(configuration)
        }
        for configuration in SUPPORTED_CONFIGURATIONS
    }


def observe_storage(configuration):
    engine = engine_of(configuration, TinyModel, pin_memory=True)
    seen = {'optimizer_class': type(engine.optimizer).__name__}
    counts = [collectives_so_far()]
    masters = engine.optimizer_storage()
    counts.append(collectives_so_far())
    maps = engine.optimizer_storage_maps()
    counts.append(collectives_so_far())
    engine.optimizer_storage_maps()
    counts.append(collectives_so_far())
    seen['collectives'] = [after - before for before, after in zip(counts, counts[1:])]
    seen['maps'] = {name: parameter_map.to_dict() for name, parameter_map in maps.items()}
    seen['errors before a step'] = {state: error_of(engine, state) for state in ('exp_avg', 'momentum_buffer')}
    seen['arrays'], seen['reference'] = {}, {}
    note_states(engine, seen, 0, ADAM_STATES[:1])
    train(engine, 1)
    note_states(engine, seen, 1, ADAM_STATES)
    seen['errors after a step'] = {state: error_of(engine, state) for state in ('exp_avg', 'momentum_buffer', 'step')}
    after_one_step = {state: engine.optimizer_storage(state) for state in ADAM_STATES}
    train(engine, 2, first=1)
    note_states(engine, seen, 3, ADAM_STATES)
    kept = {'fp32': masters, 'exp_avg': after_one_step['exp_avg'], 'exp_avg_sq': after_one_step['exp_avg_sq']}
    seen['arrays of kept views'] = {state: arrays_of(views) for state, views in kept.items()}
    seen['strangers'] = {state: views_outside_the_optimizer(engine, state) for state in ADAM_STATES}
    seen['operators'] = operators_of(lambda: [engine.optimizer_storage(state) for state in ADAM_STATES])
    seen['attributes'] = {(view.ndim, view.dtype, view.device.type, view.requires_grad)
                          for state in ADAM_STATES
                          for view in engine.optimizer_storage(state).values()}
    engine.destroy()
    return seen


def note_states(engine, seen, steps, states):
    for state in states:
        seen['arrays'][steps, state] = arrays_of(engine.optimizer_storage(state))
        seen['reference'][steps, state] = arrays_of(full_reference(engine, state))


def error_of(engine, state):
    try:
        engine.optimizer_storage(state)
    except Exception as error:
        return error


def views_outside_the_optimizer(engine, state):
    """Names of the views that share no storage with any flat tensor that the optimizer itself keeps."""
    flats = own_flats(engine) if state == 'fp32' else own_states(engine, state)
    storages = {flat.untyped_storage().data_ptr() for flat in flats}
    views = engine.optimizer_storage(state)
    return [name for name, view in views.items() if view.untyped_storage().data_ptr() not in storages]


def observe_writing(configuration):
    """The same new values, through the views of one engine and through ``safe_set_full_*`` of its twin; two steps."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state
    written, twin = (engine_of(configuration, EvenModel, pin_memory) for pin_memory in (True, False))
    for engine in (written, twin):
        train(engine, 1)
    seen = {'new': {}}
    for state in ADAM_STATES:
        new = {name: full * 0.5 + 0.25 for name, full in full_reference(twin, state).items()}
        seen['new'][state] = arrays_of(new)
        write_full(written, state, new)
        for name, parameter in twin.module.named_parameters():
            if state == 'fp32':
                safe_set_full_fp32_param(parameter, new[name])
            else:
                safe_set_full_optimizer_state(parameter, new[name], state)
    seen['read back'] = {state: arrays_of(full_reference(written, state)) for state in ADAM_STATES}
    for label, engine in (('written', written), ('twin', twin)):
        train(engine, 2, first=1)
        seen[label] = {state: arrays_of(full_reference(engine, state)) for state in ADAM_STATES}
        engine.destroy()
    return seen


def assert_same(got, expected):
    assert list(got) == list(expected)
    for name in expected:
        assert numpy.array_equal(got[name], expected[name]), name


@each_configuration
def test_deepspeed_builds_the_listed_optimizer(world_size, configuration):
    for seen in of_configuration(world_size, configuration):
        assert seen['optimizer_class'] == configuration.optimizer_class


@each_configuration
def test_full_tensors_by_the_maps_equal_those_deepspeed_gathers(world_size, configuration):
    by_rank = of_configuration(world_size, configuration)
    assert set(by_rank[0]['reference']) == {(0, 'fp32')} | {(steps, state)
                                                            for steps in (1, 3)
                                                            for state in ADAM_STATES}
    for moment, reference in by_rank[0]['reference'].items():
        assert_same(assemble(by_rank[0]['maps'], [seen['arrays'][moment] for seen in by_rank]), reference)


@each_configuration
def test_masters_change_with_every_step(world_size, configuration):
    # Or the comparison after one and three steps would prove no more than that of the initial values.
    reference = of_configuration(world_size, configuration)[0]['reference']
    for earlier, later in ((0, 1), (1, 3)):
        for name in reference[0, 'fp32']:
            assert not numpy.array_equal(reference[earlier, 'fp32'][name], reference[later, 'fp32'][name]), name


@each_configuration
def test_maps_are_equal_on_all_ranks(world_size, configuration):
    first, *others = [seen['maps'] for seen in of_configuration(world_size, configuration)]
    for other in others:
        assert other == first and list(other) == list(first)


@each_configuration
def test_maps_leave_out_ranks_that_hold_nothing(world_size, configuration):
    for seen in of_configuration(world_size, configuration):
        for plain_map in seen['maps'].values():
            assert all(shard['shard_shape'][0] > 0 for shard in plain_map['ranks'].values())


@each_configuration
def test_only_the_first_request_for_maps_communicates_and_only_once(world_size, configuration):
    for seen in of_configuration(world_size, configuration):
        assert seen['collectives'] == [0, 1, 0]


@each_configuration
def test_views_lie_in_the_optimizers_own_tensors(world_size, configuration):
    for seen in of_configuration(world_size, configuration):
        assert seen['strangers'] == {state: [] for state in ADAM_STATES}


@each_configuration
def test_views_are_flat_fp32_on_the_host_and_outside_autograd(world_size, configuration):
    for seen in of_configuration(world_size, configuration):
        assert seen['attributes'] == {(1, torch.float32, 'cpu', False)}


@each_configuration
def test_asking_for_views_runs_nothing_that_allocates(world_size, configuration):
    for seen in of_configuration(world_size, configuration):
        assert seen['operators'] == {'detach', 'slice'}


@each_configuration
def test_views_taken_early_show_later_steps(world_size, configuration):
    for seen in of_configuration(world_size, configuration):
        for state, arrays in seen['arrays of kept views'].items():
            assert_same(arrays, seen['arrays'][3, state])


@each_configuration
def test_a_state_of_the_first_step_is_not_ready_before_it(world_size, configuration):
    for seen in of_configuration(world_size, configuration):
        error = seen['errors before a step']['exp_avg']
        assert isinstance(error, OptimizerStateNotReadyError) and "'exp_avg'" in str(error)
        assert seen['errors after a step']['exp_avg'] is None


@each_configuration
@pytest.mark.parametrize('moment, state', [('errors before a step', 'momentum_buffer'),
                                           ('errors after a step', 'momentum_buffer'),
                                           ('errors after a step', 'step')])
def test_a_state_that_is_never_kept_is_an_error_that_lists_those_that_are(world_size, configuration, moment, state):
    for seen in of_configuration(world_size, configuration):
        error = seen[moment][state]
        assert type(error) is ValueError and repr(state) in str(error)
        assert str(error).endswith('it keeps fp32, exp_avg, exp_avg_sq')


@each_configuration
def test_deepspeeds_accessors_read_what_is_written_into_views(world_size, configuration):
    for seen in of_configuration(world_size, configuration):
        for state in ADAM_STATES:
            assert_same(seen['read back'][state], seen['new'][state])


@each_configuration
def test_steps_after_writing_into_views_equal_those_after_safe_set_full(world_size, configuration):
    for seen in of_configuration(world_size, configuration):
        for state in ADAM_STATES:
            assert_same(seen['written'][state], seen['twin'][state])
