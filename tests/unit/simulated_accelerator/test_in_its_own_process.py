# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Runs the tests of this folder in a pytest process of their own, since they give torch a device for good."""

import subprocess
import sys
from pathlib import Path

import pytest

LACKS_TORCH_API = 77
FOLDER = Path(__file__).parent


def test_everything_under_the_simulated_accelerator(request):
    seeds = request.config.getoption('--seeds')
    command = [
        sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '--simulated-accelerator', f'--seeds={seeds}',
        str(FOLDER)
    ]
    result = subprocess.run(command,
                            cwd=FOLDER.parents[2],
                            text=True,
                            stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)
    if result.returncode == LACKS_TORCH_API:
        pytest.skip(result.stdout.strip().splitlines()[-1])
    assert result.returncode == 0, f'{" ".join(command)}\n{result.stdout}'
