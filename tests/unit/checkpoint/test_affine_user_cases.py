# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Faults that users of resharding met in public, with the values that are right.

What concerns geometry: padding, packed and interleaved weights, empty and strided shards, owners. NaN marks what no
element of the parameter may touch.
"""

import json

import numpy as np
import pytest
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from deepspeed.checkpoint.affine import (AffinePiece, HolderError, ParamAffineMap, ShardSizeError,
                                         contiguous_split_map, flat_range_map, replicated_map)
from deepspeed.checkpoint.affine_dtensor import NESTED_CHUNK, UNFLATTEN_THEN_PAD, dtensor_map
from deepspeed.checkpoint.affine_layouts import (column_block_map, interleaved_map, packed_map, padded_split_map,
                                                 transposed_map)
from deepspeed.checkpoint.affine_transfer import InvalidMapError, SpreadReplicas, plan_model, plan_transfer
from unit.checkpoint.affine_cases import labels, run_plan, shard_labels, strided

PAD = float('nan')


def held(map_):
    return {rank: shard_labels(map_, rank).tolist() for rank in map_.shard_shapes}


def mesh_of(ranks):
    # A mesh this process has no part in: the map reads its numbers only.
    return DeviceMesh('cpu', ranks, _init_backend=False, _rank=0)


# ZeRO's layouts as flat buffers: for each parameter, location -> (first element, elements, place in its buffer).


def zero3_ranges(sizes, world):
    """Each parameter padded to a multiple of the world's size; partitions of all parameters one after another."""
    ranges, place = {}, 0
    for name, size in sizes.items():
        part = -(-size // world)
        ranges[name] = {
            rank: (min(rank * part, size), max(0, min(part, size - rank * part)), place)
            for rank in range(world)
        }
        place += part
    return ranges, [place] * world


def zero12_ranges(sizes, world):
    """All parameters in one buffer, padded at its end to a multiple of 2 * world, cut into equal parts."""
    total = sum(sizes.values())
    part = -(-total // (2 * world)) * 2
    ranges, start = {}, 0
    for name, size in sizes.items():
        ranges[name] = {}
        for rank in range(world):
            first, last = max(start, rank * part), min(start + size, (rank + 1) * part)
            ranges[name][rank] = (max(first - start, 0), max(0, last - first), max(first - rank * part, 0))
        start += size
    return ranges, [part] * world


def storage_maps(ranges, shapes):
    return {
        name: flat_range_map(shapes[name], {
            rank: (start, numel)
            for rank, (start, numel, _) in by_rank.items() if numel
        })
        for name, by_rank in ranges.items()
    }


def filled_buffers(layout, values):
    ranges, lengths = layout
    buffers = [np.full(length, PAD) for length in lengths]
    for name, by_rank in ranges.items():
        for rank, (start, numel, place) in by_rank.items():
            buffers[rank][place:place + numel] = values[name][start:start + numel]
    return buffers


def reshard(source_layout, target_layout, shapes, values):
    """Move buffers of one layout into NaN buffers of another, through plans alone."""
    sources = filled_buffers(source_layout, values)
    targets = [np.full(length, PAD) for length in target_layout[1]]
    plans = plan_model(storage_maps(target_layout[0], shapes), storage_maps(source_layout[0], shapes))
    for name, plan in plans.items():
        for segment in plan.segments:
            source, target = segment.source_rank, segment.target_rank
            read_at = source_layout[0][name][source][2] + segment.source_offset
            write_at = target_layout[0][name][target][2] + segment.target_offset
            strided(targets[target], segment.shape, write_at,
                    segment.target_strides)[...] = strided(sources[source], segment.shape, read_at,
                                                           segment.source_strides)
    return targets


SHAPES = {'A': (3, 5), 'B': (7, )}
SIZES = {'A': 15, 'B': 7}
VALUES = {'A': np.arange(15.), 'B': np.arange(100., 107.)}


def run(first, last):
    return [float(value) for value in range(first, last + 1)]


Z3_ON_2 = [run(0, 7) + run(100, 103), run(8, 14) + [PAD] + run(104, 106) + [PAD]]
Z3_ON_3 = [run(0, 4) + run(100, 102), run(5, 9) + run(103, 105), run(10, 14) + [106., PAD, PAD]]
Z12_ON_2 = [run(0, 11), run(12, 14) + run(100, 106) + [PAD, PAD]]
Z12_ON_3 = [run(0, 7), run(8, 14) + [100.], run(101, 106) + [PAD, PAD]]


@pytest.mark.parametrize('source, before, target, after', [
    (zero3_ranges(SIZES, 2), Z3_ON_2, zero3_ranges(SIZES, 3), Z3_ON_3),
    (zero3_ranges(SIZES, 3), Z3_ON_3, zero3_ranges(SIZES, 2), Z3_ON_2),
    (zero12_ranges(SIZES, 2), Z12_ON_2, zero12_ranges(SIZES, 3), Z12_ON_3),
    (zero12_ranges(SIZES, 3), Z12_ON_3, zero12_ranges(SIZES, 2), Z12_ON_2),
    (zero12_ranges(SIZES, 2), Z12_ON_2, zero3_ranges(SIZES, 3), Z3_ON_3),
    (zero3_ranges(SIZES, 3), Z3_ON_3, zero12_ranges(SIZES, 2), Z12_ON_2),
])
def test_another_number_of_gpus_or_another_stage_gives_exact_buffers(source, before, target, after):
    # (Z3 on 3 pads B to 9 elements, so rank 2 ends in two pads.)
    np.testing.assert_equal([part.tolist() for part in filled_buffers(source, VALUES)], before)
    np.testing.assert_equal([part.tolist() for part in reshard(source, target, SHAPES, VALUES)], after)


def test_moments_are_rebuilt_by_parameter_and_never_by_slicing_concatenated_ranks():
    map_ = storage_maps(zero3_ranges(SIZES, 2)[0], SHAPES)['A']
    assert held(map_) == {0: list(range(8)), 1: list(range(8, 15))}


def test_the_padding_of_57_elements_on_2_ranks_stays_out_of_the_shards():
    ranges, lengths = zero12_ranges({'w': 57}, 2)
    assert lengths == [30, 30]
    map_ = storage_maps(ranges, {'w': (57, )})['w']
    assert map_.shard_shapes == {0: (30, ), 1: (27, )}


def test_ten_elements_go_from_2_to_4_ranks_of_which_one_holds_padding_only():
    sizes, shapes, values = {'w': 10}, {'w': (10, )}, {'w': np.arange(10.)}
    after = reshard(zero12_ranges(sizes, 2), zero12_ranges(sizes, 4), shapes, values)
    np.testing.assert_equal([part.tolist() for part in after],
                            [run(0, 3), run(4, 7), [8., 9., PAD, PAD], [PAD, PAD, PAD, PAD]])


def test_the_parameter_after_one_of_five_elements_starts_at_six_elements_of_the_two_partitions():
    ranges, _ = zero3_ranges({'first': 5, 'next': 4}, 2)
    assert [place for _, _, place in ranges['next'].values()] == [3, 3]
    assert held(storage_maps(ranges, {'first': (5, ), 'next': (4, )})['first']) == {0: [0, 1, 2], 1: [3, 4]}


def test_padding_inside_a_buffer_is_left_alone():
    # Two parameters aligned to 4 elements in one buffer of 12: slots 3 and 9 to 11 are nobody's.
    shapes, values = {'a': (3, ), 'b': (5, )}, {'a': run(0, 2), 'b': run(10, 14)}
    source = ({'a': {0: (0, 3, 0)}, 'b': {0: (0, 5, 4)}}, [12])
    target = ({'a': {0: (0, 3, 1)}, 'b': {0: (0, 5, 6)}}, [12])
    np.testing.assert_equal(
        reshard(source, target, shapes, values)[0].tolist(), [PAD, 0., 1., 2., PAD, PAD, 10., 11., 12., 13., 14., PAD])


GATE_UP = (8, 1)


@pytest.mark.parametrize('tp_degree, rank, rows', [
    (1, 0, [0, 1, 2, 3, 4, 5, 6, 7]),
    (2, 0, [0, 1, 4, 5]),
    (2, 1, [2, 3, 6, 7]),
    (4, 1, [1, 5]),
])
def test_packed_gate_and_up_keep_their_order_at_any_tensor_parallel_size(tp_degree, rank, rows):
    assert held(packed_map(GATE_UP, [4, 4], tp_degree))[rank] == rows


def test_sixteen_chunks_saved_on_8_ranks_come_back_in_order_on_one():
    shape = (8192, 2)
    source, target = packed_map(shape, [4096, 4096], 8), packed_map(shape, [4096, 4096], 1)
    received = run_plan(plan_transfer(target, source), source, target)[0].reshape(shape)
    assert (received[::512, 0] // (2 * 512)).tolist() == list(range(16))


def test_an_interleaved_gate_and_up_alternates_by_index_and_transposes():
    # Rows g0 g1 u0 u1 of 3 hidden elements; the engine keeps columns g0 u0 g1 u1.
    straight, interleaved = replicated_map((4, 3), 1), interleaved_map((4, 3), 2)
    assert np.array(held(interleaved)[0]).reshape(4, 3)[:, 0].tolist() == [0, 6, 3, 9]
    target = transposed_map(interleaved)
    received = run_plan(plan_transfer(target, straight), straight, target)[0].reshape(3, 4)
    assert received.tolist() == [[0, 6, 3, 9], [1, 7, 4, 10], [2, 8, 5, 11]]


def test_components_that_do_not_add_up_are_refused():
    with pytest.raises(ShardSizeError, match=r'\[4, 3\] add up to 7.*has 8'):
        packed_map(GATE_UP, [4, 3], 2)
    with pytest.raises(ShardSizeError, match='3 equal components'):
        interleaved_map((8, 3), 3)


def test_vocabulary_padding_is_neither_counted_nor_exported():
    assert padded_split_map((151936, 1024), 151936, 2).shard_shapes[1] == (75968, 1024)
    source, target = padded_split_map((10, 1), 12, 4), padded_split_map((10, 1), 64, 2)
    assert held(source) == {0: [0, 1, 2], 1: [3, 4, 5], 2: [6, 7, 8], 3: [9]}
    received = run_plan(plan_transfer(target, source), source, target)
    assert {rank: rows.tolist() for rank, rows in received.items()} == {0: list(range(10)), 1: []}
    with pytest.raises(ShardSizeError, match='10 indices, more than the padded size 8'):
        padded_split_map((10, 1), 8, 2)
    with pytest.raises(ShardSizeError, match='does not divide'):
        padded_split_map((10, 1), 13, 2)


def test_expert_weights_reach_a_kernels_column_blocks():
    shape = (2, 3, 8)
    source, target = replicated_map(shape, 1), column_block_map(shape, 2)
    assert target.shard_shapes == {0: (2, 4, 3, 2)}
    received = run_plan(plan_transfer(target, source), source, target)[0].reshape(2, 4, 3, 2)
    assert np.array_equal(received, labels(shape).reshape(2, 3, 4, 2).swapaxes(1, 2))
    assert column_block_map((8, 512, 512), 128).shard_shapes == {0: (8, 4, 512, 128)}
    with pytest.raises(ShardSizeError, match='8 columns do not divide into blocks of 3'):
        column_block_map(shape, 3)


def test_a_transposed_shard_receives_the_logical_matrix():
    source, target = replicated_map((4, 4), 1), transposed_map(contiguous_split_map((4, 4), [4], 0))
    received = run_plan(plan_transfer(target, source), source, target)[0].reshape(4, 4)
    assert np.array_equal(received.T, labels((4, 4)))
    with pytest.raises(ShardSizeError, match='no two dimensions'):
        transposed_map(replicated_map((4, ), 1))


def test_a_shard_taken_for_the_whole_is_refused():
    # Two ranks hold 64 of 128 rows each; a planner that takes the first shard for the whole copies half.
    half = contiguous_split_map((128, 2), [64, 64], 0)
    alone = ParamAffineMap((128, 2), {0: (64, 2)}, {0: half.pieces_by_rank[0]})
    with pytest.raises(InvalidMapError, match='source: the pieces cover 128 of the 256'):
        plan_transfer(half, alone)


def test_empty_shards_have_no_elements_and_are_never_missing():
    sizes = [stop - start for start, stop in zip(range(0, 540, 18), range(18, 558, 18))]
    map_ = dtensor_map((512, ), mesh_of(list(range(30))), [Shard(0)])
    assert [map_.shard_shapes[rank][0] for rank in range(30)] == sizes[:28] + [8, 0]
    map_.validate_coverage()
    source = dtensor_map((6, ), mesh_of([0, 1, 2, 3]), [Shard(0)])
    assert [source.shard_shapes[rank] for rank in range(4)] == [(2, ), (2, ), (2, ), (0, )]
    target = dtensor_map((6, ), mesh_of([0, 1, 2]), [Shard(0)])
    plan = plan_transfer(target, source)
    assert {segment.source_rank for segment in plan.segments} == {0, 1, 2}
    assert held(target) == {0: [0, 1], 1: [2, 3], 2: [4, 5]}
    assert [rows.tolist() for rows in run_plan(plan, source, target).values()] == [[0, 1], [2, 3], [4, 5]]
    one_row = dtensor_map((1, 3), mesh_of([0, 1]), [Shard(0)])
    assert held(one_row) == {0: [0, 1, 2], 1: []}
    assert held(flat_range_map((2, ), {0: (0, 1), 1: (1, 1), 2: (2, 0)})) == {0: [0], 1: [1], 2: []}


def test_a_zero_size_parameter_between_others_has_no_piece_and_keeps_its_shape():
    ranges, lengths = zero12_ranges({'before': 8, 'empty': 0, 'after': 24}, 2)
    assert lengths == [16, 16]
    maps = storage_maps(ranges, {'before': (8, ), 'empty': (0, 8), 'after': (24, )})
    assert held(maps['before']) == {0: list(range(8))}
    assert held(maps['after']) == {0: list(range(8)), 1: list(range(8, 24))}
    assert maps['empty'].logical_shape == (0, 8) and held(maps['empty']) == {}
    assert plan_transfer(replicated_map((0, 8), 1), maps['empty']).segments == ()


def test_the_two_rules_of_strided_sharding_round_trip_and_do_not_mix():
    placements, mesh = [_StridedShard(0, split_factor=2)], mesh_of([0, 1])
    nested = dtensor_map((5, ), mesh, placements)
    padded = dtensor_map((5, ), mesh, placements, strided_rule=UNFLATTEN_THEN_PAD)
    assert held(nested) == {0: [0, 1, 3], 1: [2, 4]}
    assert held(padded) == {0: [0, 1, 3, 4], 1: [2]}
    whole = replicated_map((5, ), 1)
    for map_ in (nested, padded):
        assert run_plan(plan_transfer(whole, map_), map_, whole)[0].tolist() == [0, 1, 2, 3, 4]
        assert ParamAffineMap.from_dict(json.loads(json.dumps(map_.to_dict()))) == map_
    with pytest.raises(InvalidMapError, match=f'{NESTED_CHUNK}.*{UNFLATTEN_THEN_PAD}'):
        plan_transfer(padded, nested)
    with pytest.raises(ValueError, match='strided_rule'):
        dtensor_map((5, ), mesh, placements, strided_rule='some other')


def test_equal_replicas_share_the_sending_and_a_single_owner_sends_alone():
    # One embedding on two pipeline stages; one expert on rank 3 alone.
    embedding = replicated_map((4, 2), 2)
    halves = contiguous_split_map((4, 2), [2, 2], 0)
    plan = plan_transfer(halves, embedding, replica_selector=SpreadReplicas())
    assert {segment.source_rank for segment in plan.segments} == {0, 1}
    expert = flat_range_map((4, 2), {3: (0, 8)})
    assert {segment.source_rank for segment in plan_transfer(halves, expert).segments} == {3}


def test_values_of_two_ranks_under_one_name_are_no_replicas_unless_declared():
    pieces = {rank: [AffinePiece((2, ), 0, (1, ), 0, (1, ), [rank])] for rank in (0, 1)}
    private = ParamAffineMap((2, ), {0: (2, ), 1: (2, )}, pieces)
    with pytest.raises(HolderError, match=r'names the holders \[0\], but .* is held by \[0, 1\]'):
        private.validate_coverage()
    with pytest.raises(InvalidMapError, match='names the holders'):
        plan_transfer(replicated_map((2, ), 1), private)
