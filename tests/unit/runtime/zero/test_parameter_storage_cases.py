# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What users meet: placeholders, edits that get lost, frozen parameters, stale copies; with their exact values."""

import pytest
import torch
from unit.runtime.zero.engines import (EvenModel, build_engine, collectives_so_far, config_of, element_order, gathered,
                                       observed, operators_of, start_deepspeed)

from deepspeed.runtime.zero.zero_affine import ParameterNotReadyError

NOTHING_PERSISTENT = {'stage3_param_persistence_threshold': 0}


class Vector(torch.nn.Module):
    """One parameter of equal elements, which the forward pass returns."""

    def __init__(self, numel, value):
        super().__init__()
        self.p = torch.nn.Parameter(torch.full((numel, ), float(value)))

    def forward(self):
        return self.p * 1


class Matrices(torch.nn.Module):

    def __init__(self, count, rows, columns):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(rows, columns) for _ in range(count))


class Adapted(torch.nn.Module):
    """A frozen embedding and a trained matrix."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.embed.weight.data = torch.arange(24.0).view(6, 4)
        self.embed.requires_grad_(False)
        self.w = torch.nn.Linear(4, 4, bias=False)

    def forward(self, tokens):
        return self.w(self.embed(tokens)).sum()


def observe_cases(rank):
    start_deepspeed()
    return {
        observe.__name__: observe()
        for observe in (placeholder, bucket_sizes, low_precision_copy, frozen, inside_gathering, replaced,
                        parameter_added_late)
    }


def placeholder():
    engine = build_engine(config_of(3, dtype='bf16'), lambda: torch.nn.Conv3d(3, 1280, (2, 14, 14), bias=False))
    weight_map, view = engine.parameter_storage_maps()['weight'], engine.parameter_storage()['weight']
    seen = {
        'live shape': tuple(engine.module.weight.shape),
        'logical shape': tuple(weight_map.logical_shape),
        'numel': weight_map.numel,
        'shards': weight_map.to_dict()['ranks'],
        'view': (tuple(view.shape), view.dtype),
    }
    engine.destroy()
    return seen


def bucket_sizes():
    engine = build_engine(config_of(3, dtype='bf16', **NOTHING_PERSISTENT), lambda: Matrices(8, 512, 1024))
    seen = {
        'live': [parameter.numel() for parameter in engine.module.parameters()],
        'maps': [parameter_map.numel for parameter_map in engine.parameter_storage_maps().values()],
        'views': [view.numel() for view in engine.parameter_storage().values()],
        'operators': operators_of(engine.parameter_storage),
    }
    engine.destroy()
    return seen


def low_precision_copy():
    engine = build_engine(config_of(3, dtype='bf16'), lambda: Vector(4, 0))
    engine.optimizer_storage()['p'].fill_(7.0)
    seen = {'stale': (engine.parameter_storage()['p'].tolist(), gathered(engine)['p'].tolist())}
    engine.update_lp_params()
    seen['fresh'] = (engine.parameter_storage()['p'].tolist(), gathered(engine)['p'].tolist(), engine().tolist())
    engine.destroy()
    return seen


def frozen():
    engine = build_engine(config_of(3, dtype='bf16'), Adapted)
    engine.backward(engine(torch.tensor([0, 5])))
    engine.step()
    seen = {
        'optimizer': [list(engine.optimizer_storage_maps())] +
        [list(engine.optimizer_storage(state)) for state in ('fp32', 'exp_avg')],
        'parameters':
        list(engine.parameter_storage_maps()),
        'map':
        engine.parameter_storage_maps()['embed.weight'].to_dict(),
        'held':
        engine.parameter_storage()['embed.weight'].tolist(),
    }
    engine.destroy()
    return seen


def inside_gathering():
    """A view during an edit by rank 0, after it, and what a write into the view during such an edit comes to."""
    import deepspeed
    engine = build_engine(config_of(3, **NOTHING_PERSISTENT), lambda: Vector(4, 0))
    seen = {}
    with deepspeed.zero.GatheredParameters(engine.module.p, modifier_rank=0):
        engine.module.p.data.fill_(1.0)
        seen['during'] = engine.parameter_storage()['p'].tolist()
        engine.parameter_storage()['p'].fill_(5.0)
    seen['after'] = engine.parameter_storage()['p'].tolist()
    engine.destroy()
    return seen


def replaced():
    return {
        (stage, replace.__name__): error_after(stage, replace)
        for stage, replace in ((1, with_a_placeholder), (1, with_a_longer_one), (3, with_another_parameter),
                               (3, with_none))
    }


def error_after(stage, replace):
    engine = build_engine(config_of(stage), EvenModel)
    engine.parameter_storage()
    replace(engine.module.up)
    try:
        engine.parameter_storage()
    except ParameterNotReadyError as error:
        return str(error)
    finally:
        engine.destroy()


def with_a_placeholder(layer):
    layer.bias.data = torch.empty(0)


def with_a_longer_one(layer):
    layer.bias.data = torch.zeros(24)


def with_another_parameter(layer):
    import deepspeed
    with deepspeed.zero.Init(config_dict_or_path=config_of(3)):
        layer.bias = torch.nn.Linear(12, 24).bias


def with_none(layer):
    layer.bias = None


def parameter_added_late():
    """The error of each rank, when only rank 1 has one more parameter."""
    engine = build_engine(config_of(3), EvenModel)
    if torch.distributed.get_rank() == 1:
        engine.module.late = torch.nn.Parameter(torch.zeros(2, 3))
    before = collectives_so_far()
    try:
        engine.parameter_storage_maps()
    except RuntimeError as error:
        return str(error), collectives_so_far() - before


def observe_secondary_copy(rank):
    start_deepspeed()
    engine = build_engine(config_of(3, dtype='bf16', zero_hpz_partition_size=2, **NOTHING_PERSISTENT),
                          lambda: Vector(8, 1))
    with torch.no_grad():
        seen = {'first': engine().tolist(), 'copy': engine.module.p.ds_secondary_tensor.tolist()}
    engine.optimizer_storage()['p'].fill_(7.0)
    engine.update_lp_params()
    seen['train'], seen['train again'] = engine().tolist(), engine().tolist()
    engine.eval()
    seen['eval'] = engine().tolist()
    with torch.no_grad():
        seen['no_grad'] = engine().tolist()
    seen['gathered'] = gathered(engine)['p'].tolist()
    return seen


def seen_by_ranks(case):
    return [seen[case.__name__] for seen in observed(observe_cases, 2)]


def test_shape_numel_and_dtype_come_from_the_map_and_the_view_not_from_the_placeholder():
    for rank, seen in enumerate(seen_by_ranks(placeholder)):
        assert seen['live shape'] == (0, )
        assert seen['logical shape'] == (1280, 3, 2, 14, 14) and seen['numel'] == 1505280
        assert [seen['shards'][rank]['shard_shape'] for rank in (0, 1)] == [[752640], [752640]]
        assert seen['view'] == ((752640, ), torch.bfloat16)


def test_buckets_can_be_sized_without_gathering_or_allocating_anything():
    for seen in seen_by_ranks(bucket_sizes):
        assert seen['live'] == [0] * 8
        assert seen['maps'] == [524288] * 8 and seen['views'] == [262144] * 8
        assert seen['operators'] <= {'detach', 'slice'}


def test_the_low_precision_copy_of_a_written_master_is_stale_until_update_lp_params():
    for seen in seen_by_ranks(low_precision_copy):
        assert seen['stale'] == ([0.0] * 2, [0.0] * 4)
        assert seen['fresh'] == ([7.0] * 2, [7.0] * 4, [7.0] * 4)


def test_a_frozen_parameter_has_no_optimizer_storage_and_all_its_values_as_a_parameter():
    for rank, seen in enumerate(seen_by_ranks(frozen)):
        assert seen['optimizer'] == [['w.weight']] * 3
        assert seen['parameters'] == ['embed.weight', 'w.weight']
        assert seen['map']['logical_shape'] == [6, 4]
        assert seen['held'] == [float(element) for element in range(12 * rank, 12 * rank + 12)]
        assert element_order(seen['map'], rank) == list(range(12 * rank, 12 * rank + 12))


def test_inside_gathered_parameters_a_view_shows_the_values_from_before_and_loses_what_is_written():
    for seen in seen_by_ranks(inside_gathering):
        assert seen == {'during': [0.0] * 2, 'after': [1.0] * 2}


@pytest.mark.parametrize('stage, replace, have, want', [
    (1, with_a_placeholder, '0 elements of shape (0,)', '12 of shape (12,)'),
    (1, with_a_longer_one, '24 elements of shape (24,)', '12 of shape (12,)'),
    (3, with_another_parameter, '12 elements of shape (12,)', '6 of shape (6,)'),
    (3, with_none, 'no parameter', '6 of shape (6,)'),
])
def test_a_replaced_parameter_is_an_error_with_both_sizes(stage, replace, have, want):
    for rank, seen in enumerate(seen_by_ranks(replaced)):
        text = seen[stage, replace.__name__]
        assert text.startswith(f'parameter up.bias on rank {rank}: have {have}, want {want}')


def test_a_parameter_that_one_rank_added_later_is_an_error_on_every_rank_after_one_collective():
    first, second = seen_by_ranks(parameter_added_late)
    assert 'ranks [1] could not read their layout' in first[0]
    assert second[0].startswith('parameter late of shape (2, 3) is not partitioned')
    assert (first[1], second[1]) == (1, 1)


@pytest.mark.parametrize('mode', ['train', 'train again', 'eval', 'no_grad', 'gathered'])
def test_every_gather_after_update_lp_params_returns_the_masters_and_no_stale_secondary_copy(mode):
    for seen in observed(observe_secondary_copy, 4):
        assert seen['first'] == [1.0] * 8 and seen['copy'] == [1.0] * 4
        assert seen[mode] == [7.0] * 8
