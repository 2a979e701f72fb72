"""The recipe hf-early-exit drafts, round by round, as transformers does with `assistant_early_exit`: as with the first
layers as the assistant, which its release 5.2 takes and that option does not.
"""

import copy
from collections import Counter

import numpy as np
import pytest
import torch
from transformers.generation.candidate_generator import AssistedCandidateGenerator

import accel
from accel.compiler.assemble import assemble
from accel.ir.recipe import Recipe
from accel.runtime.draft.layerskip import LayerSkip
from accel.runtime.length.draft_verify import DraftVerify

from ...depth_case import module_of
from ...draft_case import rows_of, speculated

COUNT, EXITS = 40, (2, 3)


@pytest.fixture(scope="module")
def sure():
    """A random model of four layers whose last two change little, and which is at times sure of what follows."""
    model = copy.deepcopy(module_of(4))
    with torch.no_grad():
        model.lm_head.weight *= 12
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight *= 0.3
            layer.mlp.down_proj.weight *= 0.3
    return model


def theirs(whole, exit_, prompt, monkeypatch):
    """Tokens, and how often so many tokens were drafted of which so many stood."""
    small = copy.deepcopy(whole)
    small.model.layers = small.model.layers[:exit_]
    small.config.num_hidden_layers = exit_
    config = small.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = 20, "constant"
    config.assistant_confidence_threshold = 0.4
    rounds = Counter()

    def told(
        self, input_ids, scores, num_matches
    ):  # early exit adapts neither length nor threshold
        rounds[scores.shape[1] - 1, int(num_matches)] += 1

    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", told)
    out = whole.generate(
        torch.tensor([prompt]),
        assistant_model=small,
        max_new_tokens=COUNT - 1,
        do_sample=False,
        eos_token_id=10**6,
    )
    return out[0, len(prompt) :].tolist(), rounds


@pytest.fixture(scope="module")
def model(sure):
    with accel.optimize(
        sure, "hf-early-exit", target="eager", verify=False, max_context=96
    ) as made:
        yield made


def test_the_recipe_drafts_as_transformers_does():
    methods = assemble(Recipe.load("hf-early-exit")).methods
    assert methods["draft"] == LayerSkip()
    assert methods["length"] == DraftVerify(most=20, threshold=0.4, step=0.0)


@pytest.mark.few(1)
@pytest.mark.parametrize("exit_", EXITS)
def test_rounds_are_those_of_transformers(sure, model, exit_, monkeypatch):
    """Of prompts with the token that follows them, from which both draft first."""
    length, stood = assemble(Recipe.load("hf-early-exit")).methods["length"], Counter()
    for seed in range(3):
        (row,) = rows_of([np.random.default_rng(seed).integers(3, 101, 9)], limit=COUNT)
        with model.session() as session:
            list(speculated(session, [row], LayerSkip(exit_), length=length, model=model))
        prompt = [*row.prompt.tolist(), row.tokens[0]]
        tokens, rounds = theirs(sure, exit_, prompt, monkeypatch)
        assert row.tokens[1:] == tokens[: COUNT - 1]
        assert row.drafts == rounds
        stood += rounds
    drafted, accepted = (sum(pair[i] * n for pair, n in stood.items()) for i in (0, 1))
    assert 0.1 < accepted / drafted < 1 and len({n for n, _ in stood}) > 2, stood
