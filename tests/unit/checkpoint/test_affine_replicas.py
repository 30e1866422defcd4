# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""SpreadReplicas: who sends what several locations hold."""

import collections

from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.affine import contiguous_split_map, flat_range_map, nest_affine_maps, replicated_map
from deepspeed.checkpoint.affine_transfer import SpreadReplicas, plan_model, plan_transfer
from unit.checkpoint.affine_cases import any_maps, run_plan, shapes, shard_labels


def sent_elements(plans):
    sent = collections.Counter()
    for plan in plans:
        for segment in plan.segments:
            sent[segment.source_rank] += segment.numel
    return sent


def senders(plan):
    return {segment.target_rank: segment.source_rank for segment in plan.segments}


@given(st.data())
def test_any_policy_brings_every_element_and_plans_in_parts_as_in_whole(data):
    shape = data.draw(shapes)
    names = ['a', 'b', 'c']
    sources = {name: data.draw(any_maps(shape)) for name in names}
    targets = {name: data.draw(any_maps(shape)) for name in names}
    places = st.dictionaries(st.integers(0, 6), st.integers(0, 3))
    policy = SpreadReplicas(data.draw(places), data.draw(places), data.draw(places))
    whole = plan_model(targets, sources, replica_selector=policy)
    for name in names:
        for rank, received in run_plan(whole[name], sources[name], targets[name]).items():
            assert received.tolist() == shard_labels(targets[name], rank).tolist()
    ranks = data.draw(st.sets(st.integers(0, 6)))
    part = plan_model(targets, sources, replica_selector=policy, ranks=ranks)
    for name in names:
        assert list(part[name].segments) == [
            segment for segment in whole[name].segments if segment.source_rank in ranks or segment.target_rank in ranks
        ]


def test_eight_holders_read_by_eight_targets_send_equally():
    source = replicated_map((16, 6), 8)
    for target in (contiguous_split_map((16, 6), [2] * 8, 0), replicated_map((16, 6), 8)):
        sent = sent_elements([plan_transfer(target, source, replica_selector=SpreadReplicas())])
        assert len(sent) == 8 and len(set(sent.values())) == 1


def test_targets_that_want_the_same_elements_turn_to_different_holders():
    # 8 replicas of two row shards, as data parallel rollout workers are: rank r wants half r % 2.
    halves = contiguous_split_map((4, 6), [2, 2], 0)
    target = nest_affine_maps(
        halves, {half: flat_range_map((2, 6), {rank: (0, 12)
                                               for rank in range(half, 16, 2)})
                 for half in (0, 1)})
    sent = sent_elements([plan_transfer(target, replicated_map((4, 6), 4), replica_selector=SpreadReplicas())])
    assert sent == {rank: 4 * 12 for rank in range(4)}


def test_a_model_goes_on_where_the_last_parameter_stopped():
    maps = {f'layer.{index}': replicated_map((5, ), 3) for index in range(4)}
    targets = {name: replicated_map((5, ), 2) for name in maps}
    plans = plan_model(targets, maps, replica_selector=SpreadReplicas())
    assert [senders(plans[name]) for name in sorted(plans)] == [
        {
            0: 0,
            1: 1
        },
        {
            0: 2,
            1: 0
        },
        {
            0: 1,
            1: 2
        },
        {
            0: 0,
            1: 1
        },
    ]
    assert plans['layer.3'] is plans['layer.0']


def test_parameters_of_other_sizes_do_not_always_meet_the_same_holders():
    # Large and small parameters alternate; taking turns in that order would give all large ones to ranks 0 and 1.
    shapes_by_name = {f'{layer}.{kind}': size for layer in range(4) for kind, size in (('large', 1000), ('small', 1))}
    sources = {name: replicated_map((size, ), 4) for name, size in shapes_by_name.items()}
    targets = {name: replicated_map((size, ), 2) for name, size in shapes_by_name.items()}
    sent = sent_elements(plan_model(targets, sources, replica_selector=SpreadReplicas()).values())
    assert set(sent.values()) == {2 * 1000 + 2}


def test_a_holder_in_the_targets_process_comes_first_and_one_on_its_host_second():
    source, target = replicated_map((6, ), 4), replicated_map((6, ), 3)
    policy = SpreadReplicas(source_process={
        0: 'a',
        1: 'b',
        2: 'c',
        3: 'd'
    },
                            target_process={
                                0: 'c',
                                1: 'x',
                                2: 'far'
                            },
                            host_by_process={
                                'a': 'h0',
                                'b': 'h0',
                                'c': 'h1',
                                'd': 'h1',
                                'x': 'h0',
                                'far': 'h9'
                            })
    chosen = senders(plan_transfer(target, source, replica_selector=policy))
    assert chosen[0] == 2
    assert chosen[1] in (0, 1)


def test_locations_that_the_policy_does_not_know_are_near_nobody():
    policy = SpreadReplicas(source_process={5: 'a'}, target_process={7: 'a'})
    plan = plan_transfer(replicated_map((2, ), 2), replicated_map((2, ), 2), replica_selector=policy)
    assert senders(plan) == {0: 0, 1: 1}
