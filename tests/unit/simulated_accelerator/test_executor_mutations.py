# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Every wait of the executor, and every record that one waits for, is needed: without it some transfer goes wrong."""

import inspect

import numpy
import pytest

from deepspeed.checkpoint.affine_transfer_mover import Mover
from unit.simulated_accelerator.ranks import RankFailure
from unit.simulated_accelerator.scheduler import Deadlock
from unit.simulated_accelerator.simulation import DeviceRace
from unit.simulated_accelerator.synchronizations import observed, omitted
from unit.simulated_accelerator.test_executor_residency import KINDS, TRANSPORTS, moves

EXECUTOR = 'affine_transfer'
SEEDS = range(60)


def move_with(seed):
    """A random transfer of one execute, between 1 to 3 ranks whose buffers are of all kinds, over any transport."""
    rng = numpy.random.default_rng(seed)
    memory = list(TRANSPORTS.values())[seed % 3]
    moves(seed, 1 + seed % 3, memory, lambda rank, side: rng.choice(KINDS), steps=1)


@pytest.fixture(scope='module')
def seeds_by_site():
    """Each place where the executor waits or records, as the source lines that lead there, and who comes by."""
    seeds = {}
    for seed in SEEDS:
        with observed(EXECUTOR) as calls:
            move_with(seed)
        for site in calls:
            seeds.setdefault(site, []).append(seed)
    return seeds


def goes_wrong(site, seed):
    try:
        with omitted(site, EXECUTOR):
            move_with(seed)
    except (DeviceRace, RankFailure, Deadlock):
        return True
    return False


def test_a_transfer_goes_wrong_without_any_one_wait_or_record(seeds_by_site):
    assert [site for site, seeds in seeds_by_site.items() if not any(goes_wrong(site, seed) for seed in seeds)] == []


def test_these_transfers_come_by_everything_that_waits(seeds_by_site):
    """Each method of the mover that is named for what it waits for is on the way to some wait."""
    seen = {line for _, *lines in seeds_by_site for line in lines}
    for name, method in inspect.getmembers(Mover, inspect.isfunction):
        lines, first = inspect.getsourcelines(method)
        if name.startswith(('_until', '_follow', 'until')):
            assert seen & {f'affine_transfer_mover.py:{first + index}' for index in range(len(lines))}, name
