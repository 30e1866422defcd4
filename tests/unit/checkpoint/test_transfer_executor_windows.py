# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which messages travel at the same time: values first, then what real gloo ranks hand to their transport."""

from collections import Counter
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.affine import contiguous_split_map
from deepspeed.checkpoint.affine_transfer import plan_transfer
from deepspeed.checkpoint.affine_transfer_executor import (AffineTransferExecutionError, AffineTransferExecutor,
                                                           StagingBudget, TransferEndpoints)
from deepspeed.checkpoint.affine_transfer_transport import ProcessGroupTransport
from deepspeed.checkpoint.affine_transfer_windows import windows_of
from unit.checkpoint.transfer_cases import line_plan
from unit.checkpoint.transfer_groups import run_sending_ranks, world


def windows_by_rank(counts, size, max_active_peers):
    """The windows of every rank when sender s has ``counts[s, t]`` messages, (s, t, 0) and on, for receiver t."""
    queues = {pair: [(*pair, number) for number in range(count)] for pair, count in counts.items() if count}
    return [
        windows_of(
            SimpleNamespace(sends={
                t: queue
                for (s, t), queue in queues.items() if s == rank
            },
                            receives={
                                s: queue
                                for (s, t), queue in queues.items() if t == rank
                            }), rank, size, max_active_peers) for rank in range(size)
    ]


def all_counts(data, size):
    pairs = [(s, t) for s in range(size) for t in range(size) if s != t]
    return {pair: data.draw(st.sampled_from([0, 0, 1, 2, 5])) for pair in pairs}


def test_peers_take_turns_by_their_distance():
    windows = windows_by_rank({(0, t): 1 for t in range(1, 6)}, 6, 2)
    assert [[travel.peer for travel in window.sends] for window in windows[0]] == [[1, 2], [3, 4], [5]]
    assert [len(side) for side in windows] == [3, 1, 1, 1, 1, 1]


def test_the_messages_of_a_pair_are_in_one_window_after_another():
    windows = windows_by_rank({(0, 1): 3, (2, 0): 2}, 3, 16)[0]
    assert [[travel.message for travel in window.sends] for window in windows] == [[(0, 1, k)] for k in range(3)]
    assert [[travel.message for travel in window.receives] for window in windows] == [[(2, 0, 0)], [(2, 0, 1)], []]


@given(data=st.data(), size=st.integers(1, 7), max_active_peers=st.integers(1, 7))
def test_every_message_is_in_one_window_at_each_end_and_no_window_has_too_many(data, size, max_active_peers):
    counts = all_counts(data, size)
    by_rank = windows_by_rank(counts, size, max_active_peers)
    for end, side in enumerate(('sends', 'receives')):
        seen = Counter()
        for rank, windows in enumerate(by_rank):
            for window in windows:
                travels = getattr(window, side)
                peers = len({pair for pair, count in counts.items() if count and pair[end] == rank})
                assert len(travels) <= min(max_active_peers, peers)
                assert sorted(travel.place for travel in travels) == sorted({travel.place for travel in travels})
                assert all(0 <= travel.place < min(max_active_peers, peers) for travel in travels)
                assert all(travel.message[end] == rank != travel.peer == travel.message[1 - end] for travel in travels)
                seen.update(travel.message for travel in travels)
        assert seen == Counter((*pair, number) for pair, count in counts.items() for number in range(count))
    sent, received = ({
        travel.message: window.number
        for windows in by_rank
        for window in windows
        for travel in getattr(window, side)
    } for side in ('sends', 'receives'))
    assert sent == received
    assert all(sent[s, t, k] == sent[s, t, 0] + k for s, t, k in sent)


@given(data=st.data(), size=st.integers(2, 7), max_active_peers=st.integers(1, 7))
def test_ranks_that_finish_one_window_before_the_next_never_wait_for_one_another(data, size, max_active_peers):
    by_rank = windows_by_rank(all_counts(data, size), size, max_active_peers)
    reached = [0] * size
    posted = Counter()

    def messages(rank):
        return [travel.message for side in by_rank[rank][reached[rank]][:2] for travel in side]

    def post(rank):
        if reached[rank] < len(by_rank[rank]):
            posted.update(messages(rank))

    for rank in range(size):
        post(rank)
    moved = True
    while moved:
        moved = False
        for rank in range(size):
            # A message is posted by both of its ends when it counts twice.
            if reached[rank] < len(by_rank[rank]) and all(posted[message] == 2 for message in messages(rank)):
                reached[rank] += 1
                post(rank)
                moved = True
    assert reached == [len(windows) for windows in by_rank]


@pytest.mark.parametrize(
    'option', [dict(max_active_peers=0),
               dict(max_active_peers=1.5),
               dict(bytes_per_peer=-1),
               dict(share_memory=1)])
def test_a_budget_that_cannot_be_meant_is_refused(option):
    with pytest.raises(AffineTransferExecutionError, match='must be (a positive integer|a bool)'):
        StagingBudget(**option)


# Real ranks


class CountingTransport(ProcessGroupTransport):
    """Counts the messages that are handed over at once and that are under way, and notes the peers of each window."""

    def __init__(self, group):
        super().__init__(group)
        self.handed_over, self.under_way, self.most_under_way = [], 0, 0
        self.peers = []

    def exchange(self, sends, receives):
        self.handed_over.append(len(sends) + len(receives))
        self.peers.append((sorted(peer for _, peer in sends), sorted(peer for _, peer in receives)))
        self.under_way += len(sends) + len(receives)
        self.most_under_way = max(self.most_under_way, self.under_way)
        return tuple([Counted(self, message) for message in side] for side in super().exchange(sends, receives))


class Counted:

    def __init__(self, transport, message):
        self._transport, self._message = transport, message

    def wait(self):
        self._message.wait()
        self._transport.under_way -= 1


def random_runs(size, count, largest_numel, idle):
    """``count`` runs of mixed lengths between the ranks that are not idle, and the size of each rank's shards."""
    rng = numpy.random.default_rng(5)
    busy = [rank for rank in range(size) if rank not in idle]
    segments, numels = [], ({}, {})
    for numel in numpy.exp(rng.uniform(0, numpy.log(largest_numel), size=count)).astype(int):
        source, target = (int(rank) for rank in rng.choice(busy, size=2))
        segments.append((source, numels[0].get(source, 0), target, numels[1].get(target, 0), int(numel)))
        for side, place in zip(numels, (source, target)):
            side[place] = side.get(place, 0) + int(numel)
    return segments, numels


def thousand_runs(rank, size, budget, largest_numel):
    segments, numels = random_runs(size, 1000, largest_numel, idle=(3, ))
    same = {place: place for place in range(size)}
    transport = CountingTransport(world())
    executor = AffineTransferExecutor(line_plan(*segments, source_numels=numels[0], target_numels=numels[1]),
                                      TransferEndpoints(same, same),
                                      dtype=torch.int32,
                                      budget=budget,
                                      group=transport)
    sources = {place: torch.arange(numel, dtype=torch.int32) * 3 + place for place, numel in numels[0].items()}
    targets = {rank: torch.full((numels[1][rank], ), -7, dtype=torch.int32)} if rank in numels[1] else {}
    stats = executor.execute({rank: sources[rank]} if rank in sources else {}, targets)
    for source, source_offset, place, target_offset, numel in segments:
        if place == rank:
            assert torch.equal(targets[rank][target_offset:target_offset + numel],
                               sources[source][source_offset:source_offset + numel])
    assert transport.under_way == 0
    return max(transport.handed_over, default=0), transport.most_under_way, transport.peers, stats


@pytest.mark.parametrize('size, budget, largest_numel', [(5, StagingBudget(512, 2), 300),
                                                         (4, StagingBudget(1 << 20, 1), 1 << 18)])
def test_a_thousand_runs_travel_in_small_groups_while_a_rank_is_idle(size, budget, largest_numel):
    """Runs of up to 1,200 bytes, and of up to 1 MiB. Without turns, a busy rank has 3 or 2 peers in each direction."""
    results = run_sending_ranks(thousand_runs, size, size, budget, largest_numel)
    cap = 2 * budget.max_active_peers
    assert all(0 < result[0] <= cap and result[1] <= 2 * cap for rank, result in enumerate(results) if rank != 3)
    assert results[3][:3] == (0, 0, [])
    for rank, (_, _, peers, stats) in enumerate(results):
        assert stats.rounds == len(peers)
        active = [
            min(budget.max_active_peers, len({peer
                                              for window in peers
                                              for peer in window[side]})) for side in (0, 1)
        ]
        assert stats.peak_host_staging_bytes <= budget.bytes_per_peer * sum(active)


def strided_columns(rank):
    """6 rows of 16 bytes, strided at both ends, two rows to a message: the most messages in a window and under way."""
    plan = plan_transfer(contiguous_split_map((6, 8), [4, 4], 1), contiguous_split_map((6, 8), [6], 0))
    transport = CountingTransport(world())
    executor = AffineTransferExecutor(plan,
                                      TransferEndpoints({0: 0}, {
                                          0: 0,
                                          1: 1
                                      }),
                                      dtype=torch.float32,
                                      budget=StagingBudget(64),
                                      group=transport)
    full, base = torch.arange(48.).view(6, 8), torch.zeros(6, 5)
    executor.execute({0: full} if rank == 0 else {}, {rank: base[:, :4]})
    assert torch.equal(base[:, :4], full.split(4, dim=1)[rank])
    assert transport.under_way == 0
    return max(transport.handed_over), transport.most_under_way


def test_a_window_is_packed_while_another_one_travels():
    assert run_sending_ranks(strided_columns, 2) == [(1, 2)] * 2


def everybody_to_everybody(rank, max_active_peers):
    """One short run for every pair of 4 ranks: the number of bytes that each rank stages."""
    segments = [(source, 8 * target, target, 8 * source, 8) for source in range(4) for target in range(4)]
    numels = dict.fromkeys(range(4), 32)
    same = {place: place for place in range(4)}
    executor = AffineTransferExecutor(line_plan(*segments, source_numels=numels, target_numels=numels),
                                      TransferEndpoints(same, same),
                                      dtype=torch.bfloat16,
                                      source_dtype=torch.float32,
                                      budget=StagingBudget(16, max_active_peers),
                                      group=world())
    target = torch.zeros(32, dtype=torch.bfloat16)
    stats = executor.execute({rank: torch.arange(32.) + 32 * rank}, {rank: target})
    assert target.tolist() == [32 * source + 8 * rank + index for source in range(4) for index in range(8)]
    return stats.rounds, stats.peak_host_staging_bytes


@pytest.mark.parametrize('max_active_peers, rounds', [(1, 6), (2, 4), (16, 2)])
def test_staging_is_for_active_peers_alone(max_active_peers, rounds):
    """8 converted elements take two messages of 8 bytes; the receiver gets them into its buffer."""
    expected = (rounds, 16 * min(3, max_active_peers))
    assert run_sending_ranks(everybody_to_everybody, 4, max_active_peers) == [expected] * 4
