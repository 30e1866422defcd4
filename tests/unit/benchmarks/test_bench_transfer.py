# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The transfer benchmarks: all methods bring the right values, wrong ones are found, rows have what README.md says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[3] / 'benchmarks' / 'affine_transfer'
COLUMNS = {'method', 'ms', 'GiB_per_s', 'to_bare', 'to_loop', 'extra_mb', 'file_mb', 'correct', 'runs', 'ms_quartiles'}
OURS = {'ours, first call', 'ours, later calls'}
ALWAYS_THERE = OURS | {'bare, one message', 'memcpy', 'loop: 2 buckets of 16 MiB', 'gather + broadcast + slice'}


def run_benchmark(*options):
    """The exit status, standard output and error of bench_transfer.py for a model of 1 MB."""
    # With an accelerator named, DeepSpeed does not print that it looked for one.
    return subprocess.run([sys.executable, FOLDER / 'bench_transfer.py', '--scale', '0.001', *options],
                          capture_output=True,
                          text=True,
                          timeout=300,
                          env=dict(os.environ, DS_ACCELERATOR='cpu'))


@pytest.fixture(scope='module')
def run_of_all(tmp_path_factory):
    """What a run of all jobs and methods wrote, and what it printed."""
    path = tmp_path_factory.mktemp('bench') / 'transfer.json'
    result = run_benchmark('--repeats', '2', '--json', path)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(path.read_text()), result


@pytest.fixture
def modules(monkeypatch):
    """Import from the benchmarks' folder, as its programs do."""
    monkeypatch.syspath_prepend(FOLDER)


def test_every_method_brings_the_right_values_in_both_jobs(run_of_all):
    tables = run_of_all[0]['tables']
    assert tables.keys() == {'weight-sync', 'resize', 'targets'}
    for job in ('weight-sync', 'resize'):
        assert ALWAYS_THERE <= {row['method'] for row in tables[job]}
        assert all(row['correct'] is True for row in tables[job])


def test_a_method_that_did_not_run_is_told_with_its_reason(run_of_all):
    written, result = run_of_all
    for job in ('weight-sync', 'resize'):
        has_run = 'Megatron-Core' in {row['method'] for row in written['tables'][job]}
        assert has_run != (f'{job}: without Megatron-Core: ' in result.stderr)


def test_rows_have_their_columns_and_times_are_medians(run_of_all):
    tables = run_of_all[0]['tables']
    for row in tables['weight-sync'] + tables['resize']:
        assert row.keys() == COLUMNS
        assert 0 < row['ms_quartiles'][0] <= row['ms_quartiles'][2] == row['ms'] <= row['ms_quartiles'][4]
        assert row['runs'] == 2


def test_the_json_says_what_it_ran_on(run_of_all):
    written = run_of_all[0]
    assert {'machine', 'python', 'numpy', 'torch', 'commit', 'options'} <= written.keys()
    assert written['options']['scale'] == 0.001


def test_the_fastest_of_a_kind_is_what_others_are_compared_with(run_of_all):
    for job in ('weight-sync', 'resize'):
        rows = run_of_all[0]['tables'][job]
        for kind, column in (('bare, ', 'to_bare'), ('loop: ', 'to_loop')):
            best = min((row for row in rows if row['method'].startswith(kind)), key=lambda row: row['ms'])
            assert best[column] == 1


def test_targets_compare_later_calls_with_every_peer(run_of_all):
    targets = [row['target'] for row in run_of_all[0]['tables']['targets']]
    for peer in ('gather + broadcast + slice', 'checkpoint through /dev/shm', 'loop: '):
        assert sum(peer in target for target in targets) == 2
    assert sum('speed to bare' in target for target in targets) == 1
    for job in ('weight-sync', 'resize'):
        bounds = [row for row in run_of_all[0]['tables']['targets'] if row['target'].startswith(f'{job}: ')]
        assert len(bounds) == 2 and all(0 < row['reached'] <= row['at_most'] for row in bounds)


def test_one_wrong_element_is_found_and_told(tmp_path):
    path = tmp_path / 'transfer.json'
    spoilt = ['ours, later calls', 'bare, one message']
    result = run_benchmark('--jobs', 'resize', '--repeats', '1', '--methods', *spoilt, 'memcpy', '--corrupt', *spoilt,
                           '--json', path)
    correct = {row['method']: row['correct'] for row in json.loads(path.read_text())['tables']['resize']}
    assert correct == {**dict.fromkeys(spoilt, False), 'memcpy': True}
    assert result.returncode == 1


def test_the_oracle_places_halves_and_partitions(modules):
    from transfer_jobs import JOBS
    shapes = {'a.q_proj.weight': (4, 6), 'a.o_proj.weight': (2, 4), 'a.norm.weight': (2, )}
    sync, resize = (JOBS[name](shapes) for name in ('weight-sync', 'resize'))

    def held(job, name, location):
        full = torch.arange(shapes[name][0] * (shapes[name] + (1, ))[1]).view(shapes[name])
        return job.target_region(name, location).of(full).tolist()

    assert held(sync, 'a.q_proj.weight', 1) == [list(range(12, 18)), list(range(18, 24))]
    assert held(sync, 'a.o_proj.weight', 1) == [[2, 3], [6, 7]]
    assert held(sync, 'a.norm.weight', 1) == [0, 1]
    # 34 elements in partitions of 12, the last one padded.
    assert [held(resize, 'a.q_proj.weight', rank) for rank in range(3)] == [list(range(12)), list(range(12, 24)), []]
    assert [held(resize, 'a.norm.weight', rank) for rank in range(3)] == [[], [], [0, 1]]


def test_values_depend_on_parameter_and_index_alone_and_need_rounding(modules):
    from transfer_jobs import JOBS
    job = JOBS['weight-sync']({'a.weight': (3000, 1000), 'b.weight': (3000, 1000)})
    whole = job.values('a.weight', 0, 3000000)
    assert torch.equal(job.values('a.weight', 2500000, 1000), whole[2500000:2501000])
    assert not torch.equal(job.values('b.weight', 0, 1000), whole[:1000])
    assert (whole.bfloat16().float() != whole).float().mean() > 0.99
    assert torch.equal(torch.cat([job.master('a.weight', trainer) for trainer in range(2)]), whole)


def test_gpu_benchmark_compares_every_pair_of_memories_that_has_the_device_in_it(modules):
    import bench_gpu
    from models import llama_of, parameter_shapes
    rows = bench_gpu.measure_all(parameter_shapes(llama_of(0.001)), torch.device('cpu'), repeats=1)
    assert len({(row['layout'], row['source'], row['target']) for row in rows}) == len(rows) == 2 * 5
    assert all(row['correct'] is True and row['to_bare'] > 0 for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_gpu_check_says_at_once_that_there_is_no_gpu(tmp_path):
    result = subprocess.run([FOLDER / 'gpu_check.sh', tmp_path],
                            capture_output=True,
                            text=True,
                            timeout=60,
                            env=dict(os.environ, PYTHON=sys.executable))
    assert result.returncode != 0
    assert 'no CUDA device' in result.stderr
