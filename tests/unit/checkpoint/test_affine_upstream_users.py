# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""AutoTP layers: the affine map that a layer publishes is what its own partition does to every element."""

import json

import pytest
import torch
from torch import nn

from deepspeed.checkpoint.affine import (ParamAffineMap, contiguous_split_map, flat_range_map, nest_affine_maps,
                                         replicated_map)
from deepspeed.checkpoint.affine_transfer import plan_transfer
from deepspeed.module_inject.fusedqkv_utils import prepare_tp_fused_qkvw, shard_value_with_share_qk
from deepspeed.module_inject.layers import (Conv_LinearALlreduce, TensorParallelIcShardConv2d,
                                            TensorParallelOcShardConv2d, Yuan_LinearLayer, conv_LinearLayer)
from deepspeed.module_inject.tp_shard import AutoTPMeta
from unit.checkpoint.affine_cases import assert_sound, run_plan, shard_labels
from unit.checkpoint.autotp_cases import (LAYER_CASES, Group, fused_case, label, layer_case, linear, published,
                                          published_map, stand_in_groups)

CASES_AND_DEGREES = [(name, degree) for name, case in LAYER_CASES.items() for degree in case.degrees]
each_layer = pytest.mark.parametrize('name, degree', CASES_AND_DEGREES)


def flat(tensor):
    return tensor.reshape(-1).tolist()


@each_layer
def test_every_rank_publishes_the_same_map(name, degree):
    for param in published(name, degree).values():
        assert sorted(param.maps[0].shard_shapes) == list(range(degree))
        assert all(map_ == param.maps[0] for map_ in param.maps.values())


@each_layer
def test_the_map_extracts_the_shard_that_the_layer_cut(name, degree):
    for param in published(name, degree).values():
        for rank, shard in param.shards.items():
            cut = param.maps[0].extract(param.full, rank)
            assert tuple(cut.shape) == param.maps[0].shard_shapes[rank]
            assert flat(cut) == flat(shard)


@each_layer
def test_the_map_rebuilds_the_parameter_from_the_layers_shards(name, degree):
    for param in published(name, degree).values():
        rebuilt = param.maps[0].rebuild(param.shards)
        assert tuple(rebuilt.shape) == param.maps[0].logical_shape
        assert torch.equal(rebuilt.reshape(param.full.shape), param.full)


@each_layer
def test_the_map_covers_the_parameter_and_names_the_holders_of_every_element(name, degree):
    for param in published(name, degree).values():
        assert_sound(param.maps[0])


@pytest.mark.parametrize('name', LAYER_CASES)
def test_a_plan_between_two_degrees_takes_shards_to_shards(name):
    for source_degree in LAYER_CASES[name].degrees:
        for target_degree in LAYER_CASES[name].degrees:
            for param, source in published(name, source_degree).items():
                target = published(name, target_degree)[param]
                source_map, target_map = source.maps[0], target.maps[0]
                for rank, shard in source.shards.items():
                    assert shard_labels(source_map, rank).tolist() == flat(shard)
                written = run_plan(plan_transfer(target_map, source_map), source_map, target_map)
                assert {
                    rank: held.tolist()
                    for rank, held in written.items()
                } == {
                    rank: flat(shard)
                    for rank, shard in target.shards.items()
                }


@each_layer
def test_a_map_nested_with_zero_partitions_holds_slices_of_the_layers_shards(name, degree):
    for param in published(name, degree).values():
        inner, stored = {}, {}
        for rank, shard in param.shards.items():
            half = -(-shard.numel() // 2)
            first, second = 2 * rank, 2 * rank + 1
            inner[rank] = flat_range_map((shard.numel(), ), {first: (0, half), second: (half, shard.numel() - half)})
            stored[first], stored[second] = shard.reshape(-1)[:half], shard.reshape(-1)[half:]
        nested = nest_affine_maps(param.maps[0], inner)
        for location, held in stored.items():
            assert flat(nested.extract(param.full, location)) == flat(held)
        assert torch.equal(nested.rebuild(stored).reshape(param.full.shape), param.full)


@each_layer
def test_a_published_map_passes_through_json_unchanged(name, degree):
    for param in published(name, degree).values():
        assert ParamAffineMap.from_dict(json.loads(json.dumps(param.maps[0].to_dict()))) == param.maps[0]


@pytest.mark.parametrize('name', [name for name, case in LAYER_CASES.items() if 1 in case.degrees])
def test_a_layer_without_a_group_publishes_the_whole_parameter(name):
    case = LAYER_CASES[name]
    layer = case.wrap(case.module(), None)
    for param_name, param in case.module().named_parameters():
        map_ = published_map(getattr(layer, param_name))
        assert map_ == published(name, 1)[param_name].maps[0]
        assert flat(map_.extract(param.data, 0)) == flat(param.data)


FUSED = [(name, degree) for name, degree in CASES_AND_DEGREES if name.startswith('fused')]


@pytest.mark.parametrize('name, degree', FUSED)
def test_fused_maps_cut_as_the_function_that_takes_an_explicit_rank(name, degree):
    layer = LAYER_CASES[name].wrap(LAYER_CASES[name].module(), None)
    weight = published(name, degree)['weight']
    for rank in range(degree):
        cut = prepare_tp_fused_qkvw(layer.fused_module.module, weight.full, degree, rank, layer.tp_meta)
        assert flat(weight.maps[0].extract(weight.full, rank)) == flat(cut)


@pytest.mark.parametrize('degree', [1, 2, 3, 4])
@pytest.mark.parametrize('name, by_value', [('yuan column', True), ('yuan row', False)])
def test_yuan_maps_cut_as_the_function_that_takes_an_explicit_rank(name, by_value, degree):
    weight = published(name, degree)['weight']
    for rank in range(degree):
        cut, _ = shard_value_with_share_qk(weight.full, None, rank, degree, by_value, AutoTPMeta(num_kv_heads=24))
        assert torch.equal(weight.maps[0].extract(weight.full, rank), cut.data)


@pytest.mark.parametrize('degree, case', [
    (1, fused_case('CodeGenBlock', 144, 2, bias=False, heads=48)),
    (2, layer_case(Yuan_LinearLayer, lambda: linear(24, 3), heads=6)),
])
def test_a_layout_that_upstream_cannot_describe_has_no_map(degree, case):
    with stand_in_groups():
        layer = case.wrap(case.module(), Group(degree, 0))
    assert published_map(layer.weight) is None


@pytest.mark.parametrize('layer_class', [conv_LinearLayer, Conv_LinearALlreduce])
def test_the_map_of_a_conv1d_layer_is_not_its_layout(layer_class):
    # Upstream 0.19.8 publishes what a Linear of the same shape would hold. Whoever uses published maps must refuse
    # these classes, and Conv_LinearALlreduce by name: its shard has the shape that the map says.
    original = linear(8, 8, bias=False)
    with stand_in_groups():
        layer = layer_class(linear(8, 8, bias=False), Group(2, 0), tp_meta=AutoTPMeta())
    map_ = published_map(layer.weight)
    assert flat(map_.extract(original.weight.data, 0)) != flat(layer.weight.data)
    assert (map_.shard_shapes[0] == tuple(layer.weight.shape)) == (layer_class is Conv_LinearALlreduce)


def conv2d_shards(layer_class, degree):
    convs = [layer_class(label(nn.Conv2d(7, 10, 3)), rank, degree).conv for rank in range(degree)]
    return [{rank: getattr(conv, name).data for rank, conv in enumerate(convs)} for name in ('weight', 'bias')]


def late_remainder(size, degree):
    """Sizes of a near even split whose last ranks take one more, as upstream cuts convolutions."""
    return [(size + rank) // degree for rank in range(degree)]


@pytest.mark.parametrize('degree', [1, 2, 3, 4])
def test_a_contiguous_split_describes_the_output_channels_of_a_convolution(degree):
    full = label(nn.Conv2d(7, 10, 3))
    weights, biases = conv2d_shards(TensorParallelOcShardConv2d, degree)
    sizes = late_remainder(10, degree)
    for param, shards in ((full.weight.data, weights), (full.bias.data, biases)):
        map_ = contiguous_split_map(param.shape, sizes, 0)
        for rank, shard in shards.items():
            assert torch.equal(map_.extract(param, rank), shard)
        assert torch.equal(map_.rebuild(shards), param)


@pytest.mark.parametrize('degree', [1, 2, 3, 4])
def test_a_scaled_replica_describes_the_bias_that_a_row_parallel_convolution_divides(degree):
    full = label(nn.Conv2d(7, 10, 3))
    weights, biases = conv2d_shards(TensorParallelIcShardConv2d, degree)
    weight_map = contiguous_split_map(full.weight.shape, late_remainder(7, degree), 1)
    bias_map = replicated_map((10, ), degree, scale=1 / degree)
    for rank in range(degree):
        assert torch.equal(weight_map.extract(full.weight.data, rank), weights[rank])
        torch.testing.assert_close(bias_map.extract(full.bias.data, rank), biases[rank])
    assert torch.equal(weight_map.rebuild(weights), full.weight.data)
    torch.testing.assert_close(bias_map.rebuild(biases), full.bias.data)
