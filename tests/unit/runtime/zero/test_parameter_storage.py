# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The low-precision weights of every supported configuration on real engines, against ``GatheredParameters``.

All configurations of one world size are observed in one start of its ranks; the tests judge what was observed.
"""

import numpy
import pytest
import torch
from unit.runtime.zero.engines import (DTYPES, TinyModel, arrays_of, build_engine, collectives_of, config_of,
                                       element_order, gathered, observed, operators_of, plain_maps, start_deepspeed,
                                       train)

from deepspeed.runtime.zero.zero_affine import SUPPORTED_CONFIGURATIONS, SUPPORTED_WITHOUT_OPTIMIZER

WORLD_SIZES = (1, 2, 3)
ALL_CONFIGURATIONS = SUPPORTED_CONFIGURATIONS + SUPPORTED_WITHOUT_OPTIMIZER


def each(configurations):
    return pytest.mark.parametrize('world_size, configuration', [
        pytest.param(world_size, configuration, id='-'.join(map(str, (world_size, ) + configuration)))
        for world_size in WORLD_SIZES for configuration in configurations
    ])


each_configuration = each(ALL_CONFIGURATIONS)
each_trained = each(SUPPORTED_CONFIGURATIONS)


class StoredModel(TinyModel):
    """With a parameter of no elements, in a module of its own that is not run: ZeRO-3 cannot gather it for that."""

    def __init__(self):
        super().__init__()
        self.void = torch.nn.Embedding(0, 8)


PLAIN_MODEL_NAMES = [name for name, _ in StoredModel().named_parameters()]


def engine_of(configuration):
    # Nothing persistent, so that the forward pass reads the partitions themselves.
    options = {'stage3_param_persistence_threshold': 0} if configuration.stage == 3 else {}
    grad_accum_dtype = 'fp32' if configuration.optimizer_class == 'BF16_Optimizer' else None
    optimizer = None if configuration in SUPPORTED_WITHOUT_OPTIMIZER else torch.optim.Adam
    # A section that says "none" is no offload.
    offload = {'device': configuration.offload_optimizer, 'pin_memory': False}
    config = config_of(configuration.stage, offload, configuration.dtype, grad_accum_dtype, **options)
    return build_engine(config, StoredModel, optimizer)


def of_configuration(world_size, configuration):
    """What each rank saw of the configuration, in rank order."""
    return [observations[configuration] for observations in observed(observe_all, world_size)]


def observe_all(rank):
    start_deepspeed()
    return {configuration: observe_storage(configuration) for configuration in ALL_CONFIGURATIONS}


def observe_storage(configuration):
    engine = engine_of(configuration)
    seen = {'optimizer_class': type(engine.optimizer).__name__, 'arrays': {}, 'reference': {}}
    seen['collectives'] = collectives_of(engine.parameter_storage, engine.parameter_storage_maps,
                                         engine.parameter_storage_maps)
    early, maps = engine.parameter_storage(), engine.parameter_storage_maps()
    seen['maps'] = plain_maps(maps)
    note_parameters(engine, seen, 'built')
    if configuration not in SUPPORTED_WITHOUT_OPTIMIZER:
        train(engine, 1)
        note_parameters(engine, seen, 'trained')
        seen['early views, trained'] = arrays_of(early)
    seen['strangers'] = views_outside_the_model(engine)
    seen['operators'] = operators_of(engine.parameter_storage)
    views = engine.parameter_storage()
    seen['attributes'] = {(view.dtype, view.device.type, view.requires_grad) for view in views.values()}
    seen['shapes'] = {name: tuple(view.shape) for name, view in views.items()}
    seen['loss'], seen['expected loss'] = losses_after_writing(engine, maps, DTYPES[configuration.dtype])
    note_parameters(engine, seen, 'written')
    engine.destroy()
    return seen


def note_parameters(engine, seen, moment):
    seen['arrays'][moment] = arrays_of(engine.parameter_storage())
    seen['reference'][moment] = gathered(engine)


def views_outside_the_model(engine):
    """Names of the views that do not lie where the model keeps the parameter."""
    named = dict(engine.module.named_parameters())
    strangers = []
    for name, view in engine.parameter_storage().items():
        own = getattr(named[name], 'ds_tensor', named[name])
        first = view.data_ptr() - own.data_ptr() if view.numel() else 0
        if view.untyped_storage().data_ptr() != own.untyped_storage().data_ptr() or first != 0:
            strangers.append(name)
    return strangers


def losses_after_writing(engine, maps, dtype):
    """The engine's loss once new values were written through the views, and that of a plain model of these values."""
    generator = torch.Generator().manual_seed(3)
    plain = StoredModel().to(dtype)
    for parameter in plain.parameters():
        # Exact in each dtype.
        parameter.data = (torch.randint(-30, 31, parameter.shape, generator=generator) / 64).to(dtype)
    new = dict(plain.named_parameters())
    rank = torch.distributed.get_rank()
    for name, view in engine.parameter_storage().items():
        order = element_order(maps[name].to_dict(), rank)
        view.copy_(new[name].detach().flatten()[order].view(view.shape))
    tokens = torch.randint(13, (2, 6), generator=generator)
    with torch.no_grad():
        return engine(tokens).item(), plain(tokens).item()


@each_configuration
def test_deepspeed_builds_the_listed_optimizer(world_size, configuration):
    for seen in of_configuration(world_size, configuration):
        assert seen['optimizer_class'] == configuration.optimizer_class


@each_configuration
def test_maps_and_views_name_every_parameter_of_the_model_in_its_order(world_size, configuration):
    for seen in of_configuration(world_size, configuration):
        assert list(seen['maps']) == list(seen['shapes']) == PLAIN_MODEL_NAMES


@each_configuration
def test_each_ranks_views_hold_what_the_maps_say_of_the_gathered_parameters(world_size, configuration):
    by_rank = of_configuration(world_size, configuration)
    trained = [] if configuration in SUPPORTED_WITHOUT_OPTIMIZER else ['trained']
    assert list(by_rank[0]['reference']) == ['built'] + trained + ['written']
    for rank, seen in enumerate(by_rank):
        for moment, reference in seen['reference'].items():
            for name, full in reference.items():
                order = element_order(seen['maps'][name], rank)
                held = seen['arrays'][moment][name].flatten()
                assert numpy.array_equal(held, full.flatten()[order]), (rank, moment, name)


@each_configuration
def test_maps_give_every_element_to_one_rank_under_stage_3_and_to_every_rank_otherwise(world_size, configuration):
    for name, plain_map in of_configuration(world_size, configuration)[0]['maps'].items():
        numel = numpy.prod(plain_map['logical_shape'], dtype=int)
        held = [sorted(element_order(plain_map, rank)) for rank in range(world_size)]
        if configuration.stage == 3:
            assert sum(held, []) == list(range(numel)), name
        else:
            assert held == [list(range(numel))] * world_size, name


@each_configuration
def test_the_logical_shape_is_the_parameters_own(world_size, configuration):
    for seen in of_configuration(world_size, configuration):
        for name, full in seen['reference']['built'].items():
            assert tuple(seen['maps'][name]['logical_shape']) == full.shape, name


@each_configuration
def test_views_have_the_shape_of_their_shards(world_size, configuration):
    for rank, seen in enumerate(of_configuration(world_size, configuration)):
        for name, shape in seen['shapes'].items():
            shard = seen['maps'][name]['ranks'].get(rank, {'shard_shape': (0, )})
            assert shape == tuple(shard['shard_shape']), name


@each_trained
def test_training_changes_what_the_views_show_save_frozen_parameters(world_size, configuration):
    # Or the comparison after a step would prove no more than that of the initial values.
    reference = of_configuration(world_size, configuration)[0]['reference']
    for name in PLAIN_MODEL_NAMES:
        same = numpy.array_equal(reference['built'][name], reference['trained'][name])
        assert same == name.startswith(('frozen', 'void')), name


@each_trained
def test_views_taken_early_show_later_steps(world_size, configuration):
    for seen in of_configuration(world_size, configuration):
        for name, array in seen['early views, trained'].items():
            assert numpy.array_equal(array, seen['arrays']['trained'][name]), name


@each_configuration
def test_the_forward_pass_reads_what_is_written_into_views(world_size, configuration):
    for seen in of_configuration(world_size, configuration):
        assert seen['loss'] == seen['expected loss']


@each_configuration
def test_maps_are_equal_on_all_ranks(world_size, configuration):
    first, *others = [seen['maps'] for seen in of_configuration(world_size, configuration)]
    assert all(other == first for other in others)


@each_configuration
def test_only_the_first_request_for_maps_communicates_and_only_once(world_size, configuration):
    for seen in of_configuration(world_size, configuration):
        assert seen['collectives'] == [0, 1, 0]


@each_configuration
def test_views_lie_where_the_model_keeps_its_weights(world_size, configuration):
    for seen in of_configuration(world_size, configuration):
        assert seen['strangers'] == []


@each_configuration
def test_views_have_the_models_dtype_and_are_outside_autograd(world_size, configuration):
    for seen in of_configuration(world_size, configuration):
        assert seen['attributes'] == {(DTYPES[configuration.dtype], 'cpu', False)}


@each_configuration
def test_asking_for_views_runs_nothing_that_allocates(world_size, configuration):
    for seen in of_configuration(world_size, configuration):
        assert seen['operators'] <= {'detach', 'slice'}
