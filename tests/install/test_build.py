# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a build takes upstream's release from, how it fails, and that a failed one does not spoil the next."""

import hashlib
import os
import shutil
import sys
from sysconfig import get_platform

import pytest

from install.environments import Environment, copy_checkout, files_below, run

CLASS_STATEMENT = 'class DeepSpeedEngine(Module):\n'


@pytest.fixture
def checkout(tmp_path):
    return copy_checkout(tmp_path / 'checkout')


@pytest.fixture
def tree(tmp_path, upstream_tree):
    """An unpacked release that a test may spoil."""
    return shutil.copytree(upstream_tree, tmp_path / 'tree')


@pytest.fixture
def other_sdist(tmp_path, upstream_sdist):
    """An archive of the release's name with other bytes, in a folder of its own."""
    folder = tmp_path / 'other'
    folder.mkdir()
    shutil.copy(upstream_sdist, folder)
    return append(folder / upstream_sdist.name, b'\0')


def append(path, data):
    with open(path, 'ab') as file:
        file.write(data)
    return path


def build_wheel(checkout, check=True, **variables):
    options = ['--no-deps', '--no-build-isolation', '--wheel-dir', 'dist']
    return run(sys.executable, '-m', 'pip', 'wheel', *options, '.', cwd=checkout, check=check, **variables)


def wheel_files(checkout):
    """Relative name -> bytes of the package in the only wheel of checkout/dist."""
    (wheel, ) = checkout.glob('dist/*.whl')
    folder = checkout / 'unpacked'
    shutil.unpack_archive(wheel, folder, 'zip')
    return files_below(folder / 'deepspeed')


def build_editable(checkout, check=True, **variables):
    environment = Environment(checkout.parent / 'environment')
    options = ['--no-deps', '--no-build-isolation']
    return environment.pip('install', *options, '--editable', '.', cwd=checkout, check=check, **variables)


@pytest.fixture(params=[build_wheel, build_editable], ids=['wheel', 'editable'])
def refusal(request, checkout):
    """Function: the one line that a build with these environment variables fails with."""

    def one_line(**variables):
        result = request.param(checkout, check=False, **variables)
        assert result.returncode != 0, result.stdout
        assert 'Traceback' not in result.stdout
        lines = [line.strip() for line in result.stdout.splitlines()]
        (line, ) = [line for line in lines if line.startswith('error: ') and 'DS_' in line]
        return line

    return one_line


def closed_index():
    """Environment variables that leave pip with an index that refuses connections."""
    return {
        'PIP_CONFIG_FILE': os.devnull,
        'PIP_INDEX_URL': 'http://127.0.0.1:9/simple',
        'PIP_EXTRA_INDEX_URL': '',
        'PIP_FIND_LINKS': '',
        'PIP_RETRIES': '0'
    }


def test_unreachable_index_is_refused(refusal):
    assert refusal(**closed_index()).startswith('error: cannot take deepspeed==0.19.8 from the package index')


def test_release_of_another_sha256_from_the_index_is_refused(refusal, other_sdist):
    line = refusal(PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX='1', PIP_FIND_LINKS=str(other_sdist.parent))
    assert line.startswith('error: the sha256 of the deepspeed 0.19.8 that the package index serves is not in')


def test_archive_of_another_sha256_is_refused(refusal, other_sdist):
    assert 'is not a file whose sha256 is in requirements/upstream.txt' in refusal(DS_UPSTREAM=str(other_sdist))


def test_missing_archive_is_refused(refusal, tmp_path):
    assert f'DS_UPSTREAM={tmp_path}/none.tar.gz is not a file' in refusal(DS_UPSTREAM=f'{tmp_path}/none.tar.gz')


def test_tree_of_another_version_is_refused(refusal, tree):
    (tree / 'version.txt').write_text('0.19.9\n')
    assert refusal(DS_UPSTREAM=str(tree)).endswith('is DeepSpeed 0.19.9: set it to a tree of 0.19.8')


@pytest.mark.parametrize('count', [0, 2])
def test_engine_without_exactly_one_class_statement_is_refused(refusal, tree, count):
    engine = tree / 'deepspeed/runtime/engine.py'
    text = engine.read_text('utf-8')
    engine.write_text(text.replace(CLASS_STATEMENT, CLASS_STATEMENT * count), 'utf-8')
    assert f'has {count} lines "class DeepSpeedEngine(Module):", the fork needs' in refusal(DS_UPSTREAM=str(tree))


def test_request_to_compile_ops_is_refused(refusal):
    assert refusal(DS_BUILD_OPS='1').endswith('compiles every op on first use: unset it')


def test_incomplete_tree_fails_an_editable_build_too(checkout, tree):
    # setuptools carries on when build_py raises an ordinary exception in an editable build
    (tree / 'deepspeed/runtime/engine.py').unlink()
    result = build_editable(checkout, check=False, DS_UPSTREAM=str(tree))
    assert result.returncode != 0
    (line, ) = [line for line in result.stdout.splitlines() if 'error: cannot compose the fork: ' in line]
    assert 'FileNotFoundError' in line and 'runtime/engine.py' in line


def test_build_after_a_failed_one_takes_nothing_over(checkout, tree, upstream_sdist):
    engine = tree / 'deepspeed/runtime/engine.py'
    append(engine, CLASS_STATEMENT.encode())
    append(tree / 'deepspeed/leftover.py', b'')
    assert build_wheel(checkout, check=False, DS_UPSTREAM=str(tree)).returncode != 0
    assert (checkout /
            'build/lib/deepspeed/leftover.py').exists(), 'the first build failed too early to leave anything'
    build_wheel(checkout, DS_UPSTREAM=str(upstream_sdist))
    composed = wheel_files(checkout)
    assert 'leftover.py' not in composed
    assert composed['runtime/engine.py'].count(b'class DeepSpeedEngine(') == 1


def test_leftovers_of_interrupted_builds_are_not_used(checkout, upstream_sdist):
    for folder in ('lib/deepspeed', f'bdist.{get_platform()}/wheel/deepspeed'):
        (checkout / 'build' / folder).mkdir(parents=True)
        append(checkout / 'build' / folder / 'leftover.py', b'')
    archive = append(checkout / 'build' / upstream_sdist.name, upstream_sdist.read_bytes()[:1000])
    build_wheel(checkout)
    assert 'leftover.py' not in wheel_files(checkout)
    assert archive.read_bytes() == upstream_sdist.read_bytes()


def test_second_build_asks_no_index(checkout):
    build_wheel(checkout)
    build_wheel(checkout, **closed_index())


def test_ours_replace_upstreams_even_when_older(checkout, upstream_sdist):
    ours = checkout / 'deepspeed/checkpoint/affine.py'
    os.utime(ours, (0, 0))
    build_wheel(checkout, DS_UPSTREAM=str(upstream_sdist))
    assert wheel_files(checkout)['checkpoint/affine.py'] == ours.read_bytes()


def test_tree_and_listed_wheel_give_what_the_sdist_gives(tmp_path, upstream_sdist, upstream_tree):
    command = [sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--no-build-isolation', upstream_sdist]
    run(*command, cwd=tmp_path)
    (wheel, ) = tmp_path.glob('*.whl')
    composed = []
    for source in (upstream_sdist, upstream_tree, wheel):
        checkout = copy_checkout(tmp_path / f'checkout-{len(composed)}')
        if source == wheel:
            pin = checkout / 'requirements/upstream.txt'
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            pin.write_text(f'{pin.read_text().rstrip()} --hash=sha256:{digest}\n')
        build_wheel(checkout, DS_UPSTREAM=str(source))
        composed.append(wheel_files(checkout))
    assert composed[0] == composed[1] == composed[2]
