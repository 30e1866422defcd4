# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The transfer benchmarks: all methods bring the right values, wrong ones are found, rows have what README.md says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[3] / 'benchmarks' / 'affine_transfer'
COLUMNS = {
    'method', 'ms', 'GiB_per_s', 'to_bare', 'to_loop', 'cores', 'extra_mb', 'file_mb', 'correct', 'runs',
    'ms_quartiles'
}
OURS = {'ours, first call', 'ours, later calls', 'ours over gloo, later calls'}
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
    result = run_benchmark('--launches', '2', '--repeats', '1', '--json', path)
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
        names = {row['method'] for row in written['tables'][job]}
        for method in ('Megatron-Core', 'convert and unpack'):
            assert (method in names) != (f'{job}: without {method}: ' in result.stderr)
        assert ('convert and unpack' in names) == (job == 'weight-sync')


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


def test_every_target_is_there_and_staging_and_growth_are_within_the_bound(run_of_all):
    rows = {row['target']: row for row in run_of_all[0]['tables']['targets']}
    for job, best in (('weight-sync', 'loop: '), ('resize', 'bare, ')):
        for ours, compared in (('ours over gloo', best), ('ours', 'bare, ')):
            speeds = [text for text in rows if text.startswith(f'{job}: {ours}, later calls, times as fast as: ')]
            assert compared in speeds[0]
            peers = [text.rsplit(': ')[-1] for text in speeds[1:]]
            assert peers[:2] == ['gather + broadcast + slice', 'checkpoint through /dev/shm']
        for text in (f'{job}: staging of later calls, MB', *(f'{job}: extra memory of a process, MB: {ours}'
                                                             for ours in OURS)):
            assert 0 < rows[text]['reached'] <= rows[text]['at_most'] and rows[text]['met'] is True
        assert rows[f'{job}: extra memory of a process, MB: gather + broadcast + slice']['met'] is None


@pytest.fixture
def outcome(modules):
    """What three rounds of some methods could have found out, with two cores busy."""
    from bench_transfer import Measured, Outcome
    seconds = {
        'ours, later calls': [1, 2, 2],
        'ours over gloo, later calls': [2, 2, 3],
        'ours, first call': [5, 5, 5],
        'bare, messages of 8 MiB': [2, 2, 2],
        'bare, one message': [1, 1, 1],
        'convert and unpack': [1, 3, 2],
        'loop: 2 buckets of 16 MiB': [1, 2, 9],
        'checkpoint through /dev/shm': [8, 8, 9]
    }
    methods = [
        Measured(name, rounds, cpu_seconds=[2 * took for took in rounds], correct=True, extra_mb=40., file_mb=0.)
        for name, rounds in seconds.items()
    ]
    return Outcome(methods, {}, moved_bytes=8, staging_mb=20., bound_mb=30., has_kept_masters=True)


def test_cores_are_the_processor_time_of_all_processes_to_the_time_of_a_round(outcome):
    from bench_transfer import rows_of
    assert {row['cores'] for row in rows_of(outcome)} == {2}


def test_targets_are_medians_over_the_rounds(outcome):
    from bench_transfer import targets_of
    assert [tuple(row.values()) for row in targets_of({'weight-sync': outcome})] == [
        ('weight-sync: ours over gloo, later calls, times as fast as: loop: 2 buckets of 16 MiB', 0.95, None, 1, True,
         [1]),
        ('weight-sync: ours over gloo, later calls, times as fast as: checkpoint through /dev/shm', None, None, 4,
         None, [4]),
        ('weight-sync: ours, later calls, times as fast as: bare, one message', None, None, 0.5, None, [0.5]),
        ('weight-sync: ours, later calls, times as fast as: checkpoint through /dev/shm', 3, None, 4.5, True, [4.5]),
        ('weight-sync: bare, then converting and unpacking alone, times as fast as: checkpoint through /dev/shm', None,
         None, 3, None),
        ('weight-sync: staging of later calls, MB', None, 30, 20, True),
        ('weight-sync: extra memory of a process, MB: ours, later calls', None, 30, 40, False),
        ('weight-sync: extra memory of a process, MB: ours over gloo, later calls', None, 30, 40, False),
        ('weight-sync: extra memory of a process, MB: ours, first call', None, 30, 40, False),
        ('weight-sync: extra memory of a process, MB: checkpoint through /dev/shm', None, None, 40, None),
    ]


def test_launches_count_together_and_each_one_is_told(outcome):
    from bench_transfer import Outcome, rows_of, targets_of
    slow = outcome._replace(staging_mb=25.,
                            has_kept_masters=False,
                            methods=[
                                measured._replace(seconds=[10 * took for took in measured.seconds],
                                                  correct=measured.name != 'bare, one message',
                                                  extra_mb=50.) if measured.name.startswith('bare') else measured
                                for measured in outcome.methods
                            ])
    together = Outcome.over([outcome, slow])
    assert (together.staging_mb, together.has_kept_masters) == (25., False)
    rows = {row['method']: row for row in rows_of(together)}
    assert {row['runs'] for row in rows.values()} == {6}
    bare = rows['bare, one message']
    assert (bare['ms'], bare['extra_mb'], bare['correct']) == (5500, 50., False)
    row, = (row for row in targets_of({'weight-sync': together}) if 'as fast as: bare' in row['target'])
    # 1/1, 1/2 and 1/2 at first, ten times that in the other launch.
    assert (row['reached'], row['by_launch']) == (3, [0.5, 5])


@pytest.mark.parametrize('job, spoilt', [('resize', ['ours, later calls', 'bare, one message']),
                                         ('weight-sync', ['ours, first call', 'convert and unpack'])])
def test_one_wrong_element_is_found_and_told(job, spoilt, tmp_path):
    path = tmp_path / 'transfer.json'
    result = run_benchmark('--jobs', job, '--launches', '1', '--repeats', '1', '--methods', *spoilt, 'memcpy',
                           '--corrupt', *spoilt, '--json', path)
    correct = {row['method']: row['correct'] for row in json.loads(path.read_text())['tables'][job]}
    assert correct == {**dict.fromkeys(spoilt, False), 'memcpy': True}
    assert result.returncode == 1


def test_converting_alone_is_wrong_where_its_slots_hold_anything_but_the_last_pieces(modules, monkeypatch):
    import transfer_parts
    from transfer_jobs import JOBS
    # 7 elements and 2, in pieces of 3, 3, 1 and 2; nothing to unpack.
    monkeypatch.setattr(transfer_parts.ConvertAndUnpack, 'slot_bytes', 6)
    monkeypatch.setattr(transfer_parts, 'boxes_of', lambda *_: {})
    job = JOBS['weight-sync']({'a.weight': (3, 5), 'b.weight': (4, )})
    masters = {name: job.master(name, 1) for name in job.shapes}
    participant = SimpleNamespace(job=job, rank=1, source=1, sources=masters, spoil_targets=lambda: None)
    method = transfer_parts.ConvertAndUnpack(participant)
    assert method.wrong_elements() == 6
    method.run()
    assert method.wrong_elements() == 0
    method.spoil()
    assert method.wrong_elements() == 1
    masters['a.weight'][4:] += 1
    method.run()
    assert method.wrong_elements() == 2
    method.reset()
    assert method.wrong_elements() == 6


def test_a_job_without_a_method_that_can_do_it_measures_nothing():
    result = run_benchmark('--jobs', 'resize', '--launches', '1', '--methods', 'convert and unpack')
    assert result.returncode == 0 and 'resize: without convert and unpack: this job converts nothing' in result.stderr


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
