# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

from hypothesis import HealthCheck, settings


def pytest_addoption(parser):
    parser.addoption('--property-cases',
                     type=int,
                     default=2000,
                     help='random cases for every property (default: 2000)')


def pytest_configure(config):
    # Machines are shared and noisy, so no case has a deadline; a failing case prints how to run it again.
    settings.register_profile('deepspeed',
                              max_examples=config.getoption('--property-cases'),
                              deadline=None,
                              print_blob=True,
                              database=None,
                              suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    settings.load_profile('deepspeed')
