# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import pytest
from hypothesis import HealthCheck, settings
from unit import ops


def pytest_addoption(parser):
    parser.addoption('--property-cases',
                     type=int,
                     default=2000,
                     help='random cases for every property (default: 2000)')
    parser.addoption('--seeds',
                     type=int,
                     default=40,
                     help='random schedules for every test on the simulated accelerator (default: 40)')
    parser.addoption('--simulated-accelerator',
                     action='store_true',
                     help='run the tests in simulated_accelerator/, and no others, in this process')


def pytest_configure(config):
    # Machines are shared and noisy, so no case has a deadline; a failing case prints how to run it again.
    settings.register_profile('deepspeed',
                              max_examples=config.getoption('--property-cases'),
                              deadline=None,
                              print_blob=True,
                              database=None,
                              suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    settings.load_profile('deepspeed')
    config.addinivalue_line('markers', "compiled_ops: needs DeepSpeed's own CPU optimizers, which are compiled first")


def pytest_collection_modifyitems(items):
    # It takes minutes in one process: two workers are done earlier when one of them begins with it.
    items.sort(key=lambda item: 'simulated_accelerator' not in item.nodeid)


def pytest_collection_finish(session):
    wanted = any(item.get_closest_marker('compiled_ops') for item in session.items)
    if wanted and ops.has_compiler() and not session.config.option.collectonly:
        ops.start_building()


def pytest_runtest_setup(item):
    if item.get_closest_marker('compiled_ops') is None:
        return
    if not ops.has_compiler():
        pytest.skip("no C++ compiler for DeepSpeed's own CPU optimizers")
    output = ops.output_of_failed_build()
    if output is not None:
        pytest.fail(f"DeepSpeed's own CPU optimizers do not compile:\n{output}", pytrace=False)


def pytest_unconfigure():
    ops.stop_building()
