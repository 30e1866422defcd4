# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""``update_lp_params`` refuses while weights are offloaded or gathered: on every rank, and with nothing changed."""

import numpy
import pytest
from unit.runtime.zero.engines import EvenModel, build_engine, config_of, gathered, observed, start_deepspeed

from deepspeed.runtime.zero.zero_affine import ParameterNotReadyError

STAGES = (1, 2, 3)
# Which ranks have them offloaded or gathered.
RANKS = {'every rank': (0, 1), 'rank 1 only': (1, )}
EDIT = 0.25


def observe_refusals(rank):
    start_deepspeed()
    seen = {}
    for who, ranks in RANKS.items():
        seen.update({('offloaded', stage, who): observe_offloaded(stage, rank in ranks) for stage in STAGES})
        seen['read', 3, who] = observe_gathered(None, rank in ranks)
    seen['written', 3, 'every rank'] = observe_gathered(0, True)
    return seen


def observe_offloaded(stage, is_offloading):
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
    engine = build_engine(config_of(stage, dtype='bf16'), EvenModel)
    seen = {'old': gathered(engine)}
    if is_offloading:
        engine.offload_states(include={OffloadStateTypeEnum.lp_params})
    seen['error'] = error_of_update(engine)
    if is_offloading:
        engine.reload_states()
    note_weights_and_update(engine, seen)
    return seen


def observe_gathered(modifier_rank, is_staying):
    """Update while all parameters are gathered; a rank that does not stay has left the context by then."""
    import deepspeed
    engine = build_engine(config_of(3, dtype='bf16'), EvenModel)
    seen = {'old': gathered(engine)}
    context = deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=modifier_rank)
    context.__enter__()
    if not is_staying:
        context.__exit__(None, None, None)
    elif modifier_rank is not None:
        engine.module.up.bias.data.fill_(EDIT)
        seen['old']['up.bias'] = numpy.full_like(seen['old']['up.bias'], EDIT)
    seen['error'] = error_of_update(engine)
    if is_staying:
        context.__exit__(None, None, None)
    note_weights_and_update(engine, seen)
    return seen


def error_of_update(engine):
    """The error of an update to masters of other values."""
    for master in engine.optimizer_storage().values():
        master.fill_(0.5)
    try:
        engine.update_lp_params()
    except ParameterNotReadyError as error:
        return str(error)


def note_weights_and_update(engine, seen):
    seen['weights after the refusal'] = gathered(engine)
    engine.update_lp_params()
    seen['weights in the end'] = gathered(engine)
    engine.destroy()


CASES = [('offloaded', stage, who) for stage in STAGES for who in RANKS]
CASES += [('read', 3, who) for who in RANKS] + [('written', 3, 'every rank')]
each_case = pytest.mark.parametrize('case', CASES, ids=str)


@each_case
def test_every_rank_raises_and_says_what_to_do_first_or_where(case):
    what, _, who = case
    instead = 'call reload_states first' if what == 'offloaded' else 'leave deepspeed.zero.GatheredParameters first'
    for rank, seen in enumerate(observed(observe_refusals, 2)):
        expected = instead if rank in RANKS[who] else 'ranks [1] refuse'
        assert expected in seen[case]['error']


@each_case
def test_a_refusal_leaves_the_weights_as_they_were(case):
    for seen in observed(observe_refusals, 2):
        for name, old in seen[case]['old'].items():
            assert numpy.array_equal(seen[case]['weights after the refusal'][name], old), name


@each_case
def test_the_update_succeeds_once_the_obstacle_is_gone(case):
    for seen in observed(observe_refusals, 2):
        for name, weights in seen[case]['weights in the end'].items():
            assert numpy.array_equal(weights, numpy.full_like(weights, 0.5)), name


def test_a_refusal_names_the_gathered_parameters():
    for seen in observed(observe_refusals, 2):
        assert 'tokens.weight, up.weight, up.bias, head.weight, head.bias are gathered' in seen['written', 3,
                                                                                                'every rank']['error']
