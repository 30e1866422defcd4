# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the ranks of a transfer do when one is lost to it: killed, gone, failing or stalled; real gloo processes.

Nobody hangs, every other rank raises, and the text says who is lost, and whether targets are untouched or undefined.
"""

import functools
import random
import re
import time
from typing import NamedTuple, Tuple

import pytest

from unit.checkpoint.transfer_faults import (QUICK_S, UNDEFINED, UNTOUCHED, die, explains, failure_of, told_of_ranks,
                                             was_waiting_for)
from unit.checkpoint.transfer_four_ranks import buffers_of, executor_of
from unit.checkpoint.transfer_groups import (LEARNS, MESSAGES, TELLS, gloo_outside_any_world, run_sending_ranks,
                                             text_of, with_fault)

# Killed


class Kill(NamedTuple):
    """When to kill a rank, with a delay in seconds after its n-th call of these methods of its group, and what others
    may say then."""
    methods: Tuple[str, ...]
    number: int
    told: Tuple[str, ...]
    delay_s: float = 0.
    rank: int = 1


def outlive(process, kills):
    """Processes 0, 1 and 2 are three ranks of one group after another; the killed one is another process in each."""
    for number, kill in enumerate(kills):
        is_victim = process == 3 + number
        if process < 3 or is_victim:
            rank = kill.rank if is_victim else [rank for rank in range(4) if rank != kill.rank][process]
            group = gloo_outside_any_world(f'group{number}', rank, 4, timeout_s=60)
            if is_victim:
                group = with_fault(group, kill.methods, kill.number, functools.partial(die, kill.delay_s))
            text = failure_of(rank, executor_of(group, budget=8))
            assert text.startswith(kill.told) and explains(text, rank, kill.rank), (kill, text)


def assert_others_notice(kills, shares_memory=False):
    told = told_of_ranks(outlive, 3 + len(kills), kills, init_world=False, shares_memory=shares_memory)
    assert told.splitlines() == [f'rank {3 + number}: exited with code -9 (SIGKILL)' for number in range(len(kills))]


def test_others_say_that_targets_are_undefined_when_a_rank_is_killed_among_its_messages():
    """It has 8 messages in each call."""
    assert_others_notice([Kill(MESSAGES, number, (UNDEFINED, )) for number in (0, 5, 11)])


def test_others_say_that_targets_are_untouched_when_a_rank_is_killed_before_anything_moves():
    """At the opening of the first call, when messages were laid out for it, and at the opening of the second one."""
    kills = [(number, methods, rank) for number in (1, 2, 4) for methods, rank in ((TELLS, 1), (LEARNS, 0))]
    assert_others_notice([Kill(methods, number, (UNTOUCHED, ), rank=rank) for number, methods, rank in kills])


def test_others_say_that_targets_are_undefined_when_a_rank_is_killed_as_a_call_ends():
    kills = [(number, methods, rank) for number in (3, 5) for methods, rank in ((TELLS, 1), (LEARNS, 0))]
    assert_others_notice([Kill(methods, number, (UNDEFINED, ), rank=rank) for number, methods, rank in kills])


def test_each_speaks_for_itself_when_a_rank_is_killed_that_has_told_the_others():
    """Those that learn that it did may begin, or end, what others then cannot."""
    assert_others_notice([Kill(LEARNS, number, (UNDEFINED, UNTOUCHED)) for number in (1, 2, 3, 4)])


@pytest.mark.parametrize('shares_memory', [False, True])
def test_others_notice_within_seconds_when_a_rank_is_killed_at_any_moment(shares_memory):
    moments_s = [random.Random(number).uniform(0.005, 0.25) for number in range(20)]
    assert_others_notice([Kill(TELLS, 1, (UNDEFINED, UNTOUCHED), moment_s) for moment_s in moments_s], shares_memory)


def die_before_construction(rank):
    group = gloo_outside_any_world('fragile', rank, 4, timeout_s=60)
    if rank == 1:
        die()
    started = time.monotonic()
    assert text_of(lambda: executor_of(group)).startswith(
        'the ranks could not agree on a transfer, nothing was moved: ')
    assert time.monotonic() - started < QUICK_S


def test_a_rank_that_died_before_the_construction_is_noticed_there():
    assert told_of_ranks(die_before_construction, 4, init_world=False) == 'rank 1: exited with code -9 (SIGKILL)'


# Gone, or failing


def raise_between_two_calls(rank):
    executor = executor_of()
    executor.execute(*buffers_of(rank))
    if rank == 1:
        raise ValueError('a bug of its own')
    text = failure_of(rank, executor)
    assert text.startswith(UNTOUCHED) and explains(text, rank, 1), text


@pytest.mark.parametrize('shares_memory', [False, True])
def test_others_say_that_targets_are_untouched_when_a_rank_raised_between_two_calls_and_left(shares_memory):
    told = told_of_ranks(raise_between_two_calls, 4, shares_memory=shares_memory)
    assert re.findall(r'^rank \d', told, re.MULTILINE) == ['rank 1'] and 'ValueError: a bug of its own' in told


def fail_on_a_cable():
    raise RuntimeError('the cable is cut')


def fail_and_stay(rank):
    """No process ends before all have had their time, so that no connection is closed by that."""
    group = gloo_outside_any_world('fragile', rank, 4, timeout_s=60)
    group = with_fault(group, MESSAGES, 7, fail_on_a_cable) if rank == 1 else group
    text = failure_of(rank, executor_of(group, budget=8))
    time.sleep(QUICK_S)
    return text


def test_a_transport_error_reaches_every_rank_and_leaves_targets_undefined():
    """Rank 3, which has no traffic at all, learns of it from the exchange that ends the call."""
    texts = run_sending_ranks(fail_and_stay, 4, init_world=False)
    # The others were there when it failed, and are not said to have gone.
    assert re.fullmatch(UNDEFINED + '(sending to|receiving from) rank [02]: the cable is cut', texts[1])
    assert all(text.startswith(UNDEFINED) for text in texts)


# Stalled

TIMEOUT_S, STALL_S, MARGIN_S = 2, 4, 1


def stall(rank, methods, number, delays_s):
    """Rank 1 is alive, but for twice the group's timeout it does not come. Others come some time after rank 0."""
    group = gloo_outside_any_world('fragile', rank, 4, timeout_s=TIMEOUT_S)
    if rank == 1:
        group = with_fault(group, methods, number, functools.partial(time.sleep, STALL_S))
    executor = executor_of(group, budget=8)
    time.sleep(delays_s[rank])
    started = time.monotonic()
    text = failure_of(rank, executor)
    return text, time.monotonic() - started


@pytest.mark.parametrize('methods, number, told', [(TELLS, 1, UNTOUCHED), (MESSAGES, 3, UNDEFINED)],
                         ids=['before anything moves', 'midway'])
def test_a_stalled_rank_is_given_up_after_the_timeout_of_the_group(methods, number, told):
    texts, seconds = zip(*run_sending_ranks(stall, 4, methods, number, (0, 0, 0, 0), init_world=False))
    assert all(text.startswith(told) for text in texts)
    assert all(TIMEOUT_S - MARGIN_S < seconds[rank] < TIMEOUT_S + MARGIN_S for rank in (0, 2, 3))
    # All tell rank 0, and rank 2 exchanges messages with rank 1. Nobody names one that was there.
    assert was_waiting_for(1, texts[0]) and (methods == TELLS or was_waiting_for(1, texts[2]))
    assert not any(was_waiting_for(healthy, texts[rank]) for rank in (0, 2, 3) for healthy in (0, 2, 3))
    # When it comes, all others have gone.
    assert texts[1].endswith('; no longer reachable: ranks 0, 2, 3')


def test_no_rank_waits_longer_than_the_timeout_of_the_group_where_others_come_one_by_one():
    texts, seconds = zip(
        *run_sending_ranks(stall, 4, TELLS, 1, (0, 0, 0.6 * TIMEOUT_S, 1.2 * TIMEOUT_S), init_world=False))
    assert all(text.startswith(UNTOUCHED) for text in texts) and was_waiting_for(1, texts[0])
    assert all(seconds[rank] < TIMEOUT_S + MARGIN_S for rank in (0, 2, 3))
