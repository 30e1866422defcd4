# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Every way to install the fork gives an ordinary deepspeed: upstream's files, ours over them, our mixin."""

import json
import os
import shutil
import sys
from email.parser import HeaderParser

import pytest

from install.environments import Environment, copy_checkout, files_below, run

VERSION = '0.19.8+affine.0.1.0'
SCRIPTS = {'deepspeed', 'deepspeed.pt', 'ds', 'ds_bench', 'ds_io', 'ds_nvme_tune', 'ds_report', 'ds_ssh', 'dsr'}
EDITED = {'runtime/engine.py', 'git_version_info_installed.py'}

FACTS = """
import importlib.metadata, json
import deepspeed, torch
import deepspeed.checkpoint.affine, deepspeed.runtime.zero.zero_affine
print(json.dumps({
    'file': deepspeed.__file__,
    'version': deepspeed.__version__,
    'distribution_version': importlib.metadata.version('deepspeed'),
    'engine_bases': [base.__name__ for base in deepspeed.DeepSpeedEngine.__mro__],
    'cuda_initialized': torch.cuda.is_initialized(),
}))
"""


def install_editable(environment, checkout, upstream_sdist):
    environment.pip('install', '--editable', checkout)


def install_from_tree(environment, checkout, upstream_sdist):
    environment.pip('install', checkout)


def install_wheel(environment, checkout, upstream_sdist):
    run(sys.executable, '-m', 'build', '--wheel', checkout, cwd=checkout.parent)
    environment.pip('install', *checkout.glob('dist/*.whl'))


def install_sdist(environment, checkout, upstream_sdist):
    run(sys.executable, '-m', 'build', '--sdist', checkout, cwd=checkout.parent)
    environment.pip('install', *checkout.glob('dist/*.tar.gz'))


def install_over_upstream(environment, checkout, upstream_sdist):
    environment.pip('install', '--no-build-isolation', upstream_sdist)
    environment.pip('install', checkout)


INSTALLS = [install_editable, install_from_tree, install_wheel, install_sdist, install_over_upstream]


@pytest.fixture(scope='module', params=INSTALLS, ids=[install.__name__ for install in INSTALLS])
def installed(request, tmp_path_factory, upstream_sdist):
    """(environment, the checkout it was installed from)"""
    folder = tmp_path_factory.mktemp(request.param.__name__)
    environment = Environment(folder / 'environment')
    checkout = copy_checkout(folder / 'checkout')
    request.param(environment, checkout, upstream_sdist)
    return environment, checkout


@pytest.fixture(scope='module')
def facts(installed):
    """What Python says that is started in the checkout, whose own deepspeed folder comes first on its path."""
    environment, checkout = installed
    return json.loads(environment.python('-c', FACTS, cwd=checkout).stdout.splitlines()[-1])


def test_import_in_the_checkout_takes_the_installed_package(installed, facts):
    environment, _ = installed
    assert facts['file'] == str(environment.package() / '__init__.py')


def test_package_and_distribution_have_the_forks_version(facts):
    assert (facts['version'], facts['distribution_version']) == (VERSION, VERSION)


def test_engine_has_the_mixin_before_module(facts):
    assert facts['engine_bases'][:3] == ['DeepSpeedEngine', 'ZeroAffineEngineMixin', 'Module']


def test_import_leaves_cuda_alone(facts):
    assert facts['cuda_initialized'] is False


def test_package_holds_upstreams_files_and_ours_and_no_other(installed, upstream_tree):
    environment, checkout = installed
    upstream, ours = files_below(upstream_tree / 'deepspeed'), files_below(checkout / 'deepspeed')
    composed = files_below(environment.package())
    assert composed.keys() == upstream.keys() | ours.keys()
    expected = {**upstream, **ours}
    assert {name for name in composed if composed[name] != expected[name]} == EDITED


def test_engine_differs_from_upstreams_by_the_mixin_alone(installed, upstream_tree):
    environment, _ = installed
    engine = (environment.package() / 'runtime/engine.py').read_text('utf-8')
    mixin = 'from deepspeed.runtime.zero.zero_affine import ZeroAffineEngineMixin\n\n\n'
    assert engine.count(mixin) == 1
    without = engine.replace(mixin, '').replace('(ZeroAffineEngineMixin, Module):', '(Module):')
    assert without == (upstream_tree / 'deepspeed/runtime/engine.py').read_text('utf-8')


def test_requirements_and_extras_are_upstreams(installed, upstream_tree):
    environment, _ = installed
    (information, ) = environment.site_packages.glob('deepspeed-*.dist-info')

    def requirements(metadata):
        headers = HeaderParser().parsestr(metadata.read_text('utf-8'))
        return {field: set(headers.get_all(field)) for field in ('Provides-Extra', 'Requires-Dist')}

    def without_all(lines):
        return {line for line in lines if 'extra == "all"' not in line}

    ours, upstream = requirements(information / 'METADATA'), requirements(upstream_tree / 'PKG-INFO')
    assert ours['Provides-Extra'] == upstream['Provides-Extra']
    assert without_all(ours['Requires-Dist']) == without_all(upstream['Requires-Dist'])
    (all_extras, ) = ours['Requires-Dist'] - without_all(ours['Requires-Dist'])
    named = all_extras[all_extras.index('[') + 1:all_extras.index(']')].replace('_', '-').split(',')
    assert {*named, 'all'} == ours['Provides-Extra']


def test_random_seeder_entry_point_is_kept(installed):
    environment, _ = installed
    (information, ) = environment.site_packages.glob('deepspeed-*.dist-info')
    text = (information / 'entry_points.txt').read_text()
    assert text.split() == [
        '[pytest_randomly.random_seeder]', 'deepspeed', '=', 'deepspeed.runtime.utils:set_random_seed'
    ]


def test_upstreams_scripts_are_executable(installed):
    environment, _ = installed
    present = {name for name in SCRIPTS if os.access(environment.script(name), os.X_OK)}
    assert present == SCRIPTS


def test_launcher_prints_its_help(installed):
    environment, _ = installed
    assert 'usage: deepspeed' in run(environment.script('deepspeed'), '--help', cwd=environment.folder).stdout


def test_report_names_the_forks_version(installed):
    environment, _ = installed
    assert VERSION in run(environment.script('ds_report'), cwd=environment.folder).stdout


def test_pip_finds_no_broken_requirement(installed):
    environment, _ = installed
    assert environment.pip('check').stdout.splitlines()[-1] == 'No broken requirements found.'


def test_uninstall_leaves_nothing_behind(installed, tmp_path):
    environment, _ = installed
    shutil.copytree(environment.folder, tmp_path / 'copy', symlinks=True)
    python = tmp_path / 'copy/bin/python'
    run(python, '-m', 'pip', 'uninstall', '--yes', 'deepspeed', cwd=tmp_path)
    assert [path for path in (tmp_path / 'copy').rglob('*deepspeed*') if 'linked' not in path.parts] == []
    assert run(python, '-c', 'import deepspeed', cwd=tmp_path, check=False).returncode != 0


def test_editable_install_shows_an_edit_at_once(tmp_path):
    environment, checkout = Environment(tmp_path / 'environment'), copy_checkout(tmp_path / 'checkout')
    install_editable(environment, checkout, None)
    with open(checkout / 'deepspeed/checkpoint/affine.py', 'a') as module:
        module.write('\nEDITED_AFTER_INSTALLATION = 7\n')
    ask = 'from deepspeed.checkpoint import affine; print(affine.EDITED_AFTER_INSTALLATION)'
    assert environment.python('-c', ask).stdout.splitlines()[-1] == '7'
