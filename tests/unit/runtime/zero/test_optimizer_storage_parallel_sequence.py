# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Sequence parallel groups of 2 on 4 ranks, from Ulysses' mpu or a device mesh: what ZeRO partitions over then.

With the mpu, and under stage 3 in any case, ZeRO partitions over all ranks. With a mesh, stages 1 and 2 partition
over the data parallel dimension of the mesh alone, and step each sequence rank on gradients of its own.
"""

import numpy
import pytest
import torch
from unit.runtime.zero.engines import (TinyModel, arrays_of, assemble, collectives_so_far, config_of, element_order,
                                       full_reference, gathered, observed, plain_maps, start_deepspeed, train)
from unit.runtime.zero.parallel_engines import forget_groups

from deepspeed.runtime.zero.zero_affine import UnsupportedEngineError

WORLD_SIZE = 4
MESH = {'data_parallel_size': 2, 'sequence_parallel_size': 2}
MPU_CONFIGS = {
    'mpu, stage 1': config_of(1),
    'mpu, stage 2': config_of(2, 'cpu'),
    'mpu, stage 3': config_of(3),
    # DeepSpeed cannot step it with this mpu: its norm of the gradients fails on all sequence ranks but the first.
    'mpu, BF16_Optimizer': config_of(1, dtype='bf16', grad_accum_dtype='fp32'),
}
MESH_CONFIGS = {'mesh, stage 3': config_of(3) | MESH, 'mesh, stage 3, bf16': config_of(3, 'cpu', dtype='bf16') | MESH}
REFUSED_CONFIGS = {
    'mesh, stage 1': config_of(1) | MESH,
    'mesh, stage 2': config_of(2) | MESH,
    'mesh, BF16_Optimizer': config_of(1, dtype='bf16', grad_accum_dtype='fp32') | MESH,
}


def observe_sequence_parallelism(rank):
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu
    start_deepspeed()
    seen = {}
    for label, config in (MPU_CONFIGS | MESH_CONFIGS | REFUSED_CONFIGS).items():
        forget_groups()
        options = {}
        if label in MPU_CONFIGS:
            mpu.initialize_sequence_parallel(sequence_parallel_size=2)
            options['mpu'] = mpu
        engine = engine_of(config, **options)
        seen[label] = {'sequence_parallel_size': engine.sequence_parallel_size}
        seen[label] |= observe_refusal(engine) if label in REFUSED_CONFIGS else observe_storage(engine, label)
        engine.destroy()
    return seen


def engine_of(config, **options):
    import deepspeed
    torch.manual_seed(7)
    model = TinyModel()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model,
                                      optimizer=torch.optim.Adam(parameters, lr=0.05),
                                      config=config,
                                      dist_init_required=False,
                                      **options)
    return engine


def observe_storage(engine, label):
    steps = 0 if 'BF16' in label else 2
    train(engine, steps)
    before = collectives_so_far()
    maps = engine.optimizer_storage_maps()
    seen = {'collectives': collectives_so_far() - before}
    seen['maps'] = plain_maps(maps)
    states = ('fp32', 'exp_avg') if steps else ('fp32', )
    seen['states'] = {state: arrays_of(engine.optimizer_storage(state)) for state in states}
    seen['reference'] = {state: arrays_of(full_reference(engine, state)) for state in states}
    seen['parameter maps'] = plain_maps(engine.parameter_storage_maps())
    seen['parameters'] = arrays_of(engine.parameter_storage())
    seen['gathered parameters'] = gathered(engine)
    return seen


def observe_refusal(engine):
    before = collectives_so_far()
    seen = {'texts': []}
    for call in (engine.optimizer_storage, engine.optimizer_storage_maps):
        try:
            call()
        except UnsupportedEngineError as error:
            seen['texts'].append(str(error))
    seen['collectives'] = collectives_so_far() - before
    train(engine, 2)
    seen['weights'] = arrays_of({'up.weight': engine.module.up.weight})['up.weight']
    return seen


def by_rank(label):
    return [seen[label] for seen in observed(observe_sequence_parallelism, WORLD_SIZE)]


each_supported = pytest.mark.parametrize('label', [*MPU_CONFIGS, *MESH_CONFIGS])
each_refused = pytest.mark.parametrize('label', REFUSED_CONFIGS)


@each_supported
def test_full_tensors_by_the_maps_equal_those_deepspeed_gathers(label):
    seen = by_rank(label)
    for state, reference in seen[0]['reference'].items():
        full = assemble(seen[0]['maps'], [rank['states'][state] for rank in seen])
        assert list(full) == list(reference)
        for name in reference:
            assert numpy.array_equal(full[name], reference[name]), (state, name)


@each_supported
def test_each_ranks_low_precision_views_hold_what_the_maps_say_of_the_gathered_parameters(label):
    for rank, seen in enumerate(by_rank(label)):
        assert list(seen['parameter maps']) == list(seen['parameters']) == list(seen['gathered parameters'])
        assert seen['parameter maps'] == by_rank(label)[0]['parameter maps']
        for name, full in seen['gathered parameters'].items():
            order = element_order(seen['parameter maps'][name], rank)
            assert numpy.array_equal(seen['parameters'][name].flatten(), full.flatten()[order]), name


@each_supported
def test_all_ranks_of_the_world_share_the_parameters(label):
    for kind in ('maps', 'parameter maps'):
        maps = by_rank(label)[0][kind]
        assert set.union(*(set(plain_map['ranks']) for plain_map in maps.values())) == {0, 1, 2, 3}


@each_supported
def test_maps_are_equal_on_all_ranks_and_cost_one_collective(label):
    first, *others = by_rank(label)
    assert all(other['maps'] == first['maps'] for other in others)
    assert {rank['collectives'] for rank in (first, *others)} == {1}


@pytest.mark.parametrize('label', [*MPU_CONFIGS, *MESH_CONFIGS, *REFUSED_CONFIGS])
def test_the_engines_really_have_sequence_parallel_groups(label):
    assert {rank['sequence_parallel_size'] for rank in by_rank(label)} == {2}


@each_refused
def test_a_mesh_is_refused_under_stages_1_and_2_on_every_rank_before_any_communication(label):
    for rank in by_rank(label):
        assert len(rank['texts']) == 2 and all('sequence_parallel_size' in text for text in rank['texts'])
        assert rank['collectives'] == 0


@each_refused
def test_the_copies_of_sequence_ranks_really_drift_apart_there(label):
    first, second, third, _ = by_rank(label)
    assert numpy.array_equal(first['weights'], third['weights'])
    assert not numpy.array_equal(first['weights'], second['weights'])
