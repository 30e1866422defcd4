# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import pytest

OWN_PROCESS_TEST = 'test_in_its_own_process.py'


def pytest_configure(config):
    if not config.getoption('--simulated-accelerator'):
        return
    from . import accelerator
    missing = accelerator.missing_in_torch()
    if missing:
        pytest.exit(f'torch lacks {missing}, which the simulated accelerator needs', returncode=77)
    accelerator.install()


def pytest_ignore_collect(collection_path, config):
    """The device is registered once per process and for good, so its tests and all others exclude one another."""
    if collection_path.name.startswith('test_'):
        is_own_process_test = collection_path.name == OWN_PROCESS_TEST
        return True if is_own_process_test == config.getoption('--simulated-accelerator') else None


@pytest.fixture
def seeds(request):
    """The seeds that a test of random schedules runs through."""
    return range(request.config.getoption('--seeds'))
