# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The planner's benchmark: all cases run, its rows have what its README says, and ours moves upstream's elements."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.checkpoint.affine import contiguous_split_map
from deepspeed.checkpoint.affine_transfer import TransferSegment

PROGRAM = Path(__file__).resolve().parents[3] / 'benchmarks' / 'affine_transfer' / 'bench_plan.py'
COLUMNS_BY_CASE = {
    'row-to-row': {'shards', 'pieces', 'matches', 'segments', 'ours_ms', 'upstream_ms', 'ratio', 'same_elements'},
    'row-to-column': {'shards', 'pieces', 'matches', 'segments', 'ours_ms', 'upstream_ms', 'ratio', 'same_elements'},
    'nested': {'ranks', 'pieces', 'matches', 'segments', 'maps_ms', 'plan_ms', 'sort_ms'},
    'check': {'ranks', 'pieces', 'check_ms', 'sort_ms'},
    'model': {'model', 'rank', 'segments', 'total_ms', 'growth_mb', 'sort_ms'},
    'replicas': {'policy', 'senders', 'sent_to_best', 'received_to_best', 'plan_ms', 'sort_ms'},
}

# (2, 2) from rows to columns, element by element: source rank, offset, strides, target rank, offset, strides, shape.
ROWS, COLUMNS = (contiguous_split_map((2, 2), [1, 1], dim) for dim in (0, 1))
SEGMENTS = [
    TransferSegment(source, offset, (1, ), target, written, (1, ), (1, ))
    for source, offset, target, written in [(0, 0, 0, 0), (1, 0, 0, 1), (0, 1, 1, 0), (1, 1, 1, 1)]
]


@pytest.fixture(scope='module')
def sources_of_elements():
    spec = importlib.util.spec_from_file_location('bench_plan_peers', PROGRAM.with_name('peers.py'))
    peers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peers)
    return peers.sources_of_elements


@pytest.fixture(scope='module')
def quick_run(tmp_path_factory):
    """What ``--quick`` wrote, and what it printed."""
    path = tmp_path_factory.mktemp('bench') / 'plan.json'
    # With an accelerator named, DeepSpeed does not print that it looked for one.
    result = subprocess.run([sys.executable, PROGRAM, '--quick', '--json', path],
                            capture_output=True,
                            text=True,
                            env=dict(os.environ, DS_ACCELERATOR='cpu'))
    assert result.returncode == 0, result.stderr
    return json.loads(path.read_text()), result


def test_every_case_writes_rows_with_its_columns(quick_run):
    tables = quick_run[0]['tables']
    assert tables.keys() == COLUMNS_BY_CASE.keys()
    for case, columns in COLUMNS_BY_CASE.items():
        assert tables[case] and all(columns <= row.keys() for row in tables[case]), case


def test_every_time_is_the_median_of_the_times_measured(quick_run):
    for row in sum(quick_run[0]['tables'].values(), []):
        measured = {name: values for name, values in row.items() if name.endswith('_quartiles_ms') and values}
        assert measured
        for name, values in measured.items():
            assert 0 < values[0] <= values[2] == row[name.replace('_quartiles', '')] <= values[4]


def test_the_json_says_what_it_ran_on(quick_run):
    written = quick_run[0]
    assert {'machine', 'python', 'numpy', 'torch', 'commit', 'options'} <= written.keys()


def test_printed_tables_and_json_have_the_same_rows(quick_run):
    written, result = quick_run
    for case, rows in written['tables'].items():
        table = result.stdout.split(f'\n{case}: ')[1].split('\n\n')[0].splitlines()
        assert len(table) == 2 + len(rows)
        assert table[1].split() == [name for name, value in rows[0].items() if not isinstance(value, list)]


def test_ours_and_upstream_move_the_same_elements(quick_run):
    written, result = quick_run
    if 'without upstream: ' in result.stderr:
        pytest.skip(result.stderr.split('without upstream: ')[1].splitlines()[0])
    for case in ('row-to-row', 'row-to-column'):
        assert [row['same_elements'] for row in written['tables'][case]] == [True, True]


def test_spreading_replicas_loads_all_senders_alike(quick_run):
    lowest, spread = quick_run[0]['tables']['replicas']
    assert lowest['senders'] == 1 and spread['senders'] == spread['trainers']
    assert spread['sent_to_best'] <= 1.05 and spread['received_to_best'] <= 1.05


def test_comparison_sees_which_element_goes_where(sources_of_elements):
    assert sources_of_elements(SEGMENTS, ROWS, COLUMNS).tolist() == [0, 2, 1, 3]
    by_columns = [
        TransferSegment(0, 0, (1, 1), 0, 0, (1, 1), (1, 1)),
        TransferSegment(1, 0, (1, ), 0, 1, (1, ), (1, )),
        TransferSegment(0, 1, (5, ), 1, 0, (7, ), (1, )), SEGMENTS[3]
    ]
    assert sources_of_elements(by_columns, ROWS, COLUMNS).tolist() == [0, 2, 1, 3]
    strided = [TransferSegment(rank, 0, (1, ), rank, 0, (1, ), (2, )) for rank in (0, 1)]
    assert sources_of_elements(strided, ROWS, COLUMNS).tolist() == [0, 1, 2, 3]


def test_comparison_refuses_a_hole_and_a_second_write(sources_of_elements):
    assert sources_of_elements(SEGMENTS[:3], ROWS, COLUMNS) is None
    assert sources_of_elements(SEGMENTS + SEGMENTS[:1], ROWS, COLUMNS) is None
    assert sources_of_elements(SEGMENTS[:3] + SEGMENTS[:1], ROWS, COLUMNS) is None
