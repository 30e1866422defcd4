# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""dtensor_map against the local tensors of real DTensors on gloo ranks."""

import itertools
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from deepspeed.checkpoint.affine import AffineMapError
from deepspeed.checkpoint.affine_dtensor import dtensor_map
from unit.ranks import run_ranks

SHAPES = [(5, ), (8, 3), (3, 7), (1, 2), (6, 5, 3), (0, 4), ()]


def numbered(shape):
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


def assert_map_is_layout(map_, full, local, rank):
    assert map_.shard_shapes[rank] == tuple(local.shape)
    assert torch.equal(map_.extract(full, rank), local)
    map_.validate_coverage()


def compare_layouts(rank, mesh_shape):
    mesh = init_device_mesh('cpu', mesh_shape)
    compared = 0
    for shape in SHAPES:
        options = [Replicate()] + [Shard(dim) for dim in range(len(shape))]
        for placements in itertools.product(options, repeat=len(mesh_shape)):
            full = numbered(shape)
            local = distribute_tensor(full, mesh, placements).to_local()
            map_ = dtensor_map(shape, mesh, placements)
            assert sorted(map_.shard_shapes) == list(range(math.prod(mesh_shape)))
            assert_map_is_layout(map_, full, local, rank)
            compared += 1
    return compared


@pytest.mark.parametrize('mesh_shape', [(3, ), (2, 2)])
def test_maps_are_the_local_tensors_of_distributed_ones(mesh_shape):
    counts = run_ranks(compare_layouts, math.prod(mesh_shape), mesh_shape)
    assert set(counts) == {sum((len(shape) + 1)**len(mesh_shape) for shape in SHAPES)}


def compare_strided(rank):
    mesh = init_device_mesh('cpu', (4, ))
    for shape, dim, split_factor in itertools.product([(5, ), (13, 3), (3, 10), (1, 2)], (0, 1), (2, 3, 5)):
        if dim < len(shape):
            placement = _StridedShard(dim, split_factor=split_factor)
            shards, _ = placement._split_tensor(numbered(shape), 4, with_padding=False, contiguous=True)
            assert_map_is_layout(dtensor_map(shape, mesh, [placement]), numbered(shape), shards[rank], rank)


def test_strided_shards_follow_torch_on_sizes_that_do_not_divide():
    run_ranks(compare_strided, 4)


def compare_fsdp_over_tp(rank, out_features):
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))
    module = torch.nn.Linear(3, out_features, bias=False)
    full = numbered((out_features, 3))
    with torch.no_grad():
        module.weight.copy_(full)
    parallelize_module(module, mesh['tp'], ColwiseParallel())
    fully_shard(module, mesh=mesh['dp'])
    weight = module.weight
    map_ = dtensor_map(weight.shape, weight.device_mesh, weight.placements)
    assert_map_is_layout(map_, full, weight.to_local(), rank)
    return [type(placement).__name__ for placement in weight.placements]


def test_fsdp2_over_tensor_parallelism_is_read_as_it_lies():
    assert run_ranks(compare_fsdp_over_tp, 4, 8)[0] == ['_StridedShard', 'Shard']


def refusals(rank):
    mesh = init_device_mesh('cpu', (1, ))
    with pytest.raises(AffineMapError, match='Partial'):
        dtensor_map((4, ), mesh, [Partial()])
    with pytest.raises(AffineMapError, match='got 2 for a mesh of 1'):
        dtensor_map((4, ), mesh, [Replicate(), Replicate()])
    with pytest.raises(AffineMapError, match=r'placements\[0\].*shape \(4,\)'):
        dtensor_map((4, ), mesh, [Shard(1)])
    split = dtensor_map((5, ), _mesh_of_two(), [_StridedShard(0, split_factor=2)])
    assert [split.extract(numbered((5, )), rank).tolist() for rank in (0, 1)] == [[0., 1., 3.], [2., 4.]]


def _mesh_of_two():
    # A mesh this process has no part in: the map reads its numbers only.
    return torch.distributed.device_mesh.DeviceMesh('cpu', [0, 1], _init_backend=False, _rank=0)


def test_layouts_without_a_map_are_refused_and_the_documented_example_holds():
    run_ranks(refusals, 1)
