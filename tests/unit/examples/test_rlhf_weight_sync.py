# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The demo: its configurations pass its own check, the check fails when it should, a failure ends every process."""

import concurrent.futures
import contextlib
import io
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import pytest

DEMO = pathlib.Path(__file__).resolve().parents[3] / 'examples' / 'rlhf_weight_sync'
sys.path.insert(0, str(DEMO))

from processes import Worker, WorkerFailed, run_workers  # noqa: E402
from run import main  # noqa: E402

LIMIT_S = 100


def run_main(arguments):
    """The program's (exit status, stdout, stderr), run in the calling process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(['--model-size', 'tiny', *arguments])
    return status, out.getvalue(), err.getvalue()


@pytest.fixture(scope='module')
def elsewhere():
    """``elsewhere(function, *args)`` calls in one other process for all tests, where the server that forks the
    workers starts only once."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(LIMIT_S)


@pytest.fixture
def demo(elsewhere):
    return lambda *arguments: elsewhere(run_main, arguments)


@pytest.fixture
def start_command():
    """Starts the command in a process group of its own; what it leaves in the folder for temporary files goes."""
    # Not tmp_path: the server's socket lives in this folder, and the path of a socket must be short.
    with tempfile.TemporaryDirectory() as folder:
        yield lambda *arguments: subprocess.Popen(
            [sys.executable, str(DEMO / 'run.py'), '--model-size', 'tiny', *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=dict(os.environ, TMPDIR=folder))


def verified_elements(out):
    """The last cell of each row: rows are the lines that begin with a step's number."""
    return [int(line.split()[-1].replace(',', '')) for line in out.splitlines() if line.split()[0].isdigit()]


# The tiny model: 2 layers, embedding and head of 259 rows; the norms are replicated on all rollout workers.
NORM_ELEMENTS = 5 * 44
SHARDED_ELEMENTS = 2 * (2 * 32 * 44 + 2 * 16 * 44 + 3 * 44 * 58)
EMBEDDING_ELEMENTS = 259 * 44


@pytest.mark.parametrize('tp', [1, 2])
@pytest.mark.parametrize('offload', ['none', 'cpu'])
@pytest.mark.parametrize('stage', [1, 2, 3])
def test_every_element_arrives_from_every_kind_of_engine(demo, stage, offload, tp):
    status, out, err = demo('--stage', str(stage), '--offload', offload, '--tp', str(tp), '--steps', '2')
    assert status == 0, err
    assert verified_elements(out) == 2 * [SHARDED_ELEMENTS + 2 * EMBEDDING_ELEMENTS + tp * NORM_ELEMENTS]


@pytest.mark.parametrize('stage', ['1', '3'])
def test_three_trainers_share_unevenly_with_an_odd_vocabulary(demo, stage):
    status, out, err = demo('--stage', stage, '--trainers', '3', '--vocab-size', '263', '--steps', '2')
    assert status == 0, err
    assert verified_elements(out) == 2 * [SHARDED_ELEMENTS + 2 * 263 * 44 + 2 * NORM_ELEMENTS]


@pytest.mark.parametrize('stage', ['2', '3'])
def test_tied_embeddings_travel_once(demo, stage):
    status, out, err = demo('--stage', stage, '--tie-embeddings', '--steps', '2')
    assert status == 0, err
    assert verified_elements(out) == 2 * [SHARDED_ELEMENTS + EMBEDDING_ELEMENTS + 2 * NORM_ELEMENTS]


def test_fp32_weights_arrive_unconverted(demo):
    status, out, err = demo('--dtype', 'fp32', '--steps', '2')
    assert status == 0, err
    assert len(verified_elements(out)) == 2


def test_a_transfer_far_above_the_staging_budget_arrives_in_many_rounds(demo):
    status, out, err = demo('--bytes-per-peer', '512', '--steps', '1')
    assert status == 0, err
    row = out.splitlines()[-2].split()
    assert row[0] == '1'
    # Each rollout worker gets bf16 elements from two trainers, 512 bytes at most from each in a round.
    assert int(row[5]) >= (SHARDED_ELEMENTS // 2 + EMBEDDING_ELEMENTS) * 2 // (2 * 512)


def test_a_corrupted_shard_fails_the_program_with_parameter_worker_and_index(demo):
    status, _, err = demo('--steps', '1', '--corrupt', '1')
    assert status == 1
    assert 'model.layers.0.mlp.down_proj.weight on rollout worker 1' in err
    assert '1 of 1276 elements differ, first at index (3, 5)' in err


def test_ctrl_c_ends_every_process_quietly(start_command):
    command = start_command('--steps', '1000')
    while not command.stdout.readline().split()[:1] == ['1']:
        assert command.poll() is None
    # What a terminal does: every process of the command gets it.
    os.killpg(command.pid, signal.SIGINT)
    _, err = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 128 + signal.SIGINT
    assert 'Traceback' not in err
    assert_group_is_gone(command.pid)


def test_killing_the_launcher_ends_every_process(start_command):
    command = start_command('--steps', '1000')
    while not command.stdout.readline().split()[:1] == ['1']:
        assert command.poll() is None
    command.kill()
    command.wait(LIMIT_S)
    assert_group_is_gone(command.pid)


def assert_group_is_gone(group):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    pytest.fail('processes were left')


def die(report):
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(report):
    raise ValueError('no such weight')


def wait_for_ever(report):
    time.sleep(3600)


def reason_of_failure(failure):
    """What run_workers raises when one worker does ``failure`` and the other would never return."""
    with pytest.raises(WorkerFailed) as failed:
        run_workers([Worker('rank 0', failure, ()), Worker('rank 1', wait_for_ever, ())], lambda label, item: None)
    return str(failed.value)


@pytest.mark.parametrize('failure, reason', [(die, 'rank 0 died'),
                                             (refuse, 'rank 0 failed: ValueError: no such weight')])
def test_one_failing_worker_ends_the_others_with_its_reason(elsewhere, failure, reason):
    assert elsewhere(reason_of_failure, failure).startswith(reason)


def test_a_token_that_one_process_would_not_generate_is_found():
    import torch
    from check import CheckFailed, Reference
    from model import build_empty_model, build_model
    from options import JobOptions
    options = JobOptions(model_size='tiny')
    reference = Reference(build_empty_model(options, torch.float32))
    model = build_model(options)
    for name, parameter in model.named_parameters():
        reference.load(name, parameter)
    tokens = torch.arange(2 * 6).view(2, 6)
    with torch.no_grad():
        for _ in range(3):
            tokens = torch.cat([tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    reference.verify_tokens(tokens, prompt_tokens=6)
    tokens[1, 7] = (tokens[1, 7] + 1) % options.vocab_size
    with pytest.raises(CheckFailed, match='for prompt 1 at position 1'):
        reference.verify_tokens(tokens, prompt_tokens=6)


@pytest.mark.parametrize('arguments', [('--tp', '3'), ('--vocab-size', '255'), ('--steps', '0'), ('--corrupt', '2'),
                                       ('--bytes-per-peer', '1')])
def test_options_that_make_no_sense_are_refused_before_anything_starts(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(['--model-size', 'tiny', *arguments])
    assert exit_info.value.code == 2
    assert arguments[0] in capsys.readouterr().err
