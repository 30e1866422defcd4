# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""AutoTP of size 2 under all stages, on 2 and 4 ranks: storage maps against what DeepSpeed itself gathers.

Each element of the flat masters is set to a label of its own. DeepSpeed makes each rank's shards of the model from
them, over the data parallel group, and its layers gather the whole parameters, over the tensor parallel group. Labels
are written in two digits, each of which bf16 holds exactly.
"""

import contextlib
import functools
import itertools
import math

import numpy
import pytest
import torch
from unit.runtime.zero.engines import (arrays_of, build_engine, collectives_of, config_of, element_order, observed,
                                       own_flats, own_states, partitioned, plain_maps, start_deepspeed)
from unit.runtime.zero.parallel_engines import forget_groups

BASE = 250


class ShardedModel(torch.nn.Module):
    """Layers of every kind of split, hardly any of them even, among parameters that all ranks keep."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(13, 6)
        self.up = torch.nn.Linear(6, 7)
        self.down = torch.nn.Linear(7, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.frozen = torch.nn.Linear(6, 7)
        self.frozen.requires_grad_(False)
        self.gather = torch.nn.Linear(7, 6, bias=False)
        self.fused = torch.nn.Linear(6, 15)
        self.unfused = torch.nn.Linear(15, 6)
        self.viewed = torch.nn.Linear(6, 16)
        self.unviewed = torch.nn.Linear(16, 6)
        self.lm_head = torch.nn.Linear(6, 13)

    def forward(self, tokens):
        hidden = self.tokens(tokens)
        for outwards, inwards in ((self.up, self.down), (self.frozen, self.gather), (self.fused, self.unfused),
                                  (self.viewed, self.unviewed)):
            hidden = hidden + inwards(torch.tanh(outwards(self.norm(hidden))))
        logits = self.lm_head(hidden)
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def split(pattern, partition_type, **options):
    return {'patterns': [rf'^{pattern}\.weight$'], 'partition_type': partition_type, **options}


SPLITS = {
    'use_default_specs':
    False,
    'layer_specs': [
        split('(up|frozen)', 'column'),
        split('(down|gather)', 'row'),
        split('fused', 'column', shape=[3, -1], partition_dim=0),
        split('unfused', 'row', shape=[-1, [5, 5, 5]], partition_dim=1),
        # A view of three dimensions: two blocks of 5 and 3 rows each.
        split('viewed', 'column', shape=[2, [5, 3], 6], partition_dim=1),
        split('unviewed', 'row', shape=[-1, [5, 3, 5, 3]], partition_dim=1),
        split('lm_head', 'column', gather_output=True),
    ]
}


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = dict(hidden_size=12, intermediate_size=7, num_hidden_layers=1, num_attention_heads=3, vocab_size=13)
    return LlamaForCausalLM(
        LlamaConfig(bos_token_id=0, eos_token_id=0, num_key_value_heads=3, attention_bias=True, **sizes, **options))


def sharded(config, **options):
    return config | {'tensor_parallel': {'autotp_size': 2, **options}}


ALIGNED = dict(round_robin_gradients=True, parameter_alignment=True)
CONFIGS = {
    'stage 1':
    sharded(config_of(1), partition_config=SPLITS),
    'stage 2':
    sharded(config_of(2), partition_config=SPLITS),
    'stage 2, aligned, round robin, offloaded':
    sharded(config_of(2, 'cpu', dtype='bf16', **ALIGNED), partition_config=SPLITS),
    'BF16_Optimizer':
    sharded(config_of(1, dtype='bf16', grad_accum_dtype='fp32'), partition_config=SPLITS),
    'stage 3':
    sharded(config_of(3), partition_config=SPLITS),
    'stage 3, two groups':
    sharded(config_of(3, dtype='bf16'), partition_config=SPLITS),
    'stage 3, offloaded':
    sharded(config_of(3, 'cpu'), partition_config=SPLITS),
    'stage 3, zero.Init':
    sharded(config_of(3), partition_config=SPLITS),
    'Llama, stage 1':
    sharded(config_of(1)),
    'Llama, stage 3':
    sharded(config_of(3)),
    'Llama, shared vocabulary':
    sharded(config_of(1), vocab_parallel_lm_head=True),
}
CASES = list(itertools.product((2, 4), CONFIGS))
each_case = pytest.mark.parametrize('world_size, label', CASES)


def model_class_of(label, config):
    if 'Llama' in label:
        return functools.partial(llama, tie_word_embeddings='shared' in label)
    return functools.partial(partitioned, ShardedModel, config) if 'zero.Init' in label else ShardedModel


def group_of(label, name):
    return ('aligned' in label or 'groups' in label) and name.endswith('bias')


def observe_shards(rank):
    start_deepspeed()
    seen = {}
    for label, config in CONFIGS.items():
        forget_groups()
        names = [name for name, _ in model_class_of(label, config)().named_parameters()]
        engine = build_engine(config, model_class_of(label, config), group_of=functools.partial(group_of, label))
        seen[label] = {'names': names, **observe_engine(engine)}
        engine.destroy()
    return seen


def observe_engine(engine):
    train(engine, 1)
    counts = collectives_of(engine.optimizer_storage, engine.optimizer_storage_maps, engine.optimizer_storage_maps)
    seen = {
        'collectives': counts,
        'maps': plain_maps(engine.optimizer_storage_maps()),
    }
    masters, wholes = [], []
    for digit in range(2):
        label_masters(engine, digit)
        masters.append(arrays_of(engine.optimizer_storage()))
        wholes.append(whole_parameters(engine))
    seen['masters'] = {name: array + BASE * masters[1][name] for name, array in masters[0].items()}
    seen['wholes'] = {name: array + BASE * wholes[1][name] for name, array in wholes[0].items()}
    for flat, moment in zip(own_flats(engine), own_states(engine, 'exp_avg')):
        moment.copy_(flat.detach())
    seen['moments'] = arrays_of(engine.optimizer_storage('exp_avg'))
    seen['last masters'] = masters[1]
    return seen


def train(engine, steps):
    """As ``engines.train``, with the same data on the ranks of a tensor parallel group."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + torch.distributed.get_rank() // 2)
        tokens = torch.randint(13, (2, 6), generator=generator)
        loss = engine(tokens) if isinstance(engine.module, ShardedModel) else engine(input_ids=tokens,
                                                                                     labels=tokens).loss
        engine.backward(loss)
        engine.step()


def label_masters(engine, digit):
    """Give all elements of all ranks' flat masters different labels, of which this writes one digit."""
    first = torch.distributed.get_rank() * BASE**2 // 4
    for flat in own_flats(engine):
        flat.data.copy_(torch.arange(first, first + flat.numel()) // BASE**digit % BASE)
        first += flat.numel()
    if engine.zero_optimization_stage() < 3:
        engine.optimizer.update_lp_params()


def whole_parameters(engine):
    """{name: the parameter as this rank's model has it, whole, by DeepSpeed's own gathering over both groups}."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param
    wholes = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        partitioned = hasattr(parameter, 'ds_id')
        shard = safe_get_full_fp32_param(parameter) if partitioned else parameter.data
        with deepspeed.zero.GatheredParameters([parameter]) if partitioned else contextlib.nullcontext():
            kept = parameter.data
            parameter.data = shard.to(parameter.dtype, copy=True)
            if hasattr(parameter, 'gather_params'):
                parameter.gather_params([parameter])
            wholes[name] = parameter.data.clone()
            parameter.data = kept
    return arrays_of(wholes)


def by_rank(world_size, label):
    return [seen[label] for seen in observed(observe_shards, world_size)]


@each_case
def test_each_rank_holds_what_deepspeed_gathers_at_the_elements_that_the_map_says(world_size, label):
    for rank, seen in enumerate(by_rank(world_size, label)):
        assert sorted(seen['maps']) == sorted(seen['wholes'])
        for name, whole in seen['wholes'].items():
            held = whole.flatten()[element_order(seen['maps'][name], rank)]
            assert numpy.array_equal(seen['masters'][name], held), name


@each_case
def test_logical_shapes_are_those_of_the_full_parameters(world_size, label):
    for seen in by_rank(world_size, label):
        for name, whole in seen['wholes'].items():
            assert tuple(seen['maps'][name]['logical_shape']) == whole.shape, name


def holders_of(plain_map, world_size):
    """By element of the flattened parameter, the ranks that hold it."""
    holders = [set() for _ in range(math.prod(plain_map['logical_shape']))]
    for rank in range(world_size):
        for element in element_order(plain_map, rank):
            holders[element].add(rank)
    return holders


@each_case
def test_every_element_is_held_once_or_by_one_rank_of_each_tensor_parallel_rank(world_size, label):
    for name, plain_map in by_rank(world_size, label)[0]['maps'].items():
        for held_by in holders_of(plain_map, world_size):
            assert sorted(rank % 2 for rank in held_by) in ([0], [1], [0, 1]), name


@each_case
def test_pieces_name_all_ranks_that_hold_them(world_size, label):
    for name, plain_map in by_rank(world_size, label)[0]['maps'].items():
        holders = holders_of(plain_map, world_size)
        for shard in plain_map['ranks'].values():
            for piece in shard['pieces']:
                offset, strides = piece['source']
                for index in itertools.product(*map(range, piece['shape'])):
                    element = offset + sum(i * stride for i, stride in zip(index, strides))
                    assert holders[element] == set(piece['locations']), name


@each_case
def test_the_keys_are_the_names_before_sharding_on_every_rank(world_size, label):
    first, *others = by_rank(world_size, label)
    assert list(first['maps']) == [name for name in first['names'] if not name.startswith('frozen')]
    for other in others:
        assert other['maps'] == first['maps'] and list(other['maps']) == list(first['maps'])
        assert list(other['masters']) == list(first['maps'])


@each_case
def test_moments_of_shards_are_laid_out_as_their_masters(world_size, label):
    for seen in by_rank(world_size, label):
        for name, masters in seen['last masters'].items():
            assert numpy.array_equal(seen['moments'][name], masters), name


@each_case
def test_only_the_first_request_for_maps_communicates_and_only_once(world_size, label):
    for seen in by_rank(world_size, label):
        assert seen['collectives'] == [0, 1, 0]


@pytest.mark.parametrize('label', ['stage 1', 'BF16_Optimizer', 'stage 3', 'Llama, stage 1', 'Llama, stage 3'])
def test_parameters_really_lie_elsewhere_on_other_tensor_parallel_ranks(label):
    first, second = by_rank(2, label)
    offsets = [{name: array[0] for name, array in seen['masters'].items()} for seen in (first, second)]
    start = [min(names.values()) for names in offsets]
    assert any(offsets[0][name] - start[0] != offsets[1][name] - start[1] for name in offsets[0])
