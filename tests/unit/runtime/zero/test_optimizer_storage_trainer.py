# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The engine that Hugging Face's Trainer builds through accelerate: two parameter groups, tied embeddings."""

import functools
import os

import numpy
import pytest
import torch
from unit.ranks import rank_folder
from unit.runtime.zero.engines import (arrays_of, assemble, config_of, full_reference, label_flats, observed,
                                       own_flats, own_states, plain_maps, start_deepspeed)

STATES = ('fp32', 'exp_avg', 'exp_avg_sq')
STEPS = 2


def trained_by_the_trainer(stage):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    start_deepspeed()
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=13,
                    hidden_size=8,
                    intermediate_size=12,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    num_key_value_heads=1,
                    attention_bias=True,
                    tie_word_embeddings=True))
    data = [{'input_ids': tokens, 'labels': tokens} for tokens in torch.randint(13, (8, 6))]
    arguments = TrainingArguments(output_dir=rank_folder(),
                                  deepspeed=config_of(stage) | {'train_micro_batch_size_per_gpu': 'auto'},
                                  per_device_train_batch_size=2,
                                  max_steps=STEPS,
                                  weight_decay=0.1,
                                  optim='adamw_torch',
                                  report_to=[],
                                  save_strategy='no',
                                  logging_strategy='no',
                                  disable_tqdm=True)
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    return trainer


def observe_trainer(stage, rank):
    # Without it the Trainer puts the model on an accelerator where there is one, though DeepSpeed uses the CPU.
    os.environ['ACCELERATE_TORCH_DEVICE'] = 'cpu'
    trainer = trained_by_the_trainer(stage)
    engine = trainer.model_wrapped
    seen = {
        'engine': [type(engine).__name__, engine is trainer.deepspeed, engine.global_steps],
        'groups': len(engine.optimizer.param_groups),
        'maps': plain_maps(engine.optimizer_storage_maps()),
        'names': [name for name, _ in trainer.model.named_parameters()],
        'arrays': {
            state: arrays_of(engine.optimizer_storage(state))
            for state in STATES
        },
        # DeepSpeed's accessors of moments wait forever for the second group of stage 2.
        'reference': {
            state: arrays_of(full_reference(engine, state))
            for state in STATES[:3 if stage == 3 else 1]
        },
    }
    if stage == 2:
        seen |= observe_labels(engine, rank)
    return seen


def observe_labels(engine, rank):
    """The moments get the labels of the masters, which DeepSpeed copies into the model."""
    for flats in [own_flats(engine)] + [own_states(engine, state) for state in STATES[1:]]:
        label_flats(flats, rank)
    engine.optimizer.update_lp_params()
    return {
        'labelled': {
            state: arrays_of(engine.optimizer_storage(state))
            for state in STATES
        },
        'labels': arrays_of(dict(engine.module.named_parameters())),
    }


OBSERVE = {stage: functools.partial(observe_trainer, stage) for stage in (2, 3)}
each_stage = pytest.mark.parametrize('stage', OBSERVE)


@each_stage
def test_the_trainer_wraps_the_model_in_a_deepspeed_engine_with_two_parameter_groups(stage):
    for seen in observed(OBSERVE[stage], 2):
        assert seen['engine'] == ['DeepSpeedEngine', True, STEPS]
        assert seen['groups'] == 2


@each_stage
def test_maps_name_the_parameters_of_the_trainers_model_on_every_rank(stage):
    for seen in observed(OBSERVE[stage], 2):
        assert list(seen['maps']) == seen['names']
        assert seen['maps'] == observed(OBSERVE[stage], 2)[0]['maps']


@each_stage
def test_full_tensors_by_the_maps_equal_those_deepspeed_gathers(stage):
    by_rank = observed(OBSERVE[stage], 2)
    for state, reference in by_rank[0]['reference'].items():
        full = assemble(by_rank[0]['maps'], [seen['arrays'][state] for seen in by_rank])
        assert list(full) == list(reference)
        for name in reference:
            assert numpy.array_equal(full[name], reference[name]), (state, name)


@pytest.mark.parametrize('state', STATES)
def test_views_of_both_groups_of_stage_2_hold_the_labels_that_deepspeed_puts_into_the_model(state):
    by_rank = observed(OBSERVE[2], 2)
    full = assemble(by_rank[0]['maps'], [seen['labelled'][state] for seen in by_rank])
    for name, labels in by_rank[0]['labels'].items():
        assert numpy.array_equal(full[name], labels), name
