# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The pinned release of DeepSpeed as PyPI serves it, which the tests compare with and build from."""

import shutil
import sys

import pytest

from install.environments import ROOT, run

VERSION = '0.19.8'


@pytest.fixture(scope='session')
def upstream_sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp('upstream-sdist')
    run(sys.executable,
        '-m',
        'pip',
        'download',
        '--no-deps',
        '--no-binary=deepspeed',
        '--no-build-isolation',
        f'--requirement={ROOT}/requirements/upstream.txt',
        cwd=folder)
    return folder / f'deepspeed-{VERSION}.tar.gz'


@pytest.fixture(scope='session')
def upstream_tree(upstream_sdist, tmp_path_factory):
    folder = tmp_path_factory.mktemp('upstream-tree')
    shutil.unpack_archive(upstream_sdist, folder)
    return folder / f'deepspeed-{VERSION}'
