# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Streams, events and the scheduler."""

import pytest
import torch

from deepspeed.accelerator import get_accelerator
from unit.simulated_accelerator.hosts import here
from unit.simulated_accelerator.ranks import RankFailure, run_ranks
from unit.simulated_accelerator.scheduler import MODES, Deadlock, mode_of
from unit.simulated_accelerator.simulation import Simulation

RUSH, LAZY, RANDOM, STARVE, EAGER = 0, 1, 3, 5, 7
ALL_MODES = (RUSH, LAZY, RANDOM, STARVE, EAGER)


def on(stream):
    return get_accelerator().stream(stream)


def filled(value):
    """A device tensor of four elements and the stream that is about to fill it with a value."""
    tensor, stream = torch.zeros(4, device='simulated'), get_accelerator().Stream()
    stream.wait_stream(get_accelerator().current_stream())
    with on(stream):
        tensor.fill_(value)
    return tensor, stream


def late_copy(tensor):
    """What a copy of the tensor on the current stream finds, once that stream is done."""
    target = get_accelerator().pin_empty(4, dtype=torch.float32)
    target.copy_(tensor, non_blocking=True)
    get_accelerator().current_stream().synchronize()
    return target.tolist()


def test_every_second_seed_rushes_and_all_other_modes_have_their_turn():
    modes = [mode_of(seed) for seed in range(40)]
    assert modes.count('rush') == 20 and all(modes.count(mode) == 5 for mode in MODES)


def test_streams_are_not_ordered_by_themselves():
    with Simulation(LAZY, finds_races=False):
        tensor, _ = filled(1.)
        assert late_copy(tensor) == [0.] * 4


def order_by_stream(stream):
    get_accelerator().current_stream().wait_stream(stream)


def order_by_event(stream):
    event = get_accelerator().Event()
    event.record(stream)
    get_accelerator().current_stream().wait_event(event)


def order_by_event_of_current_stream(stream):
    with on(stream):
        event = get_accelerator().current_stream().record_event()
    event.wait()


def order_by_host(stream):
    event = get_accelerator().Event()
    event.record(stream)
    event.synchronize()


def order_by_polling(stream):
    event = get_accelerator().Event()
    event.record(stream)
    while not event.query():
        pass


def order_by_polling_the_stream(stream):
    while not stream.query():
        pass


ORDERS = [
    order_by_stream, order_by_event, order_by_event_of_current_stream, order_by_host, order_by_polling,
    order_by_polling_the_stream, lambda stream: stream.synchronize(), lambda stream: get_accelerator().synchronize()
]


@pytest.mark.parametrize('order', ORDERS)
@pytest.mark.parametrize('seed', ALL_MODES)
def test_what_orders_streams(order, seed):
    with Simulation(seed):
        tensor, stream = filled(1.)
        order(stream)
        assert late_copy(tensor) == [1.] * 4


def test_a_wait_is_for_the_record_before_it():
    with Simulation(LAZY, finds_races=False):
        tensor, stream = filled(1.)
        event = get_accelerator().Event()
        event.record(stream)
        get_accelerator().current_stream().wait_event(event)
        with on(stream):
            tensor.fill_(2.)
        event.record(stream)
        assert late_copy(tensor) == [1.] * 4
        get_accelerator().current_stream().wait_event(event)
        assert late_copy(tensor) == [2.] * 4


def test_an_event_that_was_never_recorded_holds_nobody_up():
    with Simulation(LAZY):
        event = get_accelerator().Event()
        event.synchronize()
        get_accelerator().current_stream().wait_event(event)
        assert event.query()


def test_the_current_stream_is_that_of_the_innermost_context():
    with Simulation(LAZY):
        accelerator = get_accelerator()
        first, second = accelerator.Stream(), accelerator.Stream()
        assert first != second and accelerator.current_stream() is accelerator.default_stream()
        with on(first):
            with on(second), on(None):
                assert accelerator.current_stream() is second
            assert accelerator.current_stream() is first
        assert accelerator.current_stream() is accelerator.default_stream()


def test_every_rank_has_streams_of_its_own():

    def body(transport):
        with on(get_accelerator().Stream()):
            transport.all_gather([torch.empty(1) for _ in range(3)], torch.zeros(1))
            return get_accelerator().current_stream().stream_id, get_accelerator().default_stream().stream_id

    for seed in ALL_MODES:
        ids = run_ranks(body, 3, seed)
        assert len({number for pair in ids for number in pair}) == 6


def test_eager_streams_run_by_the_next_call():
    with Simulation(EAGER) as simulation:
        torch.ones(4, device='simulated')
        get_accelerator().Event().query()
        assert not any(stream.queue for stream in simulation.hosts[0].streams)


def test_a_rush_leaves_some_streams_behind():
    with Simulation(RUSH) as simulation:
        for _ in range(20):
            with on(get_accelerator().Stream()):
                torch.ones(4, device='simulated')
        get_accelerator().Event().query()
        assert 0 < sum(bool(stream.queue) for stream in simulation.hosts[0].streams) < 20


def steps_of(seed):
    """Which rank made which call, in order."""
    steps = []

    def body(transport):
        for number in range(20):
            steps.append((transport.rank, number))
            tensor, stream = filled(1.)
            order_by_stream(stream)
            late_copy(tensor)
            steps.append(sum(len(other.queue) for host in here().simulation.hosts for other in host.streams))

    run_ranks(body, 3, seed)
    return steps


@pytest.mark.parametrize('seed', ALL_MODES)
def test_a_seed_always_gives_the_same_run(seed):
    assert steps_of(seed) == steps_of(seed) != steps_of(seed + 8)


def test_ranks_that_wait_for_one_another_are_reported_with_what_is_queued():

    def body(transport):
        tensor = torch.zeros(4, device='simulated')
        if transport.rank == 0:
            transport.exchange([], [(tensor, 1)])[1][0].wait()
            get_accelerator().current_stream().synchronize()

    for seed in ALL_MODES:
        with pytest.raises(Deadlock) as error:
            run_ranks(body, 2, seed, memory={'device'})
        text = str(error.value)
        assert 'host of rank 0 waits to synchronize stream 0 of rank 0 at test_streams.py' in text
        assert 'host of rank 1 has finished' in text
        assert 'stream 2 of rank 0: a window of 0 sends and 1 receives at test_streams.py' in text


def test_a_deadlock_is_reported_even_when_the_program_catches_it():

    def body(transport):
        with pytest.raises(Deadlock):
            transport.exchange([], [(torch.zeros(4), 1 - transport.rank)])[1][0].wait()

    with pytest.raises(Deadlock):
        run_ranks(body, 2, LAZY)


def test_a_failing_rank_is_reported_with_its_seed_and_the_others_that_waited_for_it():

    def body(transport):
        if transport.rank == 1:
            raise ValueError('rank 1 had enough')
        transport.all_gather([torch.empty(1)] * 2, torch.zeros(1))

    with pytest.raises(RankFailure, match='rank 1 had enough') as error:
        run_ranks(body, 2, RANDOM)
    assert 'seed 3 (random)' in str(error.value) and 'waits to gather rows' in str(error.value)
    assert isinstance(error.value.__cause__, ValueError)
