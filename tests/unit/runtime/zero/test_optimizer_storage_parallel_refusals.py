# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Experts and shards that cannot be described: refused by the name of the parameter, on every rank alike."""

import pytest
import torch
from unit.runtime.zero.engines import (build_engine, collectives_so_far, config_of, observed, reversed_adam,
                                       start_deepspeed)
from unit.runtime.zero.parallel_engines import adam_of_experts, forget_groups

from deepspeed.runtime.zero.zero_affine import UnsupportedEngineError


class Sharded(torch.nn.Module):

    def __init__(self, rows):
        super().__init__()
        self.up = torch.nn.Linear(6, rows)
        self.down = torch.nn.Linear(rows, 6)


def sharded_engine(rows=6, optimizer=torch.optim.Adam):
    splits = [{'patterns': [f'^{name}.weight$'], 'partition_type': kind} for name, kind in SPLITS.items()]
    tensor_parallel = {'autotp_size': 2, 'partition_config': {'use_default_specs': False, 'layer_specs': splits}}
    return build_engine(config_of(1) | {'tensor_parallel': tensor_parallel}, lambda: Sharded(rows), optimizer)


SPLITS = {'up': 'column', 'down': 'row'}


class WithExperts(torch.nn.Module):

    def __init__(self):
        super().__init__()
        from deepspeed.moe.layer import MoE
        self.dense = torch.nn.Linear(6, 6)
        self.moe = MoE(6, torch.nn.Linear(6, 6), num_experts=4, ep_size=2)


class WithExpertsRegisteredTwice(WithExperts):

    def __init__(self):
        super().__init__()
        moe = self.moe
        del self.moe
        self.first, self.moe = moe.deepspeed_moe.experts.deepspeed_experts[0], moe


class WithExpertsInExperts(torch.nn.Module):

    def __init__(self):
        super().__init__()
        from deepspeed.moe.layer import MoE
        self.dense = torch.nn.Linear(6, 6)
        self.moe = MoE(6, MoE(6, torch.nn.Linear(6, 6), num_experts=2), num_experts=2, ep_size=2)


def publish(parameter, entry, reason=None):
    """Replace what an AutoTP layer published of the parameter."""
    from deepspeed.checkpoint.constants import AFFINE_MAP, DS_AUTOTP_UC_META
    getattr(parameter, DS_AUTOTP_UC_META)['conversion'].update({AFFINE_MAP: entry, 'unsupported_reason': reason})


def layer_without_a_map(rank):
    engine = sharded_engine()
    publish(engine.module.up.weight, None)
    return engine


def layer_with_a_reason(rank):
    engine = sharded_engine()
    publish(engine.module.up.weight, None, 'its blocks are interleaved')
    return engine


def unknown_sharded_layer(rank):
    engine = sharded_engine()
    engine.module.up = torch.nn.ParameterDict(engine.module.up.named_parameters())
    return engine


def layer_of_conv1d(rank):
    from deepspeed.module_inject.layers import Conv_LinearALlreduce
    engine = sharded_engine()
    engine.module.down.__class__ = Conv_LinearALlreduce
    return engine


def map_of_another_degree(rank):
    from deepspeed.checkpoint.affine import replicated_map
    engine = sharded_engine()
    publish(engine.module.up.weight, replicated_map((6, 6), 3).to_dict())
    return engine


def empty_shard(rank):
    return sharded_engine(rows=1)


def expert_outside_a_layer(rank):
    engine = build_engine(config_of(1), WithExperts, adam_of_experts)
    engine.module.dense.weight.allreduce = False
    engine.module.dense.weight.group_name = 'ep_size_2'
    return engine


def expert_under_another_name(rank):
    return build_engine(config_of(1), WithExpertsRegisteredTwice, adam_of_experts)


def expert_in_an_expert(rank):
    return build_engine(config_of(1), WithExpertsInExperts, adam_of_experts)


# What the text must name: how to build an engine that is refused for it.
REFUSED = {
    'parameter up.weight, sharded by LinearLayer: it publishes no affine map': layer_without_a_map,
    'parameter up.weight, sharded by LinearLayer: its blocks are interleaved': layer_with_a_reason,
    'parameter up.weight, sharded by an unknown layer': unknown_sharded_layer,
    'parameter down.weight, sharded by Conv_LinearALlreduce': layer_of_conv1d,
    'parameter up.weight of shape (6, 6): LinearLayer publishes a map of shape (6, 6) for ranks [0, 1, 2] of 2':
    map_of_another_degree,
    'parameter up.weight, of which ranks [1] have no elements': empty_shard,
    'expert parameter dense.weight': expert_outside_a_layer,
    'expert parameter first.weight': expert_under_another_name,
    'deepspeed_experts.0.deepspeed_moe.experts.deepspeed_experts.0.weight': expert_in_an_expert,
}  # yapf: disable


def experts_among_other_parameters(rank):
    """An expert in a group that DeepSpeed partitions over all ranks: it does not notice, and mixes experts up."""

    def adam(groups, **options):
        groups = [{'params': group['params'][:-1]} for group in groups] + [{'params': groups[0]['params'][-1:]}]
        split = adam_of_experts(groups[:1]).param_groups
        return torch.optim.Adam([{
            key: group[key]
            for key in ('params', 'name', 'moe') if key in group
        } for group in split] + [groups[1]], **options)

    return build_engine(config_of(1), WithExperts, adam)


def shard_of_another_shape(rank):
    from deepspeed.checkpoint.affine import contiguous_split_map
    engine = sharded_engine()
    publish(engine.module.up.weight, contiguous_split_map((6, 6), [2, 4], 0).to_dict())
    return engine


def padding_of_another_rule(rank):
    engine = sharded_engine(rows=7)
    engine.optimizer.nccl_start_alignment_factor = 64
    return engine


# The same, where what DeepSpeed keeps is not what a rank derives.
BROKEN = {
    'parameter moe.deepspeed_moe.experts.deepspeed_experts.1.bias differs between ranks [0, 1]':
    experts_among_other_parameters,
    'parameter up.weight of shape (3, 6) starts at 0 of partitions of 46 elements; expected shape':
    shard_of_another_shape,
    'starts at 0 of partitions of': padding_of_another_rule,
}


def another_order_on_rank_1(rank):
    return sharded_engine(rows=7, optimizer=reversed_adam if rank == 1 else torch.optim.Adam)


def another_map_on_rank_1(rank):
    from deepspeed.checkpoint.affine import block_gather_map
    engine = sharded_engine()
    if rank == 1:
        publish(engine.module.up.weight, block_gather_map((6, 6), {0: [1], 1: [0]}, 3, 0).to_dict())
    return engine


DISAGREEING = [another_order_on_rank_1, another_map_on_rank_1]


def no_map_on_rank_1(rank):
    return layer_without_a_map(rank) if rank == 1 else sharded_engine()


def observe_refusals(rank):
    start_deepspeed()
    seen = {}
    for build in (*REFUSED.values(), *BROKEN.values(), *DISAGREEING, no_map_on_rank_1):
        forget_groups()
        engine = build(rank)
        calls = [engine.optimizer_storage_maps, engine.optimizer_storage]
        if build in REFUSED.values():
            calls += [engine.parameter_storage_maps, engine.parameter_storage]
        seen[build.__name__] = [outcome_of(call) for call in calls]
    return seen


def outcome_of(call):
    before = collectives_so_far()
    try:
        call()
    except Exception as error:
        return type(error), str(error), collectives_so_far() - before


each_refusal = pytest.mark.parametrize('named', REFUSED)


@each_refusal
def test_every_rank_refuses_maps_and_views_and_names_the_parameter(named):
    for seen in observed(observe_refusals, 2):
        for error_class, text, _ in seen[REFUSED[named].__name__]:
            assert error_class is UnsupportedEngineError and named in text


@each_refusal
def test_a_refusal_says_what_to_use_instead(named):
    _, text, _ = observed(observe_refusals, 2)[0][REFUSED[named].__name__][0]
    assert any(word in text for word in ('use ', 'leave that layer out', 'train with', 'split it over'))


@each_refusal
def test_maps_are_refused_in_one_collective_and_views_in_none(named):
    # A model that differs between ranks may be refused on some of them only.
    for seen in observed(observe_refusals, 2):
        assert [collectives for _, _, collectives in seen[REFUSED[named].__name__]] == [1, 0, 1, 0]


@pytest.mark.parametrize('named', BROKEN)
def test_a_layout_that_contradicts_what_is_said_of_it_is_an_error_on_every_rank(named):
    for seen in observed(observe_refusals, 2):
        for error_class, text, _ in seen[BROKEN[named].__name__]:
            assert error_class is RuntimeError and named in text


@pytest.mark.parametrize('build', DISAGREEING)
def test_tensor_parallel_ranks_that_lay_out_the_optimizer_differently_are_named(build):
    for seen in observed(observe_refusals, 2):
        error_class, text, _ = seen[build.__name__][0]
        assert error_class is RuntimeError and 'ranks [1] lay out the optimizer differently from rank 0' in text


def test_a_rank_that_alone_refuses_a_parameter_says_why_and_the_others_name_it():
    (other, other_text, _), (own, own_text,
                             _) = [seen[no_map_on_rank_1.__name__][0] for seen in observed(observe_refusals, 2)]
    assert own is UnsupportedEngineError and 'publishes no affine map' in own_text
    assert other is RuntimeError and 'ranks [1] could not read their layout' in other_text
