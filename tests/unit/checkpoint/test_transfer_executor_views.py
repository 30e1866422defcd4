# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Views as buffers: addressed through their strides, never by pointer and count; all within one process."""

import itertools

import numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.affine import contiguous_split_map, flat_range_map, replicated_map
from deepspeed.checkpoint.affine_transfer import TransferPlan, TransferSegment, plan_model, plan_transfer
from deepspeed.checkpoint.affine_transfer_buffers import BoxPair, axes_of, readdress
from deepspeed.checkpoint.affine_transfer_executor import AffineTransferExecutor, TransferEndpoints
from unit.checkpoint.transfer_in_process import HERE, NAN, execute


def test_every_second_element_of_a_tensor_is_read_and_written():
    """x = [0, 1, 2, 3][::2] sends [0, 2], and writing base(2, 4)[:, ::2] changes columns 0 and 2 only."""
    plan = plan_transfer(flat_range_map((2, ), {0: (0, 2)}), flat_range_map((2, ), {0: (0, 2)}))
    target = torch.zeros(2)
    execute(plan, {0: torch.arange(4.)[::2]}, {0: target})
    assert target.tolist() == [0, 2]
    plan = plan_transfer(contiguous_split_map((2, 2), [2], 0), contiguous_split_map((2, 2), [2], 0))
    base = torch.zeros(2, 4)
    execute(plan, {0: torch.arange(1., 5.).view(2, 2)}, {0: base[:, ::2]})
    assert base.tolist() == [[1, 0, 2, 0], [3, 0, 4, 0]]


def test_a_transposed_weight_arrives_as_the_logical_matrix():
    plan = plan_transfer(contiguous_split_map((4, 4), [4], 0), contiguous_split_map((4, 4), [4], 0))
    weight, target = torch.arange(16.).view(4, 4), torch.zeros(4, 4)
    execute(plan, {0: weight.t()}, {0: target})
    assert torch.equal(target, weight.t())


def test_buffers_may_change_their_strides_between_calls():
    plan = plan_transfer(contiguous_split_map((2, 3), [2], 0), contiguous_split_map((2, 3), [2], 0))
    executor = AffineTransferExecutor(plan, HERE, dtype=torch.float32)
    values = torch.arange(6.).view(2, 3)
    for target in (torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(2, 5)[:, 1:4]):
        executor.execute({0: values}, {0: target})
        assert torch.equal(target, values)


def test_parameters_that_are_apart_on_one_side_fill_their_parts_of_a_fused_shard():
    # q, k and v of a trainer, and rank 1 of 2 of an engine that keeps them packed.
    parts = {'q': torch.arange(24.).view(8, 3), 'k': torch.arange(24., 36.).view(4, 3), 'v': -torch.ones(4, 3)}
    fused = torch.full((8, 3), NAN)
    rows = {name: len(part) // 2 for name, part in parts.items()}
    starts = dict(zip(parts, itertools.accumulate(rows.values(), initial=0)))
    plans = plan_model({
        name: contiguous_split_map(part.shape, [rows[name]] * 2, 0)
        for name, part in parts.items()
    }, {
        name: replicated_map(part.shape, 1)
        for name, part in parts.items()
    },
                       source_ranks={},
                       target_ranks={1})
    executor = AffineTransferExecutor(plans, TransferEndpoints({0: 0}, {1: 0}), dtype=torch.float32)
    executor.execute({
        name: {
            0: part
        }
        for name, part in parts.items()
    }, {name: {
        1: fused.narrow(0, starts[name], rows[name])
    }
        for name in parts})
    assert torch.equal(fused, torch.cat([part[len(part) // 2:] for part in parts.values()]))


def test_a_diagonal_through_a_transposed_buffer_is_read():
    """Steps of 3 through rows of 4 run over the row ends out of phase: no strides lead there, so it takes parts."""
    segment = TransferSegment(0, 0, (3, ), 0, 0, (1, ), (4, ))
    plan = TransferPlan((segment, ), (12, ), 4, None, source_shard_shapes={0: (3, 4)}, target_shard_shapes={0: (4, )})
    source, target = torch.arange(12.).view(4, 3).t(), torch.zeros(4)
    execute(plan, {0: source}, {0: target})
    assert target.tolist() == [0, 9, 7, 5] == source.reshape(-1)[::3].tolist()


def test_a_run_over_whole_rows_of_a_window_is_one_copy():
    window = torch.zeros(5, 6)[:, :4]
    assert list(readdress(BoxPair((12, ), 4, (1, ), 0, (1, )),
                          axes_of(window))) == [BoxPair((3, 4), 6, (6, 1), 0, (4, 1))]


def test_a_run_that_meets_each_row_elsewhere_is_cut_at_the_ends_of_rows():
    window = torch.zeros(100, 8)[:, :7]
    parts = list(readdress(BoxPair((350, ), 0, (2, ), 0, (1, )), axes_of(window)))
    assert len(parts) == 100 and all(part.shape[0] in (3, 4) for part in parts)


@given(data=st.data())
def test_readdressing_visits_the_same_elements_in_the_same_order(data):
    """Any run of a shard, with any step, through windows and permutations: compared element by element."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
    order = data.draw(st.permutations(range(len(shape))))
    wide = [shape[dim] + data.draw(st.integers(0, 1)) for dim in order]
    buffer = torch.arange(int(numpy.prod(wide))).view(wide)[tuple(slice(shape[dim]) for dim in order)]
    buffer = buffer.permute([order.index(dim) for dim in range(len(shape))])
    first, step = data.draw(st.integers(0, buffer.numel() - 1)), data.draw(st.integers(1, 5))
    run = data.draw(st.integers(1, 1 + (buffer.numel() - 1 - first) // step))
    place_of = buffer.reshape(-1).tolist()
    reached = {}
    for copy in readdress(BoxPair((run, ), first, (step, ), 100, (1, )), axes_of(buffer)):
        for index in itertools.product(*map(range, copy.shape)):
            here, there = (offset + sum(i * s for i, s in zip(index, strides))
                           for offset, strides in ((copy.offset, copy.strides), (copy.other_offset,
                                                                                 copy.other_strides)))
            assert there not in reached
            reached[there] = here
    assert reached == {100 + index: place_of[first + index * step] for index in range(run)}
