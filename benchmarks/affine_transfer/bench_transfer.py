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
import random
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Type

from meeting import Meeting, run_processes
from memory import MemoryGrowth
from models import llama_of, parameter_shapes
from report import Row, machine, print_table, quartiles, target_row, write_json
from transfer_jobs import JOBS, Participant
from transfer_loops import LOOPS
from transfer_methods import (BYTES_PER_PEER, BareMessages, BareWhole, FirstCall, LaterCalls, LaterCallsOverGloo,
                              Memcpy, Method, MethodMissing, peers_of)
from transfer_parts import ConvertAndUnpack
from transfer_peers import Checkpoint, Gather, Megatron, MegatronOfConverted

Methods = Sequence[Type[Method]]

LATER = (LaterCalls, LaterCallsOverGloo)
OURS = (*LATER, FirstCall)
BARE = (BareMessages, BareWhole)
PEERS = (Gather, Checkpoint, Megatron)
METHODS = (*OURS, *BARE, Memcpy, ConvertAndUnpack, *LOOPS, *PEERS, MegatronOfConverted)
GIB = 2**30

# Jobs, ours there, with whom it is compared, and how many times as fast as the fastest of these it is to be, if
# anything is aimed at.
SPEED_TARGETS: Sequence[Tuple[Sequence[str], Type[Method], Methods, Optional[float]]] = (
    (['weight-sync'], LaterCallsOverGloo, LOOPS, 0.95),
    (['resize'], LaterCallsOverGloo, BARE, 0.9),
    (list(JOBS), LaterCallsOverGloo, [Gather], 3),
    (list(JOBS), LaterCallsOverGloo, [Checkpoint], None),
    (list(JOBS), LaterCallsOverGloo, [Megatron], 1.3),
    (['weight-sync'], LaterCalls, BARE, None),
    (['resize'], LaterCalls, BARE, 2.5),
    (list(JOBS), LaterCalls, [Gather], 3),
    (list(JOBS), LaterCalls, [Checkpoint], 3),
    (list(JOBS), LaterCalls, [Megatron], 1.3),
)


class Measured(NamedTuple):
    """What the processes of a job found out about one method; the worst of them where they differ.

    For each round ``seconds`` has how long the last process took, ``cpu_seconds`` what all took together.
    """
    name: str
    seconds: List[float]
    cpu_seconds: List[float]
    correct: bool
    extra_mb: float
    file_mb: float

    @classmethod
    def over(cls, launches: Sequence['Measured']) -> 'Measured':
        """One method's rounds of all launches, one after another."""
        return cls(launches[0].name,
                   seconds=[seconds for one in launches for seconds in one.seconds],
                   cpu_seconds=[seconds for one in launches for seconds in one.cpu_seconds],
                   correct=all(one.correct for one in launches),
                   extra_mb=max(one.extra_mb for one in launches),
                   file_mb=max(one.file_mb for one in launches))


class Outcome(NamedTuple):
    """What the processes of a job found out.

    ``missing`` says why a method did not run. ``staging_mb`` is the most that a process's executor reports of its
    later calls, ``bound_mb`` the most that it states beforehand for one of these processes. Each method has as many
    rounds of each of the ``launches``.
    """
    methods: List[Measured]
    missing: Dict[str, str]
    moved_bytes: int
    staging_mb: float
    bound_mb: float
    has_kept_masters: bool
    launches: int = 1

    @classmethod
    def over(cls, launches: Sequence['Outcome']) -> 'Outcome':
        """What several launches of the same processes found out together."""
        return launches[0]._replace(methods=[Measured.over(same) for same in zip(*(one.methods for one in launches))],
                                    staging_mb=max(one.staging_mb for one in launches),
                                    has_kept_masters=all(one.has_kept_masters for one in launches),
                                    launches=len(launches))


# ---------------------------------------------------------------------------------------------------------------------
# In every process of a job.
# ---------------------------------------------------------------------------------------------------------------------


def measure_job(meeting: Meeting, name: str, shapes: Mapping[str, Tuple[int, ...]], methods: Methods, repeats: int,
                corrupt: Sequence[str], launch: int) -> Outcome:
    """Do one job by every method, ``repeats`` times in turn. Called by all processes of the job."""
    logging.getLogger('DeepSpeed').setLevel(logging.ERROR)
    warnings.filterwarnings('ignore', category=FutureWarning, module='torch.distributed')
    participant = Participant(JOBS[name](shapes), meeting)
    # Also plans the job: the first to do so reads in library code, which no method is charged for.
    bound_mb = meeting.maximum(peers_of(participant)) * BYTES_PER_PEER / 1e6
    # Else every collection of garbage would look through all that is imported.
    gc.freeze()
    trials, missing = [], {}
    for method in methods:
        try:
            method.prepare(participant)
            trials.append(Trial(method, participant, spoils=method.name in corrupt))
        except MethodMissing as error:
            missing[method.name] = str(error)
    # A method finds in the caches what the one before it left there: let that be another one each time, the same for
    # all processes.
    order = random.Random(launch)
    for _ in range(repeats):
        for trial in order.sample(trials, len(trials)):
            trial.repeat()
    staging_bytes = [trial.method.staging_bytes for trial in trials if isinstance(trial.method, LaterCalls)]
    return Outcome([trial.measured() for trial in trials],
                   missing,
                   moved_bytes=sum(map(math.prod, shapes.values())) * participant.job.dtype.itemsize,
                   staging_mb=meeting.maximum(max(staging_bytes, default=0)) / 1e6,
                   bound_mb=bound_mb,
                   has_kept_masters=meeting.maximum(len(participant.changed_masters())) == 0)


class Trial:
    """One method as this process runs it, with all others, and what was measured of it."""

    def __init__(self, method: Type[Method], participant: Participant, spoils: bool):
        """Makes the method and runs it once, watching this process's memory instead of the clock."""
        self._participant, self._spoils = participant, spoils
        self._seconds: List[float] = []
        self._cpu_seconds: List[float] = []
        self._correct = True
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
        meeting = self._participant.meeting
        meeting.barrier()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        self.method.run()
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        # The transfer is done when it is for the last process.
        self._seconds.append(meeting.maximum(seconds))
        self._cpu_seconds.append(meeting.total(cpu_seconds))
        self._check()

    def _check(self) -> None:
        if self._spoils:
            self.method.spoil()
        if self._participant.meeting.maximum(self.method.wrong_elements()) > 0:
            self._correct = False

    def measured(self) -> Measured:
        maximum = self._participant.meeting.maximum
        return Measured(self.method.name, self._seconds, self._cpu_seconds, self._correct, maximum(self._extra_mb),
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
            'to_bare': bare and speed_ratio(method.seconds, bare.seconds),
            'to_loop': loop and speed_ratio(method.seconds, loop.seconds),
            'cores': statistics.median(cpu / own for cpu, own in zip(method.cpu_seconds, method.seconds)),
            'extra_mb': method.extra_mb,
            'file_mb': method.file_mb,
            'correct': method.correct,
            'runs': len(method.seconds),
            'ms_quartiles': quartiles([1000 * seconds for seconds in method.seconds])
        })
    return rows


def fastest(outcome: Outcome, methods: Methods) -> Optional[Measured]:
    names = [method.name for method in methods]
    candidates = [measured for measured in outcome.methods if measured.name in names]
    return min(candidates, key=lambda measured: statistics.median(measured.seconds), default=None)


def speed_ratio(seconds: Sequence[float], others_seconds: Sequence[float]) -> float:
    """How many times as fast as another method one is, given what each round took."""
    return statistics.median(theirs / own for own, theirs in zip(seconds, others_seconds))


def ratio_by_launch(outcome: Outcome, method: Measured, other: Measured) -> List[float]:
    """``speed_ratio`` within each launch alone."""
    rounds = len(method.seconds) // outcome.launches
    return [
        speed_ratio(method.seconds[begin:begin + rounds], other.seconds[begin:begin + rounds])
        for begin in range(0, len(method.seconds), rounds)
    ]


def targets_of(outcomes: Mapping[str, Outcome]) -> Iterator[Row]:
    """What was aimed at, what was reached, and figures to compare that with."""
    for job, outcome in outcomes.items():
        yield from speed_targets(job, outcome)
        yield from memory_targets(job, outcome)


def speed_targets(job: str, outcome: Outcome) -> Iterator[Row]:
    for jobs, method, others, at_least in SPEED_TARGETS:
        ours, other = fastest(outcome, [method]), fastest(outcome, others)
        if job in jobs and ours and other:
            row = target_row(f'{job}: {ours.name}, times as fast as: {other.name}',
                             speed_ratio(ours.seconds, other.seconds),
                             at_least=at_least)
            row['by_launch'] = ratio_by_launch(outcome, ours, other)
            yield row
    bare, rest, checkpoint = (fastest(outcome, methods) for methods in (BARE, [ConvertAndUnpack], [Checkpoint]))
    if bare and rest and checkpoint:
        one_after_the_other = list(map(sum, zip(bare.seconds, rest.seconds)))
        yield target_row(f'{job}: bare, then converting and unpacking alone, times as fast as: {checkpoint.name}',
                         speed_ratio(one_after_the_other, checkpoint.seconds))


def memory_targets(job: str, outcome: Outcome) -> Iterator[Row]:
    ours, others = ({method.name for method in methods} for methods in (OURS, PEERS))
    if fastest(outcome, LATER):
        yield target_row(f'{job}: staging of later calls, MB', outcome.staging_mb, at_most=outcome.bound_mb)
    for method in outcome.methods:
        if method.name in ours | others:
            yield target_row(f'{job}: extra memory of a process, MB: {method.name}',
                             method.extra_mb,
                             at_most=outcome.bound_mb if method.name in ours else None)


def parse_arguments(arguments: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--scale', type=float, default=1.0, help='of the model: 1 has 1 GB of fp32 masters (default)')
    parser.add_argument('--launches',
                        type=int,
                        default=5,
                        help='how often the processes of a job are started anew (default: 5)')
    parser.add_argument('--repeats',
                        type=int,
                        default=3,
                        help='of every method in each launch, the median over all of them counts (default: 3)')
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
        outcomes[name] = outcome = Outcome.over([
            run_processes(measure_job, JOBS[name].processes, name, shapes, methods, options.repeats, options.corrupt,
                          launch) for launch in range(options.launches)
        ])
        for method, reason in outcome.missing.items():
            print(f'{name}: without {method}: {reason}', file=sys.stderr)
        tables[name] = rows_of(outcome)
        print_table(f'{name}: {JOBS[name].title}, {outcome.moved_bytes / GIB:.3g} GiB in {len(shapes)} tensors',
                    tables[name])
    tables['targets'] = list(targets_of(outcomes))
    print_table(f'targets: {targets_of.__doc__}', tables['targets'])
    if options.json:
        write_json(options.json, tables, {name: value for name, value in vars(options).items() if name != 'json'})
    right = all(method.correct for outcome in outcomes.values() for method in outcome.methods)
    kept = all(outcome.has_kept_masters for outcome in outcomes.values())
    return 0 if right and kept else 1


if __name__ == '__main__':
    sys.exit(main())
