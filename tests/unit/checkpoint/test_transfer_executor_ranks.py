# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Transfers between gloo ranks, each a process: what arrives, through which groups, from and into which memory."""

from datetime import timedelta

import torch
import torch.distributed as torch_dist

import deepspeed.comm as dist
from deepspeed.checkpoint import affine_transfer_schedule
from deepspeed.checkpoint.affine import contiguous_split_map, flat_range_map
from deepspeed.checkpoint.affine_transfer import plan_transfer
from deepspeed.checkpoint.affine_transfer_executor import (AffineTransferExecutor, StagingBudget, TransferEndpoints,
                                                           execute_transfer)
from unit.checkpoint.transfer_cases import RandomTransfer, line_plan, tensors_of
from unit.checkpoint.transfer_groups import (MESSAGES, WatchedGroup, gloo_outside_any_world, run_sending_ranks, store,
                                             world)

NAN = float('nan')

# Random transfers


def move_random_parameters(rank, seed, size):
    """One random transfer, the same on every rank but for what each rank holds of it; returns elements compared."""
    transfer = RandomTransfer(seed, size)
    affine_transfer_schedule.ALONE_BYTES_BY_BARE_ENDS = transfer.alone_bytes
    calls = []
    executor = transfer.executor(rank, WatchedGroup(world(), lambda *call: calls.append(call)))
    sources, targets = transfer.buffers(rank)
    stats = executor.execute(tensors_of(sources), tensors_of(targets))
    transfer.check(targets)
    peers = [len({args[1] for name, args in calls if name == method}) for method in MESSAGES]
    active = sum(min(count, transfer.budget.max_active_peers) for count in peers)
    assert stats.peak_host_staging_bytes <= transfer.budget.bytes_per_peer * active
    return sum(guarded.tensor.numel() for guarded in targets.values()), stats.sent_bytes, stats.received_bytes


def many_random_transfers(rank, seeds):
    moved = []
    for seed in seeds:
        try:
            moved.append(move_random_parameters(rank, seed, dist_size()))
        except Exception as error:
            raise AssertionError(f'seed {seed}: {error}') from error
    return moved


def dist_size():
    return world().size()


def test_random_transfers_between_three_ranks_bring_every_element():
    results = run_sending_ranks(many_random_transfers, 3, range(120))
    for by_rank in zip(*results):
        assert sum(sent for _, sent, _ in by_rank) == sum(received for _, _, received in by_rank)
    assert sum(compared for result in results for compared, _, _ in result) > 5000
    assert sum(sent for result in results for _, sent, _ in result) > 5000


# Groups

HALVES = plan_transfer(contiguous_split_map((6, 4), [2, 2], 1), contiguous_split_map((6, 4), [1, 5], 0))


def move_halves(group, source_ranks, target_ranks):
    """Rows on the source ranks become columns on the target ranks; True where this rank's columns are right."""
    full = torch.arange(24.).view(6, 4)
    endpoints = TransferEndpoints(dict(enumerate(source_ranks)), dict(enumerate(target_ranks)))
    rows, columns = full.split([1, 5]), full.split([2, 2], dim=1)
    sources = {place: rows[place].clone() for place, rank in endpoints.source.items() if rank == group.rank()}
    targets = {place: torch.full((6, 2), NAN) for place, rank in endpoints.target.items() if rank == group.rank()}
    stats = execute_transfer(HALVES, sources, targets, endpoints, torch.float32, group=group)
    return all(torch.equal(targets[place], columns[place]) for place in targets), stats


def two_worlds_and_a_group_over_both(rank):
    """Trainers and rollout workers have a default world each; the third group's ranks are neither world's ranks."""
    place = rank % 2
    dist_rank_in_third = 3 - rank
    torch_dist.init_process_group('gloo', store=store(f'world{rank // 2}', 2), rank=place, world_size=2)
    third = gloo_outside_any_world('third', dist_rank_in_third, 4)
    bare = move_halves(third, source_ranks=(3, 2), target_ranks=(1, 0))[0]
    made, _ = torch_dist.distributed_c10d._new_process_group_helper(4,
                                                                    dist_rank_in_third, [],
                                                                    'gloo',
                                                                    store('fourth', 4),
                                                                    group_name='fourth',
                                                                    timeout=timedelta(seconds=30))
    wrapped = move_halves(made, source_ranks=(3, 2), target_ranks=(1, 0))[0]
    torch_dist.barrier()
    return bare, wrapped, torch_dist.get_rank(), third.rank()


def test_a_group_outside_two_default_worlds_carries_a_transfer():
    results = run_sending_ranks(two_worlds_and_a_group_over_both, 4, init_world=False)
    assert results == [(True, True, 0, 3), (True, True, 1, 2), (True, True, 0, 1), (True, True, 1, 0)]


def group_without_any_world(rank):
    return move_halves(gloo_outside_any_world('only', rank, 3), (0, 1), (2, 2))[0], torch_dist.is_initialized()


def test_a_group_without_any_default_world_carries_a_transfer():
    assert run_sending_ranks(group_without_any_world, 3, init_world=False) == [(True, False)] * 3


def subgroup_and_bystander(rank):
    group = torch_dist.new_group([3, 1])
    if rank in (1, 3):
        return move_halves(group, (0, 1), (1, 0))[0]
    outside = move_halves(world_of_two(rank), (0, 0), (1, 1))[0]
    return outside


def world_of_two(rank):
    return gloo_outside_any_world('others', rank // 2, 2)


def test_a_subgroup_is_addressed_by_its_own_ranks():
    assert run_sending_ranks(subgroup_and_bystander, 4) == [True] * 4


def world_group_of_deepspeed(rank):
    dist.init_distributed('gloo', auto_mpi_discovery=False, verbose=False)
    return move_halves(dist.new_group([0, 1]), (0, 1), (1, 0))[0]


def test_a_group_made_by_deepspeed_comm_carries_a_transfer():
    assert run_sending_ranks(world_group_of_deepspeed, 2) == [True, True]


def message_of_the_owner_around_a_transfer(rank):
    """The owner of the group sends 4 elements before an execute that moves 4, and receives them after it."""
    group, of_owner, buffer = world(), torch.arange(4.) * (1 - rank), (torch.arange(4.) + 10) * (1 - rank)
    executor = AffineTransferExecutor(line_plan((0, 0, 0, 0, 4)),
                                      TransferEndpoints({0: 0}, {0: 1}),
                                      dtype=torch.float32,
                                      group=group)
    sent = [group.send([of_owner], 1, 0)] if rank == 0 else []
    executor.execute({0: buffer} if rank == 0 else {}, {0: buffer} if rank else {})
    for work in sent or [group.recv([of_owner], 0, 0)]:
        work.wait()
    return of_owner.tolist(), buffer.tolist()


def test_a_message_of_the_groups_owner_that_is_pending_meanwhile_is_kept_apart():
    expected = ([0, 1, 2, 3], [10, 11, 12, 13])
    assert run_sending_ranks(message_of_the_owner_around_a_transfer, 2, timeout=60) == [expected] * 2


# What a rank does


def holders_of_neither_end(rank):
    correct, stats = move_halves(world(), (1, 3), (3, 1))
    return correct, stats.segments, stats.rounds, stats.sent_bytes + stats.received_bytes


def test_ranks_that_hold_neither_end_take_part_without_traffic():
    results = run_sending_ranks(holders_of_neither_end, 4)
    assert results[0] == results[2] == (True, 0, 0, 0)
    assert all(correct for correct, *_ in results)


def uneven_and_empty_shards(rank):
    """6 elements from shards of [2, 2, 2, 0] to shards of 2 on 3 ranks; the empty ones are passed all the same."""
    plan = plan_transfer(contiguous_split_map((6, ), [2, 2, 2], 0), contiguous_split_map((6, ), [2, 2, 2, 0], 0))
    endpoints = TransferEndpoints({place: place for place in range(4)}, {0: 2, 1: 3, 2: 0})
    target = torch.full((2, ), NAN)
    targets = {place: target for place, owner in endpoints.target.items() if owner == rank}
    targets.setdefault(7, torch.zeros(0))
    execute_transfer(plan, {rank: torch.arange(6.)[2 * rank:2 * rank + 2]},
                     targets,
                     endpoints,
                     torch.float32,
                     group=world())
    return target.tolist() if 7 not in endpoints.target and len(targets) == 2 else None


def test_empty_shards_send_nothing_and_are_never_missing():
    results = run_sending_ranks(uneven_and_empty_shards, 4)
    assert results == [[4, 5], None, [0, 1], [2, 3]]


def source_and_target_on_both_ranks(rank):
    source_map = flat_range_map((100, ), {0: (0, 60), 1: (60, 40)})
    target_map = flat_range_map((100, ), {0: (0, 50), 1: (50, 50)})
    values, target = torch.arange(100.), torch.full((50, ), NAN, dtype=torch.bfloat16)
    endpoints = TransferEndpoints({0: 0, 1: 1}, {0: 0, 1: 1})
    executor = AffineTransferExecutor(plan_transfer(target_map, source_map),
                                      endpoints,
                                      dtype=torch.bfloat16,
                                      source_dtype=torch.float32,
                                      budget=StagingBudget(8),
                                      group=world())
    stats = executor.execute({rank: values.split([60, 40])[rank].clone()}, {rank: target})
    assert torch.equal(target, values.split(50)[rank].to(torch.bfloat16))
    return (stats.segments, stats.chunks, stats.rounds, stats.local_copy_bytes, stats.sent_bytes, stats.received_bytes,
            stats.peak_host_staging_bytes, stats.peak_device_staging_bytes)


def test_the_statistics_say_what_each_rank_did():
    """10 bfloat16 elements go from rank 0 to rank 1 in 4-byte messages, two of which fit the budget of 8 bytes; rank 1
    receives them as they travel, straight into its buffer."""
    assert run_sending_ranks(source_and_target_on_both_ranks, 2) == [(2, 6, 5, 100, 20, 0, 8, 0),
                                                                     (2, 6, 5, 80, 0, 20, 0, 0)]


def contiguous_both_ends(rank):
    numel = 3 * (1 << 19)
    messages = []
    group = WatchedGroup(world(), lambda name, args: messages.extend(args[0]) if name in MESSAGES else None)
    plan = line_plan((0, 8, 0, 4, numel), source_numels={0: numel + 8}, target_numels={0: numel + 4})
    values = torch.arange(numel + 8.)
    buffer = values.clone() if rank == 0 else torch.zeros(numel + 4)
    executor = AffineTransferExecutor(plan, TransferEndpoints({0: 0}, {0: 1}), dtype=torch.float32, group=group)
    stats = executor.execute({0: buffer} if rank == 0 else {}, {0: buffer} if rank else {})
    begin = buffer.data_ptr() + (4 if rank else 8) * 4
    assert rank == 0 or torch.equal(buffer[4:], values[8:])
    inside = [begin <= sent.data_ptr() and sent.data_ptr() + sent.nbytes <= begin + numel * 4 for sent in messages]
    return all(inside), sum(sent.numel() for sent in messages), stats.peak_host_staging_bytes


def test_long_runs_that_are_contiguous_and_need_no_conversion_travel_from_and_into_the_buffers():
    assert run_sending_ranks(contiguous_both_ends, 2) == [(True, 3 * (1 << 19), 0)] * 2


def long_run_and_two_short_ones(rank):
    numel = 1 << 17
    plan = line_plan((0, 0, 0, 0, numel), (0, numel + 1, 0, numel + 1, 3), (0, numel + 8, 0, numel + 8, 4))
    buffer = torch.arange(numel + 12.) * (1 - rank)
    executor = AffineTransferExecutor(plan, TransferEndpoints({0: 0}, {0: 1}), dtype=torch.float32, group=world())
    stats = executor.execute({0: buffer} if rank == 0 else {}, {0: buffer} if rank else {})
    assert buffer.count_nonzero() == numel + (11 if rank == 0 else 6)
    return stats.rounds, stats.peak_host_staging_bytes


def test_slots_are_as_long_as_what_is_packed_into_them():
    assert run_sending_ranks(long_run_and_two_short_ones, 2) == [(2, 7 * 4)] * 2


def same_plan_into_a_window(rank):
    """The sender cannot know that the receiver's buffer is a window: it sends from its buffer all the same."""
    shape = (1024, 1024)
    plan = plan_transfer(contiguous_split_map(shape, [1024], 0), contiguous_split_map(shape, [1024], 0))
    values, base = torch.arange(float(1 << 20)).view(shape), torch.zeros(1024, 1030)
    executor = AffineTransferExecutor(plan,
                                      TransferEndpoints({0: 0}, {0: 1}),
                                      dtype=torch.float32,
                                      budget=StagingBudget(1 << 21),
                                      group=world())
    stats = executor.execute({0: values} if rank == 0 else {}, {0: base[:, 3:1027]} if rank else {})
    if rank:
        assert torch.equal(base[:, 3:1027], values) and not base[:, :3].any() and not base[:, 1027:].any()
    return stats.peak_host_staging_bytes


def test_only_the_end_with_a_strided_buffer_stages():
    assert run_sending_ranks(same_plan_into_a_window, 2) == [0, 1 << 21]
