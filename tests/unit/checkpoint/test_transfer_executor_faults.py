# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the ranks of a transfer do when one of them refuses, disagrees, stalls or dies: real gloo processes.

Nobody hangs, every rank learns of it, and the text says whether targets are untouched or undefined.
"""

import os
import random
import re
import signal
import threading
import time

import pytest
import torch

from deepspeed.checkpoint.affine_transfer_executor import (AffineTransferExecutionError, AffineTransferExecutor,
                                                           StagingBudget, TransferEndpoints)
from unit.checkpoint.test_transfer_executor_ranks import RecordingGroup, gloo_outside_any_world, world
from unit.checkpoint.transfer_cases import line_plan
from unit.ranks import RankFailure, run_ranks

# Ranks 0 and 1 hold 8 elements each; rank 1 and rank 2 get 8 each, half from either. Rank 3 only takes part.
ENDPOINTS = TransferEndpoints({0: 0, 1: 1}, {0: 1, 1: 2})
SEGMENTS = ((0, 0, 0, 0, 4), (1, 0, 0, 4, 4), (0, 4, 1, 0, 4), (1, 4, 1, 4, 4))
EIGHTS = {0: 8, 1: 8}


def plan_of(*segments):
    return line_plan(*(segments or SEGMENTS), source_numels=EIGHTS, target_numels=EIGHTS)


def executor_of(group=None,
                plans=None,
                endpoints=ENDPOINTS,
                dtype=torch.float32,
                source_dtype=torch.float32,
                budget=1 << 20,
                max_active_peers=16):
    return AffineTransferExecutor(plans or {'w': plan_of()},
                                  endpoints,
                                  dtype=dtype,
                                  source_dtype=source_dtype,
                                  budget=StagingBudget(budget, max_active_peers),
                                  group=group or world())


def buffers_of(rank, base=0.):
    sources = {'w': {rank: torch.arange(8.) + 10 * rank + base} if rank < 2 else {}}
    targets = {'w': {rank - 1: torch.full((8, ), -1.)} if rank in (1, 2) else {}}
    return sources, targets


def assert_moved(rank, targets, base=0.):
    if targets['w']:
        half = 4 * (rank - 1)
        expected = [base + 10 * source + half + index for source in (0, 1) for index in range(4)]
        assert targets['w'][rank - 1].tolist() == expected


def text_of(call):
    with pytest.raises(AffineTransferExecutionError) as caught:
        call()
    return str(caught.value)


# Refusal before it began


def spoil(kind, rank, sources, targets):
    """Make the buffers of rank 1 unacceptable in one way."""
    if rank != 1:
        return
    if kind == 'missing source':
        del sources['w'][1]
    elif kind == 'missing target':
        targets['w'] = {}
    elif kind == 'foreign source':
        sources['w'][0] = torch.zeros(8)
    elif kind == 'wrong dtype':
        targets['w'][0] = torch.full((8, ), -1., dtype=torch.bfloat16)
    elif kind == 'too small':
        sources['w'][1] = torch.zeros(7)
    elif kind == 'expanded':
        sources['w'][1] = torch.zeros(1).expand(8)
    elif kind == 'aliasing':
        targets['w'][0] = sources['w'][1].fill_(-1.)[:8]
    elif kind == 'on a device':
        targets['w'][0] = torch.zeros(8, device='meta')
    elif kind == 'no dict':
        sources['w'] = [torch.zeros(8)]


KINDS = {
    'missing source':
    'the source buffer of location 1 of w is missing or empty: this rank holds a shard of shape (8,)',
    'missing target':
    'the target buffer of location 0 of w is missing or empty: this rank holds a shard of shape (8,)',
    'foreign source': "the source buffer of location 0 of w is foreign: this rank's source locations are [1]",
    'wrong dtype': 'the target buffer of location 0 of w has dtype torch.bfloat16, expected torch.float32',
    'too small': 'the source buffer of location 1 of w has shape (7,), expected (8,)',
    'expanded': 'the source buffer of location 1 of w is expanded or overlaps itself: shape (8,), strides (0,)',
    'aliasing': 'the source buffer of location 1 of w and the target buffer of location 0 of w share memory',
    'on a device':
    'the target buffer of location 0 of w is on device meta, expected host memory (there is no accelerator)',
    'no dict': 'the source buffers of w must be a dict, not a list',
}


def refuse_each_kind(rank):
    executor = executor_of()
    texts = {}
    for kind in KINDS:
        sources, targets = buffers_of(rank)
        spoil(kind, rank, sources, targets)
        texts[kind] = text_of(lambda: executor.execute(sources, targets))
        for target in targets['w'].values():
            assert target.is_meta or target.eq(-1).all()
    sources, targets = buffers_of(rank)
    executor.execute(sources, targets)
    assert_moved(rank, targets)
    return texts


def test_every_rank_refuses_with_the_cause_of_the_rank_that_did_and_can_go_on():
    results = run_ranks(refuse_each_kind, 4)
    assert results[0] == {kind: f'transfer refused before it began: rank 1: {cause}' for kind, cause in KINDS.items()}
    assert results.count(results[0]) == 4


def two_ranks_refuse(rank):
    executor = executor_of()
    sources, targets = buffers_of(rank)
    return text_of(lambda: executor.execute({'w': {}}, targets))


def test_all_refusing_ranks_are_named():
    texts = run_ranks(two_ranks_refuse, 4)
    assert texts == [
        'transfer refused before it began: rank 0: the source buffer of location 0 of w is missing or '
        'empty: this rank holds a shard of shape (8,); rank 1: the source buffer of location 1 of w is '
        'missing or empty: this rank holds a shard of shape (8,)'
    ] * 4


def refuse_to_construct(rank):
    texts = [
        text_of(lambda: executor_of(budget=3 if rank == 2 else 64)),
        text_of(lambda: executor_of(endpoints=TransferEndpoints({
            0: 0,
            1: 1
        }, {
            0: 1,
            1: 4
        }) if rank == 3 else ENDPOINTS)),
        text_of(lambda: executor_of(dtype='bfloat16' if rank == 0 else torch.float32)),
    ]
    sources, targets = buffers_of(rank)
    executor_of().execute(sources, targets)
    assert_moved(rank, targets)
    return texts


def test_a_rank_that_cannot_construct_its_executor_tells_all():
    results = run_ranks(refuse_to_construct, 4)
    assert results[0] == [
        'transfer refused before it began: rank 2: a budget of 3 bytes per peer is less than one element of 4 bytes',
        'transfer refused before it began: rank 3: target location 1 is bound to rank 4, outside the group of 4 ranks',
        "transfer refused before it began: rank 0: dtypes must be torch dtypes, not 'bfloat16' and torch.float32",
    ]
    assert results.count(results[0]) == 4


# Disagreement

OTHERS = {
    'budget': dict(budget=128),
    'active peers': dict(max_active_peers=1),
    'dtype': dict(dtype=torch.bfloat16),
    'source dtype': dict(source_dtype=torch.float64),
    'another address': dict(plans={'w': plan_of((0, 0, 0, 0, 4), (1, 0, 0, 4, 4), (0, 4, 1, 4, 4), (1, 4, 1, 0, 4))}),
    'one segment fewer': dict(plans={'w': plan_of(*SEGMENTS[:3])}),
    'another order': dict(plans={'w': plan_of((0, 0, 0, 2, 2), (0, 2, 0, 0, 2), *SEGMENTS[1:])}),
    'another name': dict(plans={'v': plan_of()}),
    'endpoints': dict(endpoints=TransferEndpoints({
        0: 0,
        1: 1
    }, {
        0: 2,
        1: 1
    })),
}


def disagree_in_each_way(rank):
    texts = {}
    for kind, options in OTHERS.items():
        texts[kind] = text_of(lambda: executor_of(**(options if rank == 1 else {})))
    sources, targets = buffers_of(rank)
    executor_of().execute(sources, targets)
    assert_moved(rank, targets)
    return texts


def test_ranks_with_another_plan_budget_dtype_or_endpoints_are_found_before_anything_moves():
    results = run_ranks(disagree_in_each_way, 4)
    assert results.count(results[0]) == 4
    opening = 'ranks disagree about the transfer schedule: '
    assert all(text.startswith(opening) for text in results[0].values())
    told = {kind: text[len(opening):] for kind, text in results[0].items()}
    assert told['budget'] == 'bytes per peer: 1048576 on ranks 0, 2, 3, 128 on rank 1'
    assert told['active peers'] == 'max active peers: 16 on ranks 0, 2, 3, 1 on rank 1'
    assert told['dtype'] == 'dtype: torch.float32 on ranks 0, 2, 3, torch.bfloat16 on rank 1'
    assert told['source dtype'] == 'source dtype: torch.float32 on ranks 0, 2, 3, torch.float64 on rank 1'
    elsewhere = ' at other addresses, of other parameters or in another order'
    assert told['another address'] == (
        'rank 1 sends 1 segments of 4 elements to rank 2, which expects 1 segments of 4 '
        'elements' + elsewhere)
    assert told['one segment fewer'] == ('rank 1 sends nothing to rank 2, which expects 1 segments of 4 elements')
    assert told['another order'] == ('rank 0 sends 1 segments of 4 elements to rank 1, which expects 2 segments of 4 '
                                     'elements')
    assert told['another name'].count(elsewhere) == 2
    assert re.match('digest of the endpoints: [0-9a-f]{16} on .*, [0-9a-f]{16} on rank 1;', told['endpoints'])
    assert 'rank 0 sends 1 segments of 4 elements to rank 1' in told['endpoints']


def leave_the_copy_to_each_other(rank):
    # Either rank binds both ends to the other one, so neither has anything to copy or to send.
    elsewhere = TransferEndpoints({0: 1 - rank}, {0: 1 - rank})
    return text_of(lambda: executor_of(plans={'w': plan_of((0, 0, 0, 0, 4))}, endpoints=elsewhere))


def test_ranks_that_leave_a_copy_to_each_other_are_told_so():
    texts = run_ranks(leave_the_copy_to_each_other, 2)
    assert texts[0] == texts[1]
    assert re.search('schedule: digest of the endpoints: [0-9a-f]{16} on rank 0, [0-9a-f]{16} on rank 1$', texts[0])


def refuse_with_text_that_is_no_unicode(rank):
    executor = executor_of()
    sources, targets = buffers_of(rank)
    wrong = {**sources, 'w\udc80': {0: torch.zeros(1)}} if rank == 1 else sources
    text = text_of(lambda: executor.execute(wrong, targets))
    executor.execute(sources, targets)
    assert_moved(rank, targets)
    return text


def test_a_refusal_that_cannot_be_written_as_unicode_is_a_refusal_all_the_same():
    texts = run_ranks(refuse_with_text_that_is_no_unicode, 4)
    assert texts.count(texts[0]) == 4
    assert 'rank 1' in texts[0] and 'udc80' in texts[0]


def plans_cut_down_to_one_rank(rank):
    """Each rank holds its own segments only, and one that takes no part an empty plan."""
    mine = [segment for segment in SEGMENTS if rank in (ENDPOINTS.source[segment[0]], ENDPOINTS.target[segment[2]])]
    sources, targets = buffers_of(rank)
    plans = {'w': plan_of(*mine)} if mine else {'none': line_plan()}
    executor_of(plans=plans).execute(sources, targets)
    assert_moved(rank, targets)
    return len(mine)


def test_plans_cut_down_to_each_rank_agree():
    assert run_ranks(plans_cut_down_to_one_rank, 4) == [2, 3, 2, 0]


def one_rank_leaves_out_a_call(rank):
    """Rank 1 raises in its own code before the first executor's second call, and goes on with the second executor."""
    first, second = executor_of(), executor_of()
    first.execute(*buffers_of(rank))
    sources, targets = buffers_of(rank)
    text = text_of(lambda: (second if rank == 1 else first).execute(sources, targets))
    assert all(target.eq(-1).all() for target in targets['w'].values())
    for executor in (first, second):
        sources, targets = buffers_of(rank, base=100.)
        executor.execute(sources, targets)
        assert_moved(rank, targets, base=100.)
    return text


def test_a_rank_that_leaves_out_a_call_is_found_and_all_can_go_on():
    texts = run_ranks(one_rank_leaves_out_a_call, 3)
    executor = '(begins executor [0-9a-f]{16})'
    told = re.fullmatch(
        'ranks disagree about the transfer schedule: '
        f'rank 0 {executor}; rank 1 {executor}; rank 2 {executor}', texts[0]).groups()
    assert told[0] == told[2] != told[1]
    assert texts.count(texts[0]) == 3


def one_rank_constructs_while_others_execute(rank):
    executor = executor_of()
    text = text_of(executor_of if rank == 2 else lambda: executor.execute(*buffers_of(rank)))
    sources, targets = buffers_of(rank)
    executor.execute(sources, targets)
    assert_moved(rank, targets)
    return text


def test_a_rank_that_constructs_while_others_execute_is_found():
    texts = run_ranks(one_rank_constructs_while_others_execute, 3)
    assert texts[0].endswith('; rank 2 constructs an executor') and texts.count(texts[0]) == 3


# Failure: every survivor of a group with a timeout of 60 s must know within QUICK_S

QUICK_S = 5
UNDEFINED = 'transfer failed after it began, targets are undefined: '
UNTOUCHED = 'transfer failed before it began, targets are untouched: '


class FaultyGroup(RecordingGroup):
    """A group object whose n-th message does something else first."""

    def __init__(self, group, number, fault):
        super().__init__(group)
        self._number, self._fault = number, fault

    def __getattr__(self, name):
        if name in ('send', 'recv') and len(self.addresses) == self._number:
            self._number = None
            self._fault()
        return super().__getattr__(name)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fail_on_a_cable():
    raise RuntimeError('the cable is cut')


def executes_until_it_fails(rank, executor, limit_s):
    """Execute over and over; the text of the failure, which a further call must repeat at once."""
    sources, targets = buffers_of(rank)

    def execute_for_long():
        started = time.monotonic()
        while time.monotonic() - started < limit_s:
            executor.execute(sources, targets)

    text = text_of(execute_for_long)
    assert text_of(lambda: executor.execute(sources, targets)) == f'this executor can no longer be used: {text}'
    return text


def fail_at_a_message(rank, number, fault):
    group = gloo_outside_any_world('fragile', rank, 4, timeout_s=60)
    executor = executor_of(FaultyGroup(group, number, fault) if rank == 1 else group, budget=8)
    started = time.monotonic()
    text = executes_until_it_fails(rank, executor, QUICK_S)
    assert time.monotonic() - started < QUICK_S, text
    return text


def fail_and_stay(rank):
    """No process ends before all have had their time, so that no connection is closed by that."""
    text = fail_at_a_message(rank, 7, fail_on_a_cable)
    time.sleep(QUICK_S)
    return text


def test_a_transport_error_reaches_every_rank_and_leaves_targets_undefined():
    """Rank 3, which has no traffic at all, learns of it from the exchange that ends the call."""
    texts = run_ranks(fail_and_stay, 4, init_world=False)
    assert texts[1] == UNDEFINED + 'the cable is cut'
    assert all(text.startswith(UNDEFINED) for text in texts)


@pytest.mark.parametrize('number', [0, 5, 11])
def test_survivors_of_a_rank_killed_at_a_message_say_that_targets_are_undefined(number):
    assert_only_the_victim_failed(fail_and_check, number)


def fail_and_check(rank, number):
    text = fail_at_a_message(rank, number, die)
    assert text.startswith(UNDEFINED) and names_rank_1(text), text


def names_rank_1(text):
    """Whether a message to or from the victim failed, or it is among those that had gone."""
    return re.search(r'(sending to|receiving from) rank 1: |dead or too late: ranks? (\d, )*1\b', text) is not None


def assert_only_the_victim_failed(function, *args):
    """Survivors that do not return what they should fail too, and their text is then in the failure's."""
    with pytest.raises(RankFailure) as caught:
        run_ranks(function, 4, *args, init_world=False)
    assert str(caught.value) == 'rank 1: exited with code -9 (SIGKILL)'


@pytest.mark.parametrize('moment_s', [round(random.Random(moment).uniform(0.005, 0.25), 4) for moment in range(20)])
def test_survivors_of_a_rank_killed_at_any_moment_fail_within_seconds(moment_s):
    assert_only_the_victim_failed(die_at_a_moment, moment_s)


def die_at_a_moment(rank, moment_s):
    group = gloo_outside_any_world('fragile', rank, 4, timeout_s=60)
    executor = executor_of(group, budget=8)
    if rank == 1:
        threading.Timer(moment_s, die).start()
    started = time.monotonic()
    text = executes_until_it_fails(rank, executor, QUICK_S)
    assert text.startswith((UNDEFINED, UNTOUCHED)) and names_rank_1(text), text
    assert time.monotonic() - started < QUICK_S, text


def die_before_construction(rank):
    group = gloo_outside_any_world('fragile', rank, 4, timeout_s=60)
    if rank == 1:
        die()
    started = time.monotonic()
    assert text_of(lambda: executor_of(group)).startswith(
        'the ranks could not agree on a transfer, nothing was moved: ')
    assert time.monotonic() - started < QUICK_S


def test_a_rank_that_died_before_the_construction_is_noticed_there():
    assert_only_the_victim_failed(die_before_construction)


def leave_between_two_calls(rank):
    group = gloo_outside_any_world('fragile', rank, 4, timeout_s=60)
    executor = executor_of(group)
    sources, targets = buffers_of(rank)
    executor.execute(sources, targets)
    if rank == 1:
        return 'raised in its own code and left'
    started = time.monotonic()
    text = text_of(lambda: executor.execute(sources, targets))
    assert time.monotonic() - started < QUICK_S
    assert_moved(rank, targets)
    return text


def test_ranks_whose_peer_left_between_two_calls_say_that_targets_are_untouched():
    texts = run_ranks(leave_between_two_calls, 4, init_world=False)
    assert all(text.startswith(UNTOUCHED) for rank, text in enumerate(texts) if rank != 1)


def stall(rank, number):
    """Rank 1 is alive but does not come for much longer than the group's timeout of 2 s."""
    group = gloo_outside_any_world('fragile', rank, 4, timeout_s=2)
    executor = executor_of(FaultyGroup(group, number, lambda: time.sleep(5)) if rank == 1 else group, budget=8)
    if rank == 1 and number < 0:
        time.sleep(5)
    started = time.monotonic()
    text = text_of(lambda: executor.execute(*buffers_of(rank)))
    assert rank == 1 or time.monotonic() - started < 4.5
    return text


def test_a_stalled_rank_is_given_up_after_the_timeout_of_the_group():
    texts = run_ranks(stall, 4, -1, init_world=False)
    assert all(text.startswith(UNTOUCHED) for text in texts)


def test_a_rank_that_stalls_midway_is_given_up_after_the_timeout_of_the_group():
    texts = run_ranks(stall, 4, 3, init_world=False)
    assert all(text.startswith(UNDEFINED) for text in texts)
