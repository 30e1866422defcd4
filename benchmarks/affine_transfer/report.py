# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Rows of a benchmark: timed, printed as a table, and written as JSON beside what they ran on."""

import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch

Row = Dict[str, Any]


def timed_ms(function: Callable[[], Any], repeats: int) -> Tuple[List[float], Any]:
    """The milliseconds of each call, and what the last one returned.

    What is quick is called more often, for 0.2 s per repeat: neither a full garbage collection, which takes longer
    than a small plan, nor a short disturbance of the machine must decide the median. What takes over ten seconds is
    called three times.
    """
    elapsed_ms, result = [], None
    while len(elapsed_ms) < repeats or sum(elapsed_ms) < 200 * repeats:
        if len(elapsed_ms) >= 3 and sum(elapsed_ms) > 30000:
            break
        # Freeing a large result is not part of making the next one.
        result = None
        begin = time.perf_counter()
        result = function()
        elapsed_ms.append(1000 * (time.perf_counter() - begin))
    return elapsed_ms, result


def quartiles(values: Sequence[float]) -> List[float]:
    """Least, first quartile, median, third quartile and greatest."""
    return np.percentile(values, [0, 25, 50, 75, 100]).tolist() if values else []


def sorting_ms() -> float:
    """How long NumPy takes to sort 2**20 random integers: what a time is worth on this machine at this moment."""
    values = np.random.default_rng(0).integers(1 << 62, size=1 << 20)
    elapsed_ms, _ = timed_ms(lambda: np.sort(values, kind='stable'), 5)
    return statistics.median(elapsed_ms)


def growth_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The p of the best fit of costs = c * sizes ** p."""
    slope, _ = np.polyfit(np.log(sizes), np.log(costs), 1)
    return float(slope)


def machine() -> Dict[str, str]:
    memory_gib = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30
    return {
        'machine': f'{len(os.sched_getaffinity(0))} cores, {memory_gib:.0f} GiB',
        'python': platform.python_version(),
        'numpy': np.__version__,
        'torch': torch.__version__,
        'commit': _commit()
    }


def _commit() -> str:
    """The checkout's commit, with a + where a tracked file differs from it; '' outside a checkout or without git."""
    command = ['git', 'describe', '--always', '--dirty=+', '--exclude=*']
    try:
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ''


def target_row(what: str, reached: float, at_least: Optional[float] = None, at_most: Optional[float] = None) -> Row:
    """What was aimed at beside what was reached; without an aim, a figure to compare others with."""
    met = None
    if at_least is not None or at_most is not None:
        met = (at_least is None or reached >= at_least) and (at_most is None or reached <= at_most)
    return {'target': what, 'at_least': at_least, 'at_most': at_most, 'reached': reached, 'met': met}


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Columns are the keys of the first row whose values are not lists. Without rows nothing is printed."""
    if not rows:
        return
    names = [name for name, value in rows[0].items() if not isinstance(value, list)]
    cells = [names] + [[_text(row[name]) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    print(f'\n{title}')
    for line in cells:
        print('  '.join(cell.rjust(width) for cell, width in zip(line, widths)).rstrip(), flush=True)


def _text(value: Any) -> str:
    if value is None:
        return '-'
    if isinstance(value, bool):
        return 'yes' if value else 'NO'
    if isinstance(value, float):
        return f'{value:.3g}' if abs(value) < 1000 else f'{value:,.0f}'
    return f'{value:,}' if isinstance(value, int) else str(value)


def write_json(path: Path, tables: Mapping[str, Sequence[Row]], options: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**machine(), 'options': dict(options), 'tables': tables}, indent=1) + '\n')
