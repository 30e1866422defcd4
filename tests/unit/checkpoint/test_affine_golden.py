# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Upstream 0.19.8's own results, kept as plain data: the same maps, the same elements moved, the same refusals."""

import json
from pathlib import Path

import numpy as np
import pytest

from deepspeed.checkpoint import affine, affine_transfer
from deepspeed.checkpoint.affine import ParamAffineMap

GOLDEN = Path(__file__).parent / 'data' / 'upstream_affine_0_19_8.jsonl'
BUILDERS = {
    'block_gather': affine.block_gather_map,
    'contiguous': affine.contiguous_split_map,
    'replicated': affine.replicated_map,
    'segmented': affine.segmented_map,
    'sub_param': affine.sub_param_map,
}


@pytest.fixture(scope='module')
def golden():
    entries = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    return {kind: [entry for entry in entries if entry['kind'] == kind] for kind in ('map', 'plan', 'refusal')}


def test_builders_give_upstreams_maps_exactly(golden):
    assert len(golden['map']) == 150
    for entry in golden['map']:
        arguments = dict(entry['args'])
        if 'block_ids_by_rank' in arguments:
            arguments['block_ids_by_rank'] = {int(rank): ids for rank, ids in arguments['block_ids_by_rank'].items()}
        map_ = BUILDERS[entry['builder']](**arguments)
        assert json.loads(json.dumps(map_.to_dict())) == entry['map'], entry
        assert ParamAffineMap.from_dict(entry['map']) == map_


def addresses(shape, offset, strides):
    result = np.array(offset)
    for size, stride in zip(shape, strides):
        result = result[..., None] + np.arange(size) * stride
    return result.reshape(-1).tolist()


def moved_elements(segments):
    moves = set()
    for segment in segments:
        (source_rank, *source), (target_rank, *target) = segment['source'], segment['target']
        for read, written in zip(addresses(segment['shape'], *source), addresses(segment['shape'], *target)):
            move = (source_rank, read, target_rank, written)
            assert move not in moves
            moves.add(move)
    return moves


def test_plans_move_upstreams_elements_with_no_more_segments(golden):
    assert len(golden['plan']) == 135
    for entry in golden['plan']:
        plan = affine_transfer.plan_transfer(ParamAffineMap.from_dict(entry['target']),
                                             ParamAffineMap.from_dict(entry['source']))
        assert moved_elements(plan.to_dict()['segments']) == moved_elements(entry['segments'])
        assert len(plan.segments) <= len(entry['segments'])


def test_refusals_are_of_upstreams_class(golden):
    assert len(golden['refusal']) == 15
    for entry in golden['refusal']:
        with pytest.raises(getattr(affine_transfer, entry['error'])):
            affine_transfer.plan_transfer(ParamAffineMap.from_dict(entry['target']),
                                          ParamAffineMap.from_dict(entry['source']))
