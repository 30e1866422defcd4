# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Planning affine transfers: against upstream's planner, over many ranks, and for whole models.

    python benchmarks/affine_transfer/bench_plan.py [--quick] [--cases NAME ...] [--json PATH]

Prints tables and, with ``--json``, writes the same rows. Exits 1 if a plan of ours moves other elements than
upstream's. README.md beside this file says what the columns mean.
"""

import argparse
import math
import multiprocessing
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from deepspeed.checkpoint.affine import contiguous_split_map
from deepspeed.checkpoint.affine_transfer import SpreadReplicas, TransferPlan, plan_model, plan_transfer

from layouts import (replicated_maps, rollout_maps, split_sizes, zero_in_tensor_parallel_map, zero_map, zero_maps)
from memory import MemoryGrowth
from models import parameter_shapes
from peers import Upstream, UpstreamMissing, sources_of_elements
from report import Row, growth_exponent, machine, print_table, quartiles, sorting_ms, target_row, timed_ms, write_json

SPLIT_SHAPE = (4096, 4096)
# The largest matrix of a layer of Llama-3.1-405B.
LARGE_SHAPE = (53248, 16384)
# Of the low-precision weights.
ITEM_BYTES = 2
GIB = 2**30


class Job(NamedTuple):
    """Trainers, and inference ranks as groups of tensor parallel ranks."""
    trainers: int
    tensor_parallel: int
    groups: int


class Sizes(NamedTuple):
    shards: Tuple[int, ...]
    nested_ranks: Tuple[int, ...]
    checked_ranks: int
    models: Tuple[str, ...]
    model_job: Job
    replica_job: Job


FULL = Sizes(shards=(8, 64, 256, 1024),
             nested_ranks=(64, 256, 1024, 4096, 16384),
             checked_ranks=1024,
             models=('Llama-3-8B', 'Llama-3-70B', 'Llama-3.1-405B', 'Mixtral-8x22B'),
             model_job=Job(trainers=1024, tensor_parallel=8, groups=16),
             replica_job=Job(trainers=256, tensor_parallel=8, groups=16))
QUICK = Sizes(shards=(8, 64),
              nested_ranks=(64, 256),
              checked_ranks=64,
              models=('Llama-3-8B', ),
              model_job=Job(trainers=64, tensor_parallel=4, groups=2),
              replica_job=Job(trainers=16, tensor_parallel=4, groups=2))


class Run(NamedTuple):
    """What every case gets; ``upstream`` is None where its release is not at hand."""
    sizes: Sizes
    repeats: int
    upstream: Optional[Upstream]
    upstream_segments: int


# ---------------------------------------------------------------------------------------------------------------------
# One parameter, beside upstream.
# ---------------------------------------------------------------------------------------------------------------------


def row_to_row(run: Run) -> List[Row]:
    """Row shards into row shards whose boundaries lie half a shard further on, so that each reads from two."""

    def shifted(shards):
        sizes = split_sizes(SPLIT_SHAPE[0], shards)
        half = sizes[0] // 2
        return [sizes[0] + half, *sizes[1:-1], sizes[-1] - half]

    return [
        _compared(run, shards, contiguous_split_map(SPLIT_SHAPE, shifted(shards), 0)) for shards in run.sizes.shards
    ]


def row_to_column(run: Run) -> List[Row]:
    """Row shards into column shards: every one reads from all."""
    return [
        _compared(run, shards, contiguous_split_map(SPLIT_SHAPE, split_sizes(SPLIT_SHAPE[1], shards), 1))
        for shards in run.sizes.shards
    ]


def _compared(run: Run, shards: int, target_map) -> Row:
    """Ours before and after upstream's, so that a machine that is disturbed for a while disturbs both."""
    source_map = contiguous_split_map(SPLIT_SHAPE, split_sizes(SPLIT_SHAPE[0], shards), 0)

    def measured(plan_once):
        """Milliseconds of each run, the plan's statistics, and where it takes each element from.

        The plan itself is dropped: a million live objects would slow down the garbage collections of what follows.
        """
        elapsed_ms, plan = timed_ms(plan_once, run.repeats)
        moved = sources_of_elements(plan.segments, source_map, target_map)
        if moved is None:
            raise RuntimeError(f'a plan for {shards} shards does not write every element exactly once')
        return elapsed_ms, plan.statistics, moved

    ours_ms, counts, moved = measured(lambda: plan_transfer(target_map, source_map))
    upstream_ms, upstream_segments, same_elements = [], None, None
    if run.upstream and counts.segments <= run.upstream_segments:
        maps = run.upstream.map_of(target_map), run.upstream.map_of(source_map)
        upstream_ms, upstream_counts, upstream_moved = measured(lambda: run.upstream.plan(*maps))
        upstream_segments = upstream_counts.segments
        same_elements = bool((moved == upstream_moved).all())
        ours_ms += timed_ms(lambda: plan_transfer(target_map, source_map), run.repeats)[0]
    return {
        'shards': shards,
        'pieces': counts.source_pieces + counts.target_pieces,
        'matches': counts.segments_before_merge,
        'segments': counts.segments,
        'ours_ms': statistics.median(ours_ms),
        'upstream_ms': statistics.median(upstream_ms) if upstream_ms else None,
        'ratio': statistics.median(upstream_ms) / statistics.median(ours_ms) if upstream_ms else None,
        'upstream_segments': upstream_segments,
        'same_elements': same_elements,
        'ours_runs': len(ours_ms),
        'upstream_runs': len(upstream_ms),
        'ours_quartiles_ms': quartiles(ours_ms),
        'upstream_quartiles_ms': quartiles(upstream_ms)
    }


# ---------------------------------------------------------------------------------------------------------------------
# One large parameter over many ranks. Upstream has no maps of ZeRO's 1-D shards.
# ---------------------------------------------------------------------------------------------------------------------


def nested(run: Run) -> List[Row]:
    """ZeRO within tensor parallelism of 8 (columns) into ZeRO over all ranks."""
    rows = []
    for ranks in run.sizes.nested_ranks:
        maps_ms, (target_map, source_map) = timed_ms(
            lambda: (zero_map(LARGE_SHAPE, range(ranks)), zero_in_tensor_parallel_map(LARGE_SHAPE, 8, ranks)),
            run.repeats)
        plan_ms, plan = timed_ms(lambda: plan_transfer(target_map, source_map), run.repeats)
        rows.append({
            'ranks': ranks,
            'pieces': plan.statistics.source_pieces + plan.statistics.target_pieces,
            'matches': plan.statistics.segments_before_merge,
            'segments': plan.statistics.segments,
            'maps_ms': statistics.median(maps_ms),
            'plan_ms': statistics.median(plan_ms),
            'sort_ms': sorting_ms(),
            'runs': len(plan_ms),
            'maps_quartiles_ms': quartiles(maps_ms),
            'plan_quartiles_ms': quartiles(plan_ms)
        })
    return rows


def growth(tables: Mapping[str, List[Row]]) -> List[Row]:
    """Exponents of the time in pieces + matches, over all sizes and over the three largest."""
    rows = []
    measured = [('nested', 'maps_ms'), ('nested', 'plan_ms'), ('row-to-row', 'ours_ms'), ('row-to-column', 'ours_ms')]
    for case, column in measured:
        if case in tables:
            sizes = [row['pieces'] + row['matches'] for row in tables[case]]
            costs = [row[column] for row in tables[case]]
            rows.append({
                'case': case,
                'time': column,
                'exponent': growth_exponent(sizes, costs),
                'of_largest_3': growth_exponent(sizes[-3:], costs[-3:])
            })
    return rows


def check(run: Run) -> List[Row]:
    """The full check of one large parameter's map."""
    map_ = zero_map(LARGE_SHAPE, range(run.sizes.checked_ranks))
    elapsed_ms, _ = timed_ms(map_.validate_coverage, run.repeats)
    return [{
        'ranks': run.sizes.checked_ranks,
        'pieces': sum(map(len, map_.pieces_by_rank.values())),
        'check_ms': statistics.median(elapsed_ms),
        'sort_ms': sorting_ms(),
        'runs': len(elapsed_ms),
        'check_quartiles_ms': quartiles(elapsed_ms)
    }]


# ---------------------------------------------------------------------------------------------------------------------
# Whole models: what one rank does.
# ---------------------------------------------------------------------------------------------------------------------


def model(run: Run) -> List[Row]:
    """ZeRO-3 trainers to tensor parallel rollout workers: maps and plan of one trainer, and of one worker."""
    rows = []
    for name in run.sizes.models:
        shapes = parameter_shapes(name)
        job = run.sizes.model_job
        for role, ranks in (('trainer', job.trainers), ('rollout', job.tensor_parallel * job.groups)):
            rank = ranks // 2
            parts = [_in_fresh_process(_plan_part, shapes, job, role, rank) for _ in range(run.repeats)]
            rows.append({
                'model': name,
                'parameters_1e9': sum(map(math.prod, shapes.values())) / 1e9,
                'tensors': len(shapes),
                'rank': f'{role} {rank}',
                'segments': parts[0]['segments'],
                **{
                    column: statistics.median([part[column] for part in parts])
                    for column in ('maps_ms', 'plan_ms', 'total_ms', 'growth_mb', 'sort_ms')
                }, 'runs': len(parts),
                'total_quartiles_ms': quartiles([part['total_ms'] for part in parts]),
                'growth_quartiles_mb': quartiles([part['growth_mb'] for part in parts])
            })
    return rows


def _in_fresh_process(function, *arguments) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
        return pool.submit(function, *arguments).result()


def _plan_part(shapes: Mapping[str, Tuple[int, ...]], job: Job, role: str, rank: int) -> Row:
    """Times and memory of one rank's part, from the parameters' shapes on, in a process that did nothing before."""
    growth = MemoryGrowth()
    begin = time.perf_counter()
    source_maps = zero_maps(shapes, job.trainers)
    target_maps = rollout_maps(shapes, job.tensor_parallel, job.groups)
    built = time.perf_counter()
    ranks = {'source_ranks': [rank]} if role == 'trainer' else {'target_ranks': [rank]}
    plans = plan_model(target_maps, source_maps, **ranks)
    planned = time.perf_counter()
    growth_mb = growth.peak_mb()
    return {
        'segments': sum(len(plan.segments) for plan in plans.values()),
        'maps_ms': 1000 * (built - begin),
        'plan_ms': 1000 * (planned - built),
        'total_ms': 1000 * (planned - begin),
        'growth_mb': growth_mb,
        'sort_ms': sorting_ms()
    }


# ---------------------------------------------------------------------------------------------------------------------
# Who sends what many hold.
# ---------------------------------------------------------------------------------------------------------------------


def replicas(run: Run) -> List[Row]:
    """Kimi-K2's weights, whole on every trainer, to expert and tensor parallel inference: who sends how much.

    A sender's best possible maximum is an equal share of all bytes, a receiver's the largest shard of the model.
    """
    shapes = parameter_shapes('Kimi-K2')
    job = run.sizes.replica_job
    source_maps = replicated_maps(shapes, job.trainers)
    target_maps = rollout_maps(shapes, job.tensor_parallel, job.groups, expert_parallel=True)
    wanted: Counter = Counter()
    for map_ in target_maps.values():
        wanted.update({location: math.prod(shape) for location, shape in map_.shard_shapes.items()})
    rows = []
    for policy, selector in (('lowest holder', None), ('SpreadReplicas', SpreadReplicas())):
        plan_ms, plans = timed_ms(lambda: plan_model(target_maps, source_maps, replica_selector=selector), run.repeats)
        sent, received = _loads(plans.values())
        rows.append({
            'policy': policy,
            'trainers': job.trainers,
            'inference': job.tensor_parallel * job.groups,
            'GiB': sum(sent.values()) * ITEM_BYTES / GIB,
            'senders': len(sent),
            'max_sent_GiB': max(sent.values()) * ITEM_BYTES / GIB,
            'sent_to_best': max(sent.values()) * job.trainers / sum(wanted.values()),
            'max_received_GiB': max(received.values()) * ITEM_BYTES / GIB,
            'received_to_best': max(received.values()) / max(wanted.values()),
            'plan_ms': statistics.median(plan_ms),
            'sort_ms': sorting_ms(),
            'runs': len(plan_ms),
            'plan_quartiles_ms': quartiles(plan_ms)
        })
    return rows


def _loads(plans: Iterable[TransferPlan]) -> Tuple[Dict[int, int], Dict[int, int]]:
    """Elements that each rank sends, and that each receives."""
    sent, received = Counter(), Counter()
    for plan in plans:
        for segment in plan.segments:
            sent[segment.source_rank] += segment.numel
            received[segment.target_rank] += segment.numel
    return sent, received


# ---------------------------------------------------------------------------------------------------------------------
# The program.
# ---------------------------------------------------------------------------------------------------------------------

CASES = {
    'row-to-row': row_to_row,
    'row-to-column': row_to_column,
    'nested': nested,
    'check': check,
    'model': model,
    'replicas': replicas
}


def targets(tables: Mapping[str, List[Row]]) -> Iterator[Row]:
    """What was aimed at, for the full sizes, and what was reached."""
    for row in tables.get('row-to-row', [])[-1:]:
        if row['ratio'] is not None:
            yield target_row(f'row-to-row, {row["shards"]} shards: times faster than upstream',
                             row['ratio'],
                             at_least=1000)
    for row in tables.get('growth', []):
        yield target_row(f'{row["case"]}: exponent of {row["time"]}', row['exponent'], at_most=1.15)
    for row in tables.get('check', []):
        yield target_row(f'check of a map of {row["ranks"]} ranks: ms', row['check_ms'], at_most=50)
    for row in tables.get('model', []):
        if row['model'] == 'Llama-3.1-405B':
            yield target_row(f'{row["model"]}, {row["rank"]}: ms', row['total_ms'], at_most=1000)
            yield target_row(f'{row["model"]}, {row["rank"]}: MB of growth', row['growth_mb'], at_most=200)
    for row in tables.get('replicas', [])[-1:]:
        yield target_row('most bytes sent, to the best possible', row['sent_to_best'], at_most=1.05)
        yield target_row('most bytes received, to the best possible', row['received_to_best'], at_most=1.05)


def parse_arguments(arguments: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--quick', action='store_true', help='small sizes, for a test of the benchmark itself')
    parser.add_argument('--cases',
                        nargs='+',
                        choices=CASES,
                        default=list(CASES),
                        metavar='NAME',
                        help=', '.join(CASES))
    parser.add_argument('--repeats', type=int, help='of every measurement, the median counts (default: 5; quick: 1)')
    parser.add_argument('--upstream-segments',
                        type=int,
                        default=100000,
                        help='leave upstream out where the plan has more segments (default: 100000)')
    parser.add_argument('--json', type=Path, help='write the rows there')
    return parser.parse_args(arguments)


def main(arguments: Optional[List[str]] = None) -> int:
    options = parse_arguments(arguments)
    try:
        upstream = Upstream()
    except UpstreamMissing as error:
        print(f'without upstream: {error}', file=sys.stderr)
        upstream = None
    print(', '.join(f'{name}: {value}' for name, value in machine().items()))
    options.repeats = options.repeats or (1 if options.quick else 5)
    run = Run(QUICK if options.quick else FULL, options.repeats, upstream, options.upstream_segments)
    tables: Dict[str, List[Row]] = {}
    for case in options.cases:
        tables[case] = CASES[case](run)
        print_table(f'{case}: {CASES[case].__doc__.splitlines()[0]}', tables[case])
    for summary in (growth, targets):
        rows = list(summary(tables))
        if rows and not options.quick:
            tables[summary.__name__] = rows
            print_table(f'{summary.__name__}: {summary.__doc__}', rows)
    if options.json:
        write_json(options.json, tables, {name: value for name, value in vars(options).items() if name != 'json'})
    differing = [row for rows in tables.values() for row in rows if row.get('same_elements') is False]
    return 1 if differing else 0


if __name__ == '__main__':
    sys.exit(main())
