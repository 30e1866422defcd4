# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""``zero_storage_affine_map`` against ZeRO-3's rule, without processes; importing it starts nothing."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unit.runtime.zero.engines import element_order

from deepspeed.runtime.zero.zero_affine import zero_storage_affine_map


@pytest.mark.parametrize('numel, ranks, elements_by_rank', [
    (5, [0, 1, 2, 3], [[0, 1], [2, 3], [4], []]),
    (6, [0, 1, 2, 3], [[0, 1], [2, 3], [4, 5], []]),
    (1, [0, 1, 2], [[0], [], []]),
    (7, [3], [[0, 1, 2, 3, 4, 5, 6]]),
    (4, [5, 2], [[0, 1], [2, 3]]),
    (0, [0, 1], [[], []]),
])
def test_each_rank_holds_its_equal_share_and_the_tail_comes_short(numel, ranks, elements_by_rank):
    plain_map = zero_storage_affine_map(numel, ranks).to_dict()
    assert plain_map['logical_shape'] == [numel]
    assert {rank: element_order(plain_map, rank) for rank in ranks} == dict(zip(ranks, elements_by_rank))


@pytest.mark.parametrize('numel', [0, 1, 5])
def test_partitions_that_hold_nothing_are_listed_as_empty(numel):
    shards = zero_storage_affine_map(numel, range(4)).to_dict()['ranks']
    assert sorted(shards) == [0, 1, 2, 3]
    assert shards[3] == {'shard_shape': [0], 'pieces': []}


@given(numel=st.integers(0, 200), ranks=st.lists(st.integers(0, 50), min_size=1, max_size=12, unique=True))
def test_the_map_cuts_a_tensor_as_padding_and_chunking_it_does(numel, ranks):
    full = torch.arange(numel)
    plain_map = zero_storage_affine_map(numel, ranks).to_dict()
    padded = torch.cat([full, full.new_full((-numel % len(ranks), ), -1)])
    for rank, partition in zip(ranks, padded.view(len(ranks), -1)):
        assert element_order(plain_map, rank) == partition[partition >= 0].tolist()


@pytest.mark.parametrize('numel, ranks', [(-1, [0]), (4, []), (4, [0, 0]), (4, [0, -1])])
def test_impossible_arguments_are_refused(numel, ranks):
    with pytest.raises(ValueError):
        zero_storage_affine_map(numel, ranks)


def test_importing_starts_neither_a_process_group_nor_an_accelerator_context():
    program = ('import deepspeed.checkpoint.affine, deepspeed.runtime.zero.zero_affine; '
               'import torch, torch.distributed; '
               'print(torch.distributed.is_initialized(), torch.cuda.is_initialized())')
    result = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=180)
    assert result.stdout.splitlines()[-1] == 'False False', result.stderr
