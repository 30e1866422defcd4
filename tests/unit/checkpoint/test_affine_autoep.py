# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""AutoEP on affine maps: expert placements, the layer that publishes them, and the checkpoint code that reads them."""

import json
from unittest import mock

import pytest
import torch
from torch import nn

from deepspeed.checkpoint import affine
from deepspeed.checkpoint.affine import ParamAffineMap
from deepspeed.checkpoint.affine_transfer import plan_transfer
from deepspeed.checkpoint.autoep_affine import (autoep_metadata_to_affine_map, autoep_placement_to_affine_map,
                                                extract_autoep_rank_tensor, make_autoep_placement_descriptor)
from deepspeed.checkpoint.autoep_universal import (consolidate_autoep_zero12_expert_states,
                                                   get_autoep_zero12_expert_param_info)
from deepspeed.checkpoint.constants import DS_AUTOEP_UC_META, EP_NUM_EXPERTS
from deepspeed.checkpoint.ds_to_universal import _rebuild_zero3_autoep_rank_tensors
from deepspeed.checkpoint.universal_checkpoint import _resolve_autoep_partition
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.module_inject.auto_ep_presets.base import AutoEPConfig, MoELayerSpec
from deepspeed.runtime.engine import DeepSpeedEngine
from unit.checkpoint.affine_cases import assert_sound, labels, run_plan

NUM_EXPERTS = 6
SHAPES = [(NUM_EXPERTS, 2, 3), (NUM_EXPERTS, ), (NUM_EXPERTS, 4, 0)]
# Expert ids of each rank, in the order in which the rank packs them.
PLACEMENTS = {
    'one rank': [[0, 1, 2, 3, 4, 5]],
    'uniform': [[0, 1], [2, 3], [4, 5]],
    'uneven': [[0, 1, 2], [3], [4, 5]],
    'out of order': [[4, 0], [5, 3, 2], [1]],
    'a rank without experts': [[0, 1, 2, 3], [], [4, 5]],
    'some experts on two ranks': [[0, 1, 2], [2, 3, 4], [4, 5, 0]],
    'every expert on both ranks': [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]],
}
each_placement = pytest.mark.parametrize('name', PLACEMENTS)


def labelled(shape):
    return torch.from_numpy(labels(shape)).float()


def descriptor(name):
    return make_autoep_placement_descriptor(NUM_EXPERTS, PLACEMENTS[name])


def placement_map(name, shape=SHAPES[0]):
    return autoep_placement_to_affine_map(descriptor(name), shape)


@pytest.mark.parametrize('shape', SHAPES)
@each_placement
def test_a_rank_extracts_its_experts_in_packed_order(name, shape):
    full = labelled(shape)
    for rank, experts in enumerate(PLACEMENTS[name]):
        assert torch.equal(extract_autoep_rank_tensor(full, placement_map(name, shape), rank), full[experts])


@pytest.mark.parametrize('shape', SHAPES)
@each_placement
def test_the_ranks_tensors_rebuild_the_full_parameter(name, shape):
    full = labelled(shape)
    ranks = {rank: full[experts] for rank, experts in enumerate(PLACEMENTS[name])}
    assert torch.equal(placement_map(name, shape).rebuild(ranks), full)


@pytest.mark.parametrize('shape', SHAPES)
@each_placement
def test_a_placement_map_covers_every_expert_and_names_its_holders(name, shape):
    assert_sound(placement_map(name, shape))


@pytest.mark.parametrize('target', PLACEMENTS)
@pytest.mark.parametrize('source', PLACEMENTS)
def test_a_plan_between_placements_takes_packed_experts_to_packed_experts(source, target):
    source_map, target_map = placement_map(source), placement_map(target)
    written = run_plan(plan_transfer(target_map, source_map), source_map, target_map)
    full = labels(SHAPES[0])
    assert {
        rank: held.tolist()
        for rank, held in written.items()
    } == {
        rank: full[experts].reshape(-1).tolist()
        for rank, experts in enumerate(PLACEMENTS[target])
    }


@each_placement
def test_a_saved_map_is_read_and_found_equal_to_its_placement(name):
    map_ = placement_map(name)
    saved = {'affine_map': map_.to_dict(), 'expert_placement': descriptor(name)}
    assert autoep_metadata_to_affine_map(saved, SHAPES[0]) == map_
    by_name = {'affine_maps': {'version': 1, 'params': {'experts.w1': json.loads(json.dumps(map_.to_dict()))}}}
    assert autoep_metadata_to_affine_map(by_name, SHAPES[0], 'experts.w1') == map_


def test_a_saved_map_of_another_placement_is_refused():
    saved = {'affine_map': placement_map('uneven').to_dict(), 'expert_placement': descriptor('uniform')}
    with pytest.raises(ValueError, match='disagrees'):
        autoep_metadata_to_affine_map(saved, SHAPES[0])


@pytest.mark.parametrize('dest_offset', [-1, 1, 6, 20])
@pytest.mark.parametrize('rank', [0, 1])
def test_a_saved_map_that_writes_an_element_twice_or_outside_its_shard_is_refused(rank, dest_offset):
    # Rank 0 packs two pieces, rank 1 three.
    entry = placement_map('out of order').to_dict()
    entry['ranks'][rank]['pieces'][0]['dest'][0] = dest_offset
    with pytest.raises(affine.AffineMapError, match=f'rank {rank}'):
        autoep_metadata_to_affine_map({'affine_map': entry}, SHAPES[0])


def test_the_readers_take_only_the_format_version_that_affine_has():
    layer = {'expert_key_prefix': 'experts', 'num_experts': 6, 'num_local_experts': 2, 'ep_size': 3}
    maps = {f'experts.{weight}': placement_map('uniform').to_dict() for weight in ('w1', 'w2', 'w3')}
    layer['affine_maps'] = {'version': affine.AFFINE_MAP_FORMAT_VERSION, 'params': maps}
    assert get_autoep_zero12_expert_param_info([layer])['experts.w2']['affine_map'] == maps['experts.w2']
    assert autoep_metadata_to_affine_map(layer, SHAPES[0], 'experts.w2') == placement_map('uniform')
    layer['affine_maps']['version'] += 1
    with pytest.raises(RuntimeError, match='format version 2'):
        get_autoep_zero12_expert_param_info([layer])
    with pytest.raises(ValueError, match='format version 2'):
        autoep_metadata_to_affine_map(layer, SHAPES[0], 'experts.w2')


class MoEBlock(nn.Module):
    """A gate and one module per expert, each weight labelled over all experts."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList()
        for expert in range(NUM_EXPERTS):
            module = nn.Module()
            for name, full in expert_weights().items():
                linear = nn.Linear(*reversed(full.shape[1:]), bias=False)
                linear.weight.data = full[expert].clone()
                setattr(module, name, linear)
            self.experts.append(module)


def expert_weights():
    gate, down = labelled((NUM_EXPERTS, 5, 4)), labelled((NUM_EXPERTS, 4, 5))
    return {'w1': gate, 'w2': down, 'w3': -gate}


def autoep_layer(ep_size, ep_rank):
    spec = MoELayerSpec(moe_module_name='moe',
                        model_family='mixtral',
                        router_name='gate',
                        experts_name='experts',
                        expert_storage='module_list',
                        expert_w1_name='w1',
                        expert_w2_name='w2',
                        expert_w3_name='w3',
                        num_experts=NUM_EXPERTS,
                        top_k=2,
                        hidden_size=4,
                        ffn_hidden_size=5,
                        score_func='softmax',
                        score_apply='post',
                        route_norm=True,
                        gate_bias=False,
                        return_router_logits=False,
                        router_logits_capture_target='none',
                        router_logits_capture_index=None,
                        router_logits_capture_layer_name=None,
                        has_shared_experts=False,
                        shared_experts_name='')
    return AutoEPMoELayer(spec, MoEBlock(), ep_size, ep_rank, AutoEPConfig())


@pytest.mark.parametrize('ep_size', [1, 2, 3, 6])
def test_an_autoep_layer_publishes_the_map_of_the_experts_that_it_keeps(ep_size):
    layers = [autoep_layer(ep_size, ep_rank) for ep_rank in range(ep_size)]
    for name, full in expert_weights().items():
        params = [getattr(layer.experts, name) for layer in layers]
        maps = [ParamAffineMap.from_dict(getattr(param, DS_AUTOEP_UC_META)['affine_map']) for param in params]
        assert_sound(maps[0])
        assert maps == maps[:1] * ep_size
        for ep_rank, param in enumerate(params):
            assert torch.equal(maps[0].extract(full, ep_rank), param.data)
        assert torch.equal(maps[0].rebuild({rank: param.data for rank, param in enumerate(params)}), full)


@pytest.mark.parametrize('ep_size, ep_rank', [(1, 0), (3, 1), (6, 5)])
def test_an_autoep_layer_restores_its_experts_from_the_universal_tensor(ep_size, ep_rank):
    layer = autoep_layer(ep_size, ep_rank)
    for name, full in expert_weights().items():
        param = getattr(layer.experts, name)
        assert torch.equal(_resolve_autoep_partition(param, {EP_NUM_EXPERTS: NUM_EXPERTS}, full, ep_rank), param.data)


def test_the_engine_saves_maps_with_the_version_that_affine_has():
    saved = {}
    engine = mock.MagicMock(module=nn.ModuleDict({'moe': autoep_layer(3, 1)}), _autoep_folding_spec=None)
    engine.zero_optimization_partition_weights.return_value = False
    engine._get_ckpt_name.return_value = 'model'
    engine._get_expert_ckpt_name.side_effect = lambda folder, layer, expert, *args, **kwargs: f'expert {expert}'
    engine._common_checkpoint_state.return_value = {}
    engine.checkpoint_engine.preserves_storage_sharing.return_value = False
    engine.checkpoint_engine.save.side_effect = lambda state, path: saved.update({path: state})
    groups = mock.MagicMock()
    groups._get_expert_parallel_rank.return_value = 1
    groups._get_expert_data_parallel_rank.return_value = groups._get_data_parallel_rank.return_value = 0
    with mock.patch('deepspeed.runtime.engine.groups', groups):
        DeepSpeedEngine._save_moe_checkpoint(engine, 'folder', 'tag')
    layers = saved['model']['ds_autoep_layers']
    assert layers[0]['affine_maps']['version'] == affine.AFFINE_MAP_FORMAT_VERSION
    info = get_autoep_zero12_expert_param_info(layers)
    for name, full in expert_weights().items():
        map_ = autoep_metadata_to_affine_map(info[f'moe.experts.{name}'], full.shape)
        held = [saved[f'expert {expert}'][f'moe.experts.{name}.{expert}'] for expert in (2, 3)]
        assert torch.equal(map_.extract(full, 1), torch.stack(held))


STATES = ('fp32', 'exp_avg', 'exp_avg_sq')


def write_states(folder, name):
    """Each EP rank's experts, cut for its two data-parallel ranks, where the converter looks for them."""
    full, placement = labelled(SHAPES[0]), PLACEMENTS[name]
    fragments = folder / 'w1' / '0'
    fragments.mkdir(parents=True)
    for index, state in enumerate(STATES):
        for ep_rank, experts in enumerate(placement):
            for part, fragment in enumerate((full[experts] + 100 * index).reshape(-1).chunk(2)):
                if fragment.numel():
                    torch.save(fragment.clone(), fragments / f'{state}.{ep_rank + part * len(placement):02d}')
    torch.save(torch.tensor(7.), fragments / 'step.00')
    return full


def consolidate(folder, name, **kwargs):
    """Run upstream's ZeRO-1/2 consolidation of one expert parameter; returns state -> universal tensor."""
    info = {
        'ep_size': len(PLACEMENTS[name]),
        'num_experts': NUM_EXPERTS,
        'num_local_experts': len(PLACEMENTS[name][0]),
        'expert_placement': descriptor(name),
        'affine_map': placement_map(name).to_dict()
    }
    dp_degree = 2 * info['ep_size']
    consolidate_autoep_zero12_expert_states(str(folder), str(folder / 'out'), {'w1': info},
                                            {'w1': (info['num_local_experts'], ) + SHAPES[0][1:]}, dp_degree, 1, False,
                                            **kwargs)
    return {state: torch.load(folder / 'out' / 'zero' / 'w1' / f'{state}.pt')['param'] for state in STATES}


@each_placement
def test_zero_fragments_of_experts_consolidate_to_the_full_parameter(tmp_path, name):
    full = write_states(tmp_path, name)
    for index, (state, tensor) in enumerate(consolidate(tmp_path, name).items()):
        assert torch.equal(tensor, full + 100 * index), state


@each_placement
def test_a_missing_master_fragment_is_cut_from_the_fallback_tensor(tmp_path, name):
    full = write_states(tmp_path, name)
    (tmp_path / 'w1' / '0' / 'fp32.00').unlink()
    fallback = tmp_path / 'fallback' / 'w1' / 'fp32.pt'
    fallback.parent.mkdir(parents=True)
    torch.save({'param': full.clone()}, fallback)
    assert torch.equal(consolidate(tmp_path, name, fp32_fallback_dir=str(tmp_path / 'fallback'))['fp32'], full)


@each_placement
def test_zero3_rank_tensors_rebuild_where_only_ranks_without_experts_are_missing(name):
    full = labelled(SHAPES[0])
    ranks = {rank: full[experts] for rank, experts in enumerate(PLACEMENTS[name]) if experts}
    for layout in (placement_map(name), descriptor(name)):
        assert torch.equal(_rebuild_zero3_autoep_rank_tensors(ranks, layout, SHAPES[0], 'w1'), full)
    ranks.popitem()
    with pytest.raises(RuntimeError, match='Incomplete'):
        _rebuild_zero3_autoep_rank_tensors(ranks, placement_map(name), SHAPES[0], 'w1')


@pytest.mark.parametrize('name', ['some experts on two ranks', 'every expert on both ranks'])
def test_replicas_of_an_expert_that_differ_in_one_element_are_refused(name):
    full = labelled(SHAPES[0])
    ranks = {rank: full[experts].clone() for rank, experts in enumerate(PLACEMENTS[name])}
    ranks[0][PLACEMENTS[name][0].index(2), 1, 1] += 1
    with pytest.raises(RuntimeError, match='Failed to rebuild'):
        _rebuild_zero3_autoep_rank_tensors(ranks, placement_map(name), SHAPES[0], 'w1')
