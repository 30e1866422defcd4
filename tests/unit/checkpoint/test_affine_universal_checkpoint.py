# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Universal checkpoints on affine maps: upstream's converter merges AutoTP shards, its restore cuts them again."""

import functools
import json
import pickle

import pytest
import torch
from torch import nn

from deepspeed.checkpoint import affine
from deepspeed.checkpoint.affine import contiguous_split_map, replicated_map
from deepspeed.checkpoint.constants import AFFINE_MAP, DS_AUTOTP_UC_META
from deepspeed.checkpoint.ds_to_universal import dump_param_fragment, merge_tp_slices
from deepspeed.checkpoint.universal_checkpoint import _resolve_autotp_partition
from deepspeed.module_inject.layers import collect_autotp_universal_checkpoint_info
from unit.checkpoint.affine_cases import labels
from unit.checkpoint.autotp_cases import LAYER_CASES, Group, label, published_map, stand_in_groups

STATES = ('fp32', 'exp_avg', 'exp_avg_sq')
# Attribute of the model -> layer case.
LAYERS = {
    'embed': 'vocabulary embedding',
    'qkv': 'fused glm',
    'multi_query': 'fused bigcode',
    'shared_qk': 'yuan column',
    'attn_out': 'row, 5 heads',
    'few_heads': 'column, 2 heads',
    'gate_up': 'gate and up',
    'experts_view': 'sub-parameters in a 3-d view',
    'head': 'row, output head'
}
# Upstream's categories have no word for these: only their maps tell how to merge them.
WITHOUT_CATEGORY = ('multi_query', 'shared_qk')


class Model(nn.Module):
    """What one rank holds: its layers, and a norm that AutoTP leaves whole."""

    def __init__(self, group):
        super().__init__()
        self.norm = label(nn.LayerNorm(6))
        for name, case_name in LAYERS.items():
            case = LAYER_CASES[case_name]
            setattr(self, name, case.module() if group is None else case.wrap(case.module(), group))


@functools.lru_cache(maxsize=None)
def models(degree):
    with stand_in_groups():
        return [Model(Group(degree, rank)) for rank in range(degree)]


@functools.lru_cache(maxsize=None)
def originals():
    return {name: param.data for name, param in Model(None).named_parameters()}


def checkpoint_info(degree):
    return collect_autotp_universal_checkpoint_info(models(degree)[0])


def through_json(info):
    maps = json.loads(json.dumps(info[AFFINE_MAP]))
    return {**info, AFFINE_MAP: maps}


def write_fragments(folder, name, shards, dp_degree=2):
    """Each rank's shard, cut for its data-parallel ranks as ZeRO cuts it; states differ by a constant."""
    for tp_rank, shard in enumerate(shards):
        part = -(-shard.numel() // dp_degree)
        for dp_rank in range(dp_degree if shard.numel() else 0):
            for index, state in enumerate(STATES):
                values = shard.reshape(-1) + 1000 * index
                start = min(dp_rank * part, shard.numel())
                numel = min(part, shard.numel() - start)
                dump_param_fragment(str(folder), tp_rank, dp_rank, state, values, name, start, numel)
            dump_param_fragment(str(folder), tp_rank, dp_rank, 'step', torch.tensor(3.), name, 0, 0)


def merge(folder, info, name, shards):
    """Run upstream's converter for one parameter; returns state -> universal tensor."""
    merge_tp_slices(info, str(folder / 'universal'), str(folder / 'slices'), len(shards),
                    (name, [tuple(shard.shape) for shard in shards]))
    return {
        path.stem: torch.load(path, weights_only=False)['param']
        for path in (folder / 'universal' / name).glob('*.pt') if path.stem in STATES
    }


def shards_of(name, degree):
    return [model.get_parameter(name).data.cpu() for model in models(degree)]


PARAMETERS = list(originals())


@pytest.mark.parametrize('transport', [lambda info: pickle.loads(pickle.dumps(info)), through_json],
                         ids=['pickle', 'json'])
@pytest.mark.parametrize('degree', [1, 2, 3, 4])
def test_the_converter_merges_every_parameter_of_a_model(tmp_path, degree, transport):
    info = transport(checkpoint_info(degree))
    for name, full in originals().items():
        shards = shards_of(name, degree)
        write_fragments(tmp_path / 'slices', name, shards)
        merged = merge(tmp_path, info, name, shards)
        assert set(merged) == set(STATES)
        for index, state in enumerate(STATES):
            assert torch.equal(merged[state].reshape(full.shape), full + 1000 * index), (name, state)


@pytest.mark.parametrize('name', [name for name in PARAMETERS if not name.startswith(WITHOUT_CATEGORY)])
def test_the_map_merges_what_upstreams_categories_merge(tmp_path, name):
    info, shards = checkpoint_info(3), shards_of(name, 3)
    without_maps = {key: value for key, value in info.items() if key != AFFINE_MAP}
    write_fragments(tmp_path / 'slices', name, shards)
    by_map = merge(tmp_path, info, name, shards)
    by_category = merge(tmp_path, without_maps, name, shards)
    for state in STATES:
        assert torch.equal(by_map[state], by_category[state].reshape(by_map[state].shape))


def test_a_model_publishes_a_map_for_every_parameter():
    assert len(checkpoint_info(3)[AFFINE_MAP]['params']) == len(PARAMETERS)


@pytest.mark.parametrize('degree', [1, 2, 3, 4])
@pytest.mark.parametrize('name', [name for name in PARAMETERS if not name.startswith('norm')])
def test_a_rank_restores_its_shard_of_every_state_from_the_universal_tensor(name, degree):
    for tp_rank, model in enumerate(models(degree)):
        param = model.get_parameter(name)
        for index, state in enumerate(STATES):
            full = originals()[name] + 1000 * index
            restored = _resolve_autotp_partition(param, {}, full, tp_rank, degree, state_key=state)
            assert torch.equal(restored, (param.data.cpu() + 1000 * index).reshape(-1)), (tp_rank, state)


@pytest.mark.parametrize('name', ['qkv.weight', 'multi_query.weight', 'attn_out.weight'])
def test_a_rank_restores_from_a_flat_view_into_a_larger_buffer(name):
    # ZeRO-3's loader passes the universal tensor flattened, and any caller may pass a view.
    full = originals()[name]
    buffer = torch.cat([torch.full((5, ), -1.), full.reshape(-1), torch.full((3, ), -2.)])
    for tp_rank, model in enumerate(models(3)):
        param = model.get_parameter(name)
        restored = _resolve_autotp_partition(param, {}, buffer[5:5 + full.numel()], tp_rank, 3)
        assert torch.equal(restored, param.data.cpu().reshape(-1))


@pytest.mark.parametrize('name', ['qkv.weight', 'multi_query.weight', 'attn_out.weight'])
def test_shards_that_are_views_of_one_buffer_rebuild(name):
    # As torch.split and ZeRO's flat buffers give them: a storage offset, and for columns no contiguous memory.
    map_, shards = published_map(models(3)[0].get_parameter(name)), shards_of(name, 3)
    flat = torch.cat([torch.full((7, ), -1.)] + [shard.reshape(-1) for shard in shards])
    views, start = {}, 7
    for tp_rank, shard in enumerate(shards):
        views[tp_rank] = flat[start:start + shard.numel()].view(shard.shape)
        start += shard.numel()
    assert torch.equal(map_.rebuild(views).reshape(originals()[name].shape), originals()[name])
    transposed = {tp_rank: shard.t().contiguous().t() for tp_rank, shard in enumerate(shards)}
    assert torch.equal(map_.rebuild(transposed).reshape(originals()[name].shape), originals()[name])


def test_shards_on_the_meta_device_rebuild_to_a_parameter_there():
    map_ = published_map(models(3)[0].get_parameter('qkv.weight'))
    rebuilt = map_.rebuild({rank: torch.empty(shape, device='meta') for rank, shape in map_.shard_shapes.items()})
    assert rebuilt.is_meta and tuple(rebuilt.shape) == map_.logical_shape
    assert map_.extract(rebuilt, 1).is_meta


@pytest.mark.parametrize('name', ['norm.weight', 'attn_out.bias', 'multi_query.weight'])
def test_a_replica_that_drifted_on_one_rank_stops_the_converter(tmp_path, name):
    shards = shards_of(name, 3)
    shards[2] = shards[2].clone()
    shards[2].reshape(-1)[-1] += 1
    write_fragments(tmp_path / 'slices', name, shards)
    with pytest.raises(ValueError, match='differ'):
        merge(tmp_path, checkpoint_info(3), name, shards)


def test_the_converter_refuses_a_newer_format_version_than_affine_has(tmp_path):
    info = checkpoint_info(2)
    assert info[AFFINE_MAP]['version'] == affine.AFFINE_MAP_FORMAT_VERSION == 1
    info[AFFINE_MAP]['version'] += 1
    with pytest.raises(RuntimeError, match='format version 2.*up to 1'):
        merge(tmp_path, info, 'norm.weight', shards_of('norm.weight', 2))


def scaled_bias(degree):
    """A row-parallel bias that every rank holds divided by the degree: (converter info, full bias, shards)."""
    full = torch.from_numpy(labels((6, ))).float()
    map_ = replicated_map((6, ), degree, scale=1 / degree)
    info = {AFFINE_MAP: {'version': 1, 'params': {'^row.bias$': map_.to_dict()}}}
    return info, full, [full / degree] * degree


@pytest.mark.parametrize('degree', [2, 3, 4])
def test_the_converter_merges_the_master_of_a_scaled_bias_and_refuses_its_moments(tmp_path, degree):
    info, full, shards = scaled_bias(degree)
    write_fragments(tmp_path / 'slices', 'row.bias', shards)
    with pytest.raises(NotImplementedError, match='scale'):
        merge(tmp_path, through_json(info), 'row.bias', shards)
    written = tmp_path / 'universal' / 'row.bias'
    torch.testing.assert_close(torch.load(written / 'fp32.pt', weights_only=False)['param'], full)
    assert not (written / 'exp_avg.pt').exists()


def bias_parameter(map_):
    param = nn.Parameter(torch.empty(map_.shard_shapes[0]))
    setattr(param, DS_AUTOTP_UC_META, {'conversion': {AFFINE_MAP: json.loads(json.dumps(map_.to_dict()))}})
    return param


@pytest.mark.parametrize('degree', [1, 2, 3, 4])
def test_a_scaled_bias_is_restored_for_the_master_and_refused_for_moments(degree):
    _, full, shards = scaled_bias(degree)
    param = bias_parameter(replicated_map((6, ), degree, scale=1 / degree))
    for tp_rank in range(degree):
        torch.testing.assert_close(_resolve_autotp_partition(param, {}, full, tp_rank, degree), shards[tp_rank])
    for state in ('exp_avg', 'exp_avg_sq'):
        if degree == 1:
            assert torch.equal(_resolve_autotp_partition(param, {}, full, 0, 1, state_key=state), full)
        else:
            with pytest.raises(NotImplementedError, match='scale'):
                _resolve_autotp_partition(param, {}, full, 0, degree, state_key=state)


def test_integers_are_not_cut_under_a_scale_that_would_truncate_them():
    with pytest.raises(RuntimeError):
        replicated_map((3, ), 2, scale=0.5).extract(torch.tensor([1, 2, 3]), 0)


def test_the_scale_of_each_state_is_its_power():
    assert affine.SCALE_POWER_BY_STATE == {'fp32': 1, 'exp_avg': -1, 'exp_avg_sq': -2}


def test_a_map_of_another_size_is_left_for_the_recorded_partition_sizes():
    param = bias_parameter(contiguous_split_map((8, ), [4, 4], 0))
    getattr(param, DS_AUTOTP_UC_META).update(partition_dim=0, logical_shape=(6, ), partition_sizes=(4, 2))
    full = torch.arange(6.)
    assert _resolve_autotp_partition(param, {}, full, 1, 2).tolist() == [4, 5]
