# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the ranks of a transfer do when one of them refuses, or when they disagree: real gloo processes.

Every rank learns of it and of the cause, before anything was written, and all can go on.
"""

import re

import numpy as np
import torch

from deepspeed.checkpoint.affine_transfer_executor import TransferEndpoints
from unit.checkpoint.transfer_cases import line_plan
from unit.checkpoint.transfer_four_ranks import (ENDPOINTS, SEGMENTS, assert_moved, assert_untouched, buffers_of,
                                                 executor_of, plan_of)
from unit.checkpoint.transfer_groups import text_of
from unit.ranks import run_ranks

# The shards of rank 1, what else it passes in their place, None for nothing, and the cause that all ranks are told.
V_SOURCE, W_SOURCE, V_TARGET, W_TARGET = ('source', 'v', 1), ('source', 'w', 1), ('target', 'v', 0), ('target', 'w', 0)
MEMORY = torch.arange(15.)
LOW, HIGH = MEMORY[:8], MEMORY[7:]
NONE = 'is missing or empty: this rank holds a shard of shape (8,)'
SPOILED = [
    ((W_SOURCE, None), f'the source buffer of location 1 of w {NONE}'),
    ((W_TARGET, None), f'the target buffer of location 0 of w {NONE}'),
    ((V_SOURCE, LOW[:0]), f'the source buffer of location 1 of v {NONE}'),
    ((('source', 'w', 0), LOW),
     "the source buffer of location 0 of w is foreign: this rank's source locations are [1]"),
    ((('target', 'v', 1), LOW),
     "the target buffer of location 1 of v is foreign: this rank's target locations are [0]"),
    ((('target', 'u', 0), LOW),
     'the target buffer of location 0 of u is foreign: this rank has no target of that name'),
    ((W_SOURCE, LOW.double()), 'the source buffer of location 1 of w has dtype torch.float64, expected torch.float32'),
    ((W_TARGET, LOW.bfloat16()),
     'the target buffer of location 0 of w has dtype torch.bfloat16, expected torch.float32'),
    ((W_SOURCE, MEMORY[:7]), 'the source buffer of location 1 of w has shape (7,), expected (8,)'),
    ((W_TARGET, MEMORY[:7]), 'the target buffer of location 0 of w has shape (7,), expected (8,)'),
    ((W_SOURCE, MEMORY[:1].expand(8)),
     'the source buffer of location 1 of w is expanded or overlaps itself, as far as strides tell, each of which must '
     'step over what the smaller ones reach: shape (8,), strides (0,)'),
    ((W_SOURCE, LOW), (W_TARGET, LOW[:]),
     'the source buffer of location 1 of w and the target buffer of location 0 of w share memory'),
    ((V_SOURCE, LOW), (W_TARGET, HIGH),
     'the source buffer of location 1 of v and the target buffer of location 0 of w share memory'),
    ((V_TARGET, LOW), (W_TARGET, HIGH),
     'the target buffer of location 0 of v and the target buffer of location 0 of w share memory'),
    ((W_TARGET, LOW.to('meta')),
     'the target buffer of location 0 of w is on device meta, expected host memory (there is no accelerator)'),
    ((W_SOURCE[:2], [LOW]), 'the source buffers of w must be a dict, not a list'),
    ((W_SOURCE, LOW.numpy()), 'the source buffer of location 1 of w is no strided tensor but a ndarray'),
]


def spoil(buffers, changes):
    for (*way, last), value in changes:
        inner = buffers
        for key in way:
            inner = inner.setdefault(key, {})
        inner[last] = value
        if value is None:
            del inner[last]


def host_tensors(buffers):
    return [
        tensor for side in buffers.values() for by_location in side.values() if isinstance(by_location, dict)
        for tensor in by_location.values() if isinstance(tensor, torch.Tensor) and tensor.is_cpu
    ]


def refuse_each_kind(rank):
    executor = executor_of(plans={'v': plan_of(), 'w': plan_of()})
    texts = []
    for *changes, cause in SPOILED:
        buffers = dict(zip(('source', 'target'), buffers_of(rank, names=('v', 'w'))))
        if rank == 1:
            spoil(buffers, changes)
        before = [tensor.clone() for tensor in host_tensors(buffers)]
        texts.append(text_of(lambda: executor.execute(*buffers.values())))
        assert all(map(torch.equal, host_tensors(buffers), before)), cause
        sources, targets = buffers_of(rank, names=('v', 'w'))
        executor.execute(sources, targets)
        assert_moved(rank, targets)
    return texts


def test_every_rank_refuses_with_the_cause_of_the_rank_that_did_and_can_go_on():
    by_rank = run_ranks(refuse_each_kind, 4)
    for (*_, cause), *texts in zip(SPOILED, *by_rank, strict=True):
        assert texts == [f'transfer refused before it began: rank 1: {cause}'] * 4


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

FOUR_SETTINGS = dict(budget=128, max_active_peers=1, dtype=torch.bfloat16, source_dtype=torch.float64)
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
    'four settings': FOUR_SETTINGS,
    'four settings and another name': dict(plans={'v': plan_of()}, **FOUR_SETTINGS),
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
    settings = '; '.join(told[kind] for kind in ('budget', 'dtype', 'active peers', 'source dtype'))
    assert told['four settings'] == settings
    assert told['four settings and another name'] == settings + '; and 2 more'


def disagree_in_numbers_of_numpy(rank):
    numbers = map(np.int64, (0, 4 * rank, 0, 0, 4))
    return text_of(
        lambda: executor_of(plans={'w': plan_of(tuple(numbers))}, endpoints=TransferEndpoints({0: 0}, {0: 1})))


def test_plans_of_numpy_integers_are_told_apart_like_others():
    assert run_ranks(disagree_in_numbers_of_numpy, 2) == [
        'ranks disagree about the transfer schedule: rank 0 sends 1 segments of 4 elements to rank 1, which expects '
        '1 segments of 4 elements at other addresses, of other parameters or in another order'
    ] * 2


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


LONG_NAME = '\u00fc' * 2000


def refuse_at_length(rank):
    executor = executor_of()
    sources, targets = buffers_of(rank)
    wrong = {**sources, LONG_NAME: {0: torch.zeros(1)}} if rank == 1 else sources
    text = text_of(lambda: executor.execute(wrong, targets))
    assert_untouched(rank, 'target', targets)
    executor.execute(sources, targets)
    assert_moved(rank, targets)
    return text


def test_a_long_cause_reaches_every_rank_without_its_end_and_all_can_go_on():
    # The cut falls within a letter of two bytes, which goes with the rest.
    cause = f'the source buffer of location 0 of {LONG_NAME}'.encode()[:1024].decode(errors='ignore')
    assert len(cause.encode()) == 1023
    assert run_ranks(refuse_at_length, 4) == [f'transfer refused before it began: rank 1: {cause}'] * 4


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
    assert_untouched(rank, 'target', targets)
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
