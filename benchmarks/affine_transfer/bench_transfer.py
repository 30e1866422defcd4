# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Moving live state to another layout between processes: ours, loops by hand, and what people use today.

    python benchmarks/affine_transfer/bench_transfer.py [--scale S] [--jobs NAME ...] [--json PATH]

Prints a table per job and, with ``--json``, writes the same rows. Exits 1 if a method brings wrong values anywhere,
or changes a master.
README.md beside this file says what the columns mean.
"""

import argparse
import gc
import logging
import math
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Type

from meeting import Meeting, run_processes
from memory import MemoryGrowth
from models import llama_of, parameter_shapes
from report import Row, machine, print_table, quartiles, write_json
from transfer_jobs import JOBS, Participant
from transfer_loops import LOOPS
from transfer_methods import (BYTES_PER_PEER, BareMessages, BareWhole, FirstCall, LaterCalls, Memcpy, Method,
                              MethodMissing, peers_of)
from transfer_peers import Checkpoint, Gather, Megatron, MegatronOfConverted

BARE = (BareMessages, BareWhole)
METHODS: Tuple[Type[Method],
               ...] = (LaterCalls, FirstCall, *BARE, Memcpy, *LOOPS, Gather, Checkpoint, Megatron, MegatronOfConverted)
GIB = 2**30


class Measured(NamedTuple):
    """What the processes of a job found out about one method; the worst of them where they differ."""
    name: str
    seconds: List[float]
    wrong_elements: int
    extra_mb: float
    file_mb: float


class Outcome(NamedTuple):
    """What the processes of a job found out.

    ``missing`` says why a method did not run. ``staging_bytes`` and ``segments`` are the greatest that a process's
    executor reports, ``peers`` the most that one sends to and receives from, together.
    """
    methods: List[Measured]
    missing: Dict[str, str]
    moved_bytes: int
    segments: int
    staging_bytes: int
    peers: int
    changed_masters: int


# ---------------------------------------------------------------------------------------------------------------------
# In every process of a job.
# ---------------------------------------------------------------------------------------------------------------------


def measure_job(meeting: Meeting, name: str, shapes: Mapping[str, Tuple[int, ...]], methods: Sequence[Type[Method]],
                repeats: int, corrupt: Sequence[str]) -> Outcome:
    """Do one job by every method, ``repeats`` times in turn. Called by all processes of the job."""
    logging.getLogger('DeepSpeed').setLevel(logging.ERROR)
    warnings.filterwarnings('ignore', category=FutureWarning, module='torch.distributed')
    participant = Participant(JOBS[name](shapes), meeting)
    # Else every collection of garbage would look through all that is imported.
    gc.freeze()
    trials, missing = [], {}
    for method in methods:
        try:
            method.prepare(participant)
            trials.append(Trial(method, participant, spoils=method.name in corrupt))
        except MethodMissing as error:
            missing[method.name] = str(error)
    for repeat in range(repeats):
        # Another method each time follows one that leaves the caches full of its own.
        turn = repeat % len(trials)
        for trial in trials[turn:] + trials[:turn]:
            trial.repeat()
    stats = [trial.method.stats for trial in trials if isinstance(trial.method, LaterCalls)]
    return Outcome([trial.measured() for trial in trials],
                   missing,
                   moved_bytes=sum(map(math.prod, shapes.values())) * participant.job.dtype.itemsize,
                   segments=_greatest(meeting, [stat.segments for stat in stats]),
                   staging_bytes=_greatest(meeting, [stat.peak_host_staging_bytes for stat in stats]),
                   peers=_greatest(meeting, [peers_of(participant)]),
                   changed_masters=_greatest(meeting, [len(participant.changed_masters())]))


def _greatest(meeting: Meeting, values: Sequence[int]) -> int:
    return int(meeting.maximum(max(values, default=0)))


class Trial:
    """One method as this process runs it, with all others, and what was measured of it."""

    def __init__(self, method: Type[Method], participant: Participant, spoils: bool):
        """Makes the method and runs it once, watching this process's memory instead of the clock."""
        self._participant, self._spoils = participant, spoils
        self._seconds: List[float] = []
        self._wrong_elements = 0
        participant.spoil_targets()
        participant.meeting.barrier()
        growth = MemoryGrowth()
        self.method = method(participant)
        self.method.run()
        self._extra_mb = growth.peak_mb()
        self._file_mb = self.method.file_bytes() / 1e6
        self._check()

    def repeat(self) -> None:
        self.method.reset()
        self._participant.meeting.barrier()
        begin = time.perf_counter()
        self.method.run()
        # The transfer is done when it is for the last process.
        self._seconds.append(self._participant.meeting.maximum(time.perf_counter() - begin))
        self._check()

    def _check(self) -> None:
        if self._spoils and self._participant.rank == self._participant.job.processes - 1:
            self._participant.flat_target[-1] += 1
        wrong = self.method.wrong_elements()
        self._wrong_elements += _greatest(self._participant.meeting, [wrong])

    def measured(self) -> Measured:
        maximum = self._participant.meeting.maximum
        return Measured(self.method.name, self._seconds, self._wrong_elements, maximum(self._extra_mb),
                        maximum(self._file_mb))


# ---------------------------------------------------------------------------------------------------------------------
# The program.
# ---------------------------------------------------------------------------------------------------------------------


def rows_of(outcome: Outcome) -> List[Row]:
    """A row per method. Ratios are medians over the rounds in which all methods took their turn, so 1.0 is as fast."""
    bare = fastest(outcome, BARE)
    loop = fastest(outcome, LOOPS)
    rows = []
    for method in outcome.methods:
        rows.append({
            'method': method.name,
            'ms': 1000 * statistics.median(method.seconds),
            'GiB_per_s': outcome.moved_bytes / GIB / statistics.median(method.seconds),
            'to_bare': bare and speed_ratio(method, bare),
            'to_loop': loop and speed_ratio(method, loop),
            'extra_mb': method.extra_mb,
            'file_mb': method.file_mb,
            'correct': method.wrong_elements == 0,
            'runs': len(method.seconds),
            'ms_quartiles': quartiles([1000 * seconds for seconds in method.seconds])
        })
    return rows


def fastest(outcome: Outcome, methods: Sequence[Type[Method]]) -> Optional[Measured]:
    names = [method.name for method in methods]
    candidates = [measured for measured in outcome.methods if measured.name in names]
    return min(candidates, key=lambda measured: statistics.median(measured.seconds), default=None)


def speed_ratio(method: Measured, other: Measured) -> float:
    """How many times as fast as ``other`` a method is."""
    return statistics.median(theirs / own for own, theirs in zip(method.seconds, other.seconds))


def targets_of(outcomes: Mapping[str, Outcome]) -> List[Row]:
    """What was aimed at, and what was reached."""
    rows = []

    def add(job, what, others, at_least):
        ours, other = fastest(outcomes[job], [LaterCalls]), fastest(outcomes[job], others)
        if ours and other:
            reached = speed_ratio(ours, other)
            rows.append({
                'target': f'{job}, later calls, {what}: {other.name}',
                'at_least': at_least,
                'at_most': None,
                'reached': reached,
                'met': reached >= at_least
            })

    for job, outcome in outcomes.items():
        if job == 'resize':
            add(job, 'speed to bare', BARE, 0.9)
        add(job, 'speed to the best loop', LOOPS, 0.95)
        add(job, 'times as fast as', [Gather], 3)
        add(job, 'times as fast as', [Checkpoint], 3)
        add(job, 'times as fast as', [Megatron], 1.3)
        if outcome.staging_bytes:
            bound_mb = outcome.peers * BYTES_PER_PEER / 1e6
            growths = {'staging of later calls': outcome.staging_bytes / 1e6}
            growths.update((f'growth of a process by {method.name}', method.extra_mb) for method in outcome.methods
                           if method.name == FirstCall.name)
            for what, reached in growths.items():
                rows.append({
                    'target': f'{job}: {what}, MB',
                    'at_least': None,
                    'at_most': bound_mb,
                    'reached': reached,
                    'met': reached <= bound_mb
                })
    return rows


def parse_arguments(arguments: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--scale', type=float, default=1.0, help='of the model: 1 has 1 GB of fp32 masters (default)')
    parser.add_argument('--repeats', type=int, default=7, help='of every measurement, the median counts (default: 7)')
    parser.add_argument('--jobs', nargs='+', choices=JOBS, default=list(JOBS), metavar='NAME', help=', '.join(JOBS))
    names = [method.name for method in METHODS]
    parser.add_argument('--methods',
                        nargs='+',
                        choices=names,
                        default=names,
                        metavar='NAME',
                        help='; '.join(names).replace('%', '%%'))
    parser.add_argument('--corrupt',
                        nargs='+',
                        choices=names,
                        default=[],
                        metavar='NAME',
                        help='spoil an element after each run of these methods, to see that it is found')
    parser.add_argument('--json', type=Path, help='write the rows there')
    return parser.parse_args(arguments)


def main(arguments: Optional[List[str]] = None) -> int:
    options = parse_arguments(arguments)
    print(', '.join(f'{name}: {value}' for name, value in machine().items()))
    shapes = parameter_shapes(llama_of(options.scale))
    methods = [method for method in METHODS if method.name in options.methods]
    outcomes: Dict[str, Outcome] = {}
    tables: Dict[str, List[Row]] = {}
    for name in options.jobs:
        outcome = run_processes(measure_job, JOBS[name].processes, name, shapes, methods, options.repeats,
                                options.corrupt)
        outcomes[name] = outcome
        for method, reason in outcome.missing.items():
            print(f'{name}: without {method}: {reason}', file=sys.stderr)
        tables[name] = rows_of(outcome)
        print_table(f'{name}: {JOBS[name].title}, {outcome.moved_bytes / GIB:.3g} GiB in {len(shapes)} tensors',
                    tables[name])
    tables['targets'] = targets_of(outcomes)
    if tables['targets']:
        print_table(f'targets: {targets_of.__doc__}', tables['targets'])
    if options.json:
        write_json(options.json, tables, {name: value for name, value in vars(options).items() if name != 'json'})
    wrong = any(method.wrong_elements for outcome in outcomes.values() for method in outcome.methods)
    changed = any(outcome.changed_masters for outcome in outcomes.values())
    return 1 if wrong or changed else 0


if __name__ == '__main__':
    sys.exit(main())
