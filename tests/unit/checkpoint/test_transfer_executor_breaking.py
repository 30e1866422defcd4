# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What surrounds a transfer and must not change it: other threads, default devices, autograd, odd tensors, Ctrl-C."""

import gc
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import deepspeed
from deepspeed.checkpoint.affine_transfer_agreement import Terms
from deepspeed.checkpoint.affine_transfer_executor import (AffineTransferExecutionError, AffineTransferExecutor,
                                                           StagingBudget, TransferEndpoints)
from deepspeed.checkpoint.affine_transfer_mover import Mover
from deepspeed.checkpoint.affine_transfer_transport import LoneTransport, ProcessGroupTransport
from unit.checkpoint.transfer_cases import line_plan
from unit.checkpoint.transfer_groups import MESSAGES, run_sending_ranks, text_of, with_fault, world

NUMEL = 40
LINE = line_plan((0, 0, 0, 0, NUMEL), source_numels={0: NUMEL}, target_numels={0: NUMEL})
HERE = TransferEndpoints({0: 0}, {0: 0})
ACROSS = TransferEndpoints({0: 0}, {0: 1})


def across(group=None):
    return AffineTransferExecutor(LINE, ACROSS, dtype=torch.float32, budget=StagingBudget(16), group=group or world())


def strided(values):
    """Every second element of a tensor, which can only be packed."""
    return torch.stack((values, torch.zeros_like(values)), 1)[:, 0]


def move(rank, executor, source, target):
    return executor.execute({0: source} if rank == 0 else {}, {0: target} if rank == 1 else {})


def thirds():
    return torch.arange(float(NUMEL)) / 3


# Other executors of the group


def execute_while_another_one_is_midway(rank):
    is_midway = threading.Event()

    def let_the_other_begin():
        is_midway.set()
        # The receiver waits for more of this executor's messages, and would take the other one's for them.
        time.sleep(0.3 if rank == 0 else 0)

    group = with_fault(world(), MESSAGES, 5, let_the_other_begin)
    first, targets = across(group), [strided(torch.zeros(NUMEL)) for _ in range(2)]

    def move_through_another():
        is_midway.wait()
        move(rank, across(group), strided(-thirds()), targets[1])

    thread = threading.Thread(target=move_through_another)
    thread.start()
    move(rank, first, strided(thirds()), targets[0])
    thread.join()
    return [torch.equal(target, values) for target, values in zip(targets, (thirds(), -thirds()))]


def test_executors_of_one_group_take_turns_in_several_threads():
    assert run_sending_ranks(execute_while_another_one_is_midway, 2, timeout=30)[1] == [True, True]


# What the process has set for all tensors


def move_and_refuse(rank, context):
    """Whether the values arrived where executor and slots were made in the context, and the text of a refusal."""
    source, target = strided(thirds()), strided(torch.zeros(NUMEL))
    with context:
        executor = across()
        stats = move(rank, executor, source, target)
        text = text_of(lambda: move(rank, executor, source, target[:4]))
        text += text_of(lambda: AffineTransferExecutor(
            LINE, ACROSS, dtype=torch.float32, budget=StagingBudget(16 + rank), group=world()))
    return rank == 0 or torch.equal(target, thirds()), stats.peak_host_staging_bytes, 'rank 1: ' in text


def move_within_contexts(rank):
    deepspeed.init_distributed('gloo')
    config = {'train_batch_size': 2, 'bf16': {'enabled': True}, 'zero_optimization': {'stage': 3}}
    return [
        move_and_refuse(rank, context)
        for context in (torch.device('meta'), deepspeed.zero.Init(config_dict_or_path=config))
    ]


@pytest.mark.parametrize('shares_memory, stagings', [(False, [16, 16]), (True, [16, 0])])
def test_a_default_device_and_zero_init_change_nothing(shares_memory, stagings):
    expected = [[(True, staging, True)] * 2 for staging in stagings]
    assert run_sending_ranks(move_within_contexts, 2, shares_memory=shares_memory) == expected


# Autograd


def overwrite_what_backward_needs(rank):
    weight = torch.ones(NUMEL, requires_grad=True)
    loss = (weight * weight).sum()
    move(rank, across(), torch.zeros(NUMEL), weight)
    if rank == 0:
        return None
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        loss.backward()


def test_autograd_notices_values_that_were_received_into_a_tensor_it_saved():
    run_sending_ranks(overwrite_what_backward_needs, 2)


# Tensors that are not what they show


class Wrapper(torch.Tensor):
    """A tensor without storage of its own, and without the methods that torch's own wrappers have."""

    @staticmethod
    def __new__(cls, tensor):
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype, device=tensor.device)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f'{function} of a wrapper')


def fake_tensor():
    with FakeTensorMode():
        return torch.zeros(NUMEL)


def shrunk_tensor():
    tensor = torch.zeros(NUMEL)
    tensor.untyped_storage().resize_(NUMEL)
    return tensor


@pytest.mark.parametrize('tensor, words',
                         [(Wrapper(torch.zeros(NUMEL)), 'does not store the values it shows.*this Wrapper'),
                          (fake_tensor(), 'does not store the values it shows.*this FakeTensor'),
                          (shrunk_tensor(), f'reaches over {4 * NUMEL} bytes of a storage of {NUMEL}')])
def test_a_buffer_without_storage_of_its_own_is_refused(tensor, words):
    executor = AffineTransferExecutor(LINE, HERE, dtype=torch.float32)
    for source, target in ((tensor, torch.zeros(NUMEL)), (torch.zeros(NUMEL), tensor)):
        with pytest.raises(AffineTransferExecutionError, match=f'transfer refused before it began: .*{words}'):
            executor.execute({0: source}, {0: target})
    executor.execute({0: torch.zeros(NUMEL)}, {0: torch.zeros(NUMEL)})


def test_quantized_buffers_whose_scales_may_differ_are_refused():
    source, target = (torch.quantize_per_tensor(torch.ones(NUMEL), scale, 0, torch.qint8) for scale in (0.1, 0.5))
    executor = AffineTransferExecutor(LINE, HERE, dtype=torch.qint8)
    with pytest.raises(AffineTransferExecutionError, match='does not store the values it shows'):
        executor.execute({0: source}, {0: target})


# Ctrl-C and signal handlers


def test_an_executor_that_was_interrupted_twice_says_so_when_used_again():
    executor = AffineTransferExecutor(LINE, HERE, dtype=torch.float32)
    buffers = ({0: torch.zeros(NUMEL)}, {0: torch.zeros(NUMEL)})
    with mock.patch.object(Mover, 'move', side_effect=KeyboardInterrupt), \
            mock.patch.object(LoneTransport, 'abandon', side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            executor.execute(*buffers)
    with pytest.raises(AffineTransferExecutionError, match='no longer be used: .* are undefined: KeyboardInterrupt'):
        executor.execute(*buffers)


def test_a_call_from_within_another_one_fails_and_does_not_wait_for_it():
    executor = AffineTransferExecutor(LINE, HERE, dtype=torch.float32)
    buffers = ({0: torch.zeros(NUMEL)}, {0: torch.zeros(NUMEL)})
    with mock.patch.object(Mover, 'move', side_effect=lambda bound: executor.execute(*buffers)):
        with pytest.raises(AffineTransferExecutionError, match='this thread is in a transfer over the same group'):
            executor.execute(*buffers)


def test_a_refusal_of_another_transfer_within_one_is_a_failure_of_that_one():
    """As where a signal handler's own transfer is refused: what this one has written so far is not untouched."""
    executor, other = (AffineTransferExecutor(LINE, HERE, dtype=torch.float32) for _ in range(2))
    buffers = ({0: torch.zeros(NUMEL)}, {0: torch.zeros(NUMEL)})
    with mock.patch.object(Mover, 'move', side_effect=lambda bound: other.execute({}, {})):
        with pytest.raises(AffineTransferExecutionError,
                           match='^transfer failed after .* are undefined: .* is missing'):
            executor.execute(*buffers)
    with pytest.raises(AffineTransferExecutionError, match='no longer be used'):
        executor.execute(*buffers)
    other.execute(*buffers)


# Transports that are not what they seem


class SilentTransport(LoneTransport):
    """Gathers nothing and says nothing, as a library whose communicator was aborted."""
    silent = False

    def all_gather(self, table, row):
        if not self.silent:
            super().all_gather(table, row)


def test_rows_of_an_earlier_exchange_are_not_taken_for_an_answer():
    transport = SilentTransport()
    executor = AffineTransferExecutor(LINE, HERE, dtype=torch.float32, group=transport)
    executor.execute({0: thirds()}, {0: torch.zeros(NUMEL)})
    transport.silent = True
    with pytest.raises(AffineTransferExecutionError, match='targets are untouched.*brought no rows back'):
        executor.execute({0: thirds()}, {0: torch.zeros(NUMEL)})


def disagree_about_memory(rank):
    transport = ProcessGroupTransport(world())
    transport.memory = frozenset(('host', 'device') if rank else ('host', ))
    return text_of(lambda: across(transport))


def test_ranks_whose_messages_would_lie_in_different_memory_are_told():
    for text in run_sending_ranks(disagree_about_memory, 2):
        assert 'memory of messages: host on rank 0, device and host on rank 1' in text


def disagree_about_a_setting(rank):
    with mock.patch('deepspeed.checkpoint.affine_transfer_part.cutting_of_messages', lambda: f'rule {rank}'):
        told = [text_of(lambda: across())]
    with_more = (lambda settings, *pairs: Terms({**settings, 'a later setting': '1'}, *pairs)) if rank else Terms
    with mock.patch('deepspeed.checkpoint.affine_transfer_part.Terms', with_more):
        told.append(text_of(lambda: across()))
    target = torch.zeros(NUMEL)
    move(rank, across(), thirds(), target)
    return told, rank == 0 or torch.equal(target, thirds())


def test_ranks_with_another_version_are_told_and_can_go_on():
    for (rule, setting), moved in run_sending_ranks(disagree_about_a_setting, 2):
        assert rule.endswith('cutting of messages: rule 0 on rank 0, rule 1 on rank 1')
        assert setting.endswith('a later setting: unknown on rank 0, 1 on rank 1')
        assert moved


class RefusingTransport(LoneTransport):
    """Cannot give up either."""

    def abandon(self):
        raise RuntimeError('the context is lost')


def test_a_failure_is_told_even_if_giving_up_fails():
    executor = AffineTransferExecutor(LINE, HERE, dtype=torch.float32, group=RefusingTransport())
    buffers = {0: thirds()}, {0: torch.zeros(NUMEL)}
    with mock.patch.object(Mover, '_start', side_effect=RuntimeError('the copy failed')):
        told = text_of(lambda: executor.execute(*buffers))
    expected = 'targets are undefined: the copy failed; giving up failed as well: the context is lost'
    assert told.endswith(expected)
    assert text_of(lambda: executor.execute(*buffers)).endswith(expected)


@pytest.mark.parametrize(
    'dtypes', [dict(dtype=torch.int4), dict(dtype=torch.float32, source_dtype=torch.bits8)], ids=['int4', 'bits8'])
def test_dtypes_that_torch_cannot_copy_are_refused_at_the_construction(dtypes):
    told = text_of(lambda: AffineTransferExecutor(LINE, HERE, **dtypes))
    assert 'transfer refused before it began: rank 0: torch cannot copy values of ' in told


def call_with_a_target_of(executor, numel):
    """A weak reference to the target, and whether the call was refused."""
    target = torch.zeros(numel)
    try:
        executor.execute({0: thirds()}, {0: target})
    except AffineTransferExecutionError:
        return weakref.ref(target), True
    return weakref.ref(target), False


def test_an_executor_keeps_no_buffer_alive_after_a_call():
    """Not even until garbage is collected."""
    executor = AffineTransferExecutor(LINE, HERE, dtype=torch.float32)
    gc.disable()
    try:
        for numel in (NUMEL, NUMEL - 1, NUMEL):
            kept, is_refused = call_with_a_target_of(executor, numel)
            assert kept() is None and is_refused == (numel != NUMEL)
    finally:
        gc.enable()


def test_an_executor_that_failed_keeps_no_buffer():
    transport = SilentTransport()
    executor = AffineTransferExecutor(LINE, HERE, dtype=torch.float32, group=transport)
    target = torch.zeros(NUMEL)
    with mock.patch.object(Mover, '_start', side_effect=RuntimeError('the copy failed')):
        with pytest.raises(AffineTransferExecutionError, match='targets are undefined'):
            executor.execute({0: thirds()}, {0: target})
    kept = weakref.ref(target)
    del target
    gc.collect()
    assert kept() is None
