# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Counting where a program synchronizes, and leaving one of these places out."""

import torch

from deepspeed.accelerator import get_accelerator
from unit.simulated_accelerator.ranks import run_ranks
from unit.simulated_accelerator.synchronizations import observed, omitted

THIS_FILE = 'test_synchronizations.py'
LAZY = 1


def settle(stream):
    stream.synchronize()


def program(transport):
    """Synchronizes in three places, two of which go through one line; what each of the calls has done."""
    stream = get_accelerator().Stream()
    event = stream.record_event()
    done = [event.mark is not None]
    settle(stream)
    done.append(not stream.queue)
    for _ in range(2):
        stream.mark()
        settle(stream)
        done.append(not stream.queue)
    return done


def run_program():
    return run_ranks(program, 1, LAZY)[0]


def sites(within=THIS_FILE):
    with observed(within) as calls:
        run_program()
    return calls


def test_sites_are_counted_by_the_lines_that_lead_to_them():
    calls = sites()
    assert [site[0] for site in calls] == ['Event.record', 'Stream.synchronize', 'Stream.synchronize']
    assert list(calls.values()) == [1, 1, 2]
    assert all(line.startswith(THIS_FILE) for site in calls for line in site[1:])


def test_calls_from_other_files_are_no_sites():
    assert not sites(within='some_other_file.py')


def test_an_omitted_site_does_nothing_and_all_others_do():
    record, first, loop = sites()
    done = {}
    for site in (record, first, loop):
        with omitted(site, THIS_FILE):
            done[site] = run_program()
    assert run_program() == [True] * 4
    assert done == {
        record: [False, True, True, True],
        first: [True, False, True, True],
        loop: [True, True, False, False]
    }


def test_all_kinds_of_synchronization_are_sites():

    def body(transport):
        accelerator, peer = get_accelerator(), 1 - transport.rank
        tensor, event, stream = torch.zeros(2, device='simulated'), accelerator.Event(), accelerator.Stream()
        tensor.record_stream(stream)
        stream.wait_stream(accelerator.current_stream())
        event.record()
        stream.wait_event(event)
        event.wait(stream)
        event.synchronize()
        stream.synchronize()
        accelerator.synchronize()
        for memory in (tensor, torch.zeros(2)):
            for message in sum(transport.exchange([(memory, peer)], [(memory.clone(), peer)]), []):
                message.wait()
        accelerator.synchronize()

    with observed(THIS_FILE) as calls:
        run_ranks(body, 2, LAZY, memory={'host', 'device'})
    assert {site[0]
            for site in calls} == {
                '_record_stream', 'Stream.wait_stream', 'Event.record', 'Stream.wait_event', 'Event.synchronize',
                'Stream.synchronize', 'SimulatedAccelerator.synchronize', '_Pending.wait'
            }
