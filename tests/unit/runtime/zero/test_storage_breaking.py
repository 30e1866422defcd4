# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A model that was changed after ``deepspeed.initialize``, and ranks that call different methods at the same time."""

import pytest
import torch
from unit.runtime.zero.engines import arrays_of, build_engine, config_of, gathered, observed, start_deepspeed

from deepspeed.runtime.zero.zero_affine import ParameterNotReadyError


def replace_data(model):
    model.up.weight.data = torch.ones(11, 5, dtype=torch.bfloat16)


def cast(model):
    model.float()


def replace_parameter(model):
    model.up.weight = torch.nn.Parameter(torch.ones(11, 5, dtype=torch.bfloat16))


def add_parameter(model):
    model.extra = torch.nn.Linear(3, 3).bfloat16()


def freeze(model):
    model.up.weight.requires_grad_(False)


# Changes after which the model computes with something that no master and no partition feeds.
DETACHED = 'no longer lies in the optimizer\'s buffer'
NOT_NAMED = 'the optimizer owns parameters that engine.module does not name, of shapes [(11, 5)]'
NOT_PARTITIONED = 'is not partitioned: add parameters to the model before deepspeed.initialize'
REFUSED_CHANGES = {
    (1, replace_data): DETACHED,
    (2, replace_data): DETACHED,
    (1, cast): DETACHED,
    (1, replace_parameter): NOT_NAMED,
    (3, replace_parameter): f'parameter up.weight of shape (11, 5) {NOT_PARTITIONED}',
    (3, add_parameter): f'parameter extra.weight of shape (3, 3) {NOT_PARTITIONED}',
}
HARMLESS_CHANGES = [(1, add_parameter), (1, freeze), (3, freeze), (3, replace_data)]
RANKS = {'every rank': (0, 1), 'rank 1 only': (1, )}


def observe_changes(rank):
    start_deepspeed()
    seen = {}
    for who, ranks in RANKS.items():
        for stage, change in REFUSED_CHANGES:
            engine = build_changed(stage, change, rank in ranks)
            seen[stage, change.__name__, who] = error_of(engine.update_lp_params)
            engine.destroy()
    for stage, change in HARMLESS_CHANGES:
        engine = build_changed(stage, change, True)
        seen[stage, change.__name__] = error_of(engine.update_lp_params), arrays_of(
            dict(engine.module.named_parameters())) if stage < 3 else gathered(engine)
        engine.destroy()
    return seen


def build_changed(stage, change, is_changing):
    engine = build_engine(config_of(stage, dtype='bf16'))
    for master in engine.optimizer_storage().values():
        master.fill_(0.5)
    if is_changing:
        change(engine.module)
    return engine


def error_of(call):
    try:
        call()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize('who', RANKS)
@pytest.mark.parametrize('stage, change', REFUSED_CHANGES)
def test_an_update_that_would_not_reach_the_model_is_refused_on_every_rank(stage, change, who):
    for rank, seen in enumerate(observed(observe_changes, 2)):
        error_class, text = seen[stage, change.__name__, who]
        expected = REFUSED_CHANGES[stage, change] if rank in RANKS[who] else 'ranks [1] refuse'
        assert error_class is ParameterNotReadyError and expected in text


@pytest.mark.parametrize('stage, change', HARMLESS_CHANGES)
def test_an_update_reaches_what_the_optimizer_owns_after_other_changes(stage, change):
    for seen in observed(observe_changes, 2):
        error, weights = seen[stage, change.__name__]
        assert error is None
        assert (weights['up.weight'] == 0.5).all()


# Views of a model that was changed after its maps were asked for


def observe_late_changes(rank):
    start_deepspeed()
    seen = {}
    for change in (replace_parameter, add_parameter):
        engine = build_engine(config_of(3, dtype='bf16'))
        engine.parameter_storage_maps()
        change(engine.module)
        seen[change.__name__] = error_of(engine.parameter_storage)
        engine.destroy()
    return seen


def test_views_of_a_parameter_that_was_replaced_are_refused_by_its_name():
    for seen in observed(observe_late_changes, 2):
        error_class, text = seen['replace_parameter']
        assert error_class is ParameterNotReadyError and 'parameter up.weight' in text


def test_views_are_those_of_the_kept_maps_where_a_parameter_was_added():
    assert all(seen['add_parameter'] is None for seen in observed(observe_late_changes, 2))


# Ranks that do not call the same

METHODS = ('optimizer_storage_maps', 'parameter_storage_maps', 'update_lp_params')
MIXED_CALLS = [(first, second) for first in METHODS for second in METHODS if first != second]


def observe_mixed_calls(rank):
    start_deepspeed()
    seen = {}
    for calls in MIXED_CALLS:
        engine = build_engine(config_of(1))
        seen[calls] = error_of(getattr(engine, calls[rank]))
        engine.destroy()
    return seen


@pytest.mark.parametrize('calls', MIXED_CALLS, ids=' and '.join)
def test_ranks_that_call_different_methods_are_all_told_so(calls):
    for seen in observed(observe_mixed_calls, 2):
        error_class, text = seen[calls]
        assert error_class is RuntimeError and 'call another method' in text


def error_without_rank_1(rank):
    start_deepspeed()
    engine = build_engine(config_of(1))
    return None if rank == 1 else error_of(engine.optimizer_storage_maps)


def test_a_call_that_not_every_rank_makes_says_so():
    error_class, text = observed(error_without_rank_1, 2)[0]
    assert error_class is RuntimeError and 'not every rank of the world made this call' in text
