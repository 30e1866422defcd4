# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Each attribute that is read from DeepSpeed, taken away from a real engine: the user is told plainly what is missing.

The names are those in the calls of ``read`` in the sources. On each engine the calls are recorded first, with the
objects they read from; then each attribute is taken away in turn, and every function of the engine is called.
"""

import ast
import contextlib
import functools
import sys
import types
from pathlib import Path

import pytest
import torch
from unit.ops import use_compiled_ops
from unit.runtime.zero.engines import EvenModel, build_engine, config_of, observed, start_deepspeed
from unit.runtime.zero.parallel_engines import adam_of_experts, forget_groups

import deepspeed.comm
from deepspeed.runtime.zero import zero_affine_upstream
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

SOURCES = sorted((Path(__file__).resolve().parents[4] / 'deepspeed' / 'runtime' / 'zero').glob('zero_affine*.py'))
TREES = {source.name: ast.parse(source.read_text('utf-8')) for source in SOURCES}


def nodes_of(kind):
    return [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, kind)]


def names_read():
    """The attributes that the sources read, and those whose names stand in the table of flat groups."""
    names = {name for table in zero_affine_upstream._FLAT_GROUP_ATTRIBUTES.values() for name in table}
    for call in nodes_of(ast.Call):
        if isinstance(call.func, ast.Name) and call.func.id == 'read' and len(call.args) == 2:
            constants = [node.value for node in ast.walk(call.args[1]) if isinstance(node, ast.Constant)]
            names.update(name for path in constants for name in path.split('.'))
    return sorted(names)


class ModelWithExperts(torch.nn.Module):

    def __init__(self):
        super().__init__()
        from deepspeed.moe.layer import MoE
        self.experts = MoE(6, torch.nn.Linear(6, 6), num_experts=2, ep_size=2)
        self.head = torch.nn.Linear(6, 6)


def stage_3_with_partial_offload():
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    return build_engine(config_of(3, {'device': 'cpu', 'ratio': 0.5}), EvenModel, DeepSpeedCPUAdam)


def stage_3_while_offloaded():
    engine = build_engine(config_of(3), EvenModel)
    engine.offload_states(include=[OffloadStateTypeEnum.lp_params])
    return engine


ENGINES = [
    functools.partial(build_engine, config_of(1), EvenModel),
    functools.partial(build_engine, config_of(1, dtype='bf16', grad_accum_dtype='fp32'), EvenModel),
    functools.partial(build_engine, config_of(3), EvenModel, None),
    stage_3_with_partial_offload,
    stage_3_while_offloaded,
    functools.partial(build_engine, config_of(2), ModelWithExperts, adam_of_experts),
    functools.partial(build_engine,
                      config_of(3) | {
                          'data_parallel_size': 1,
                          'sequence_parallel_size': 2
                      }, EvenModel),
]


def observe_attributes(rank):
    start_deepspeed()
    use_compiled_ops()
    seen = {'errors': [], 'names': set()}
    for build in ENGINES:
        engine = build()
        usual = list(outcomes_of(engine))
        for (owner_name, name), owner in recorded(engine).items():
            seen['names'] |= names_of(owner)
            with taken_away(owner, name):
                # DeepSpeed's own functions lack the attribute too, with an AttributeError.
                errors = (outcome for outcome, before in zip(outcomes_of(engine), usual)
                          if outcome != before and outcome[0] != 'AttributeError')
                seen['errors'].append((owner_name, name, next(errors, None)))
        engine.destroy()
        forget_groups()
    return seen


def names_of(owner):
    """The attributes that DeepSpeed gives to an object of its own, or sets on one of torch's."""
    if isinstance(owner, types.ModuleType):
        return {name for name in vars(owner) if name.startswith('_')}
    classes = [base for base in type(owner).__mro__ if base.__module__.startswith('deepspeed.')]
    return set(vars(owner)).union(*map(vars, classes))


def outcomes_of(engine):
    """The class and text of the error that each function raises; the first ones still know the layout."""
    moments = functools.partial(engine.optimizer_storage, 'exp_avg')
    for function in (moments, engine.parameter_storage):
        yield outcome_of(function)
    for name in [name for name in vars(engine) if name.startswith(('_optimizer_storage', '_parameter_storage'))]:
        delattr(engine, name)
    for function in (engine.optimizer_storage_maps, engine.optimizer_storage, moments, engine.parameter_storage_maps,
                     engine.parameter_storage, engine.update_lp_params):
        yield outcome_of(function)


def outcome_of(function):
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)


def recorded(engine):
    """The first owner of each attribute that is read, by the owner's name and the attribute's."""
    owners = {}

    def recording(owner, path):
        for name in path.split('.'):
            owners.setdefault((getattr(owner, '__name__', type(owner).__name__), name), owner)
            owner = getattr(owner, name)
        return owner

    original = zero_affine_upstream.read
    readers = [module for module in list(sys.modules.values()) if vars(module).get('read') is original]
    with contextlib.ExitStack() as stack:
        for module in readers:
            stack.callback(setattr, module, 'read', original)
            module.read = recording
        list(outcomes_of(engine))
    return owners


@contextlib.contextmanager
def taken_away(owner, name):
    own = [attributes for attributes in (vars(owner), vars(owner).get('_modules', {})) if name in attributes]
    if own:
        value = own[0].pop(name)
    else:
        holder = next(base for base in type(owner).__mro__ if name in vars(base))
        value = vars(holder)[name]
        delattr(holder, name)
    try:
        yield
    finally:
        if own:
            own[0][name] = value
        else:
            setattr(holder, name, value)


@pytest.mark.compiled_ops
@pytest.mark.parametrize('name', names_read())
def test_a_missing_attribute_is_named_with_its_class_and_the_release(name):
    for seen in observed(observe_attributes, 2):
        errors = {owner: error for owner, attribute, error in seen['errors'] if attribute == name}
        assert errors, f'none of the engines here reads {name}: add one to ENGINES that does'
        for owner, error in errors.items():
            assert error == ('RuntimeError', f'{owner} has no attribute {name!r}: ZeRO storage was written for '
                             'DeepSpeed 0.19.8, and this release keeps it elsewhere')


# The public face of an engine, of deepspeed.comm and of torch.
PUBLIC_OF_ENGINES = {'module', 'optimizer', 'autotp_size', 'zero_optimization_stage'}
PUBLIC_OBJECTS = [deepspeed.comm, torch.Tensor, torch.nn.Module, torch.optim.SGD([torch.zeros(1)])]


def own_names():
    """What the sources define: functions, classes and fields."""
    defined = {node.name for node in nodes_of((ast.FunctionDef, ast.ClassDef))}
    defined |= {node.target.id for node in nodes_of(ast.AnnAssign) if isinstance(node.target, ast.Name)}
    assigned = [node for node in nodes_of(ast.Attribute) if isinstance(node.ctx, ast.Store)]
    return defined | {node.attr for node in assigned if isinstance(node.value, ast.Name) and node.value.id == 'self'}


def literal_names(call):
    """The attribute that a call of getattr or hasattr names by itself, not by a constant of DeepSpeed's."""
    named = isinstance(call.func, ast.Name) and call.func.id in ('getattr', 'hasattr')
    return [call.args[1].value] if named and isinstance(call.args[1], ast.Constant) else []


@pytest.mark.compiled_ops
@pytest.mark.parametrize('source', TREES)
def test_attributes_of_deepspeed_are_read_by_read_alone(source):
    nodes = list(ast.walk(TREES[source]))
    written = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used.update(name for node in nodes if isinstance(node, ast.Call) for name in literal_names(node))
    # What is written must be looked for first: a write does not find it missing.
    allowed = PUBLIC_OF_ENGINES | own_names() | (written & set(names_read()))
    allowed.update(name for owner in PUBLIC_OBJECTS for name in dir(owner))
    assert sorted((used & observed(observe_attributes, 2)[0]['names']) - allowed) == []
