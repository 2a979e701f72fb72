"""draft = s3d-midskip: which layers draft, and tokens as plain decoding."""

from collections import Counter

import numpy as np
import pytest
import torch

from accel.ir.errors import InputError
from accel.runtime.decode.context import DecodeContext
from accel.runtime.draft.s3d_midskip import S3dMidskip
from accel.runtime.length.fixed import Fixed
from accel.runtime.sample.standard import Standard

from ...draft_case import plain, rows_of, speculated
from ...prefill_case import TOKENS, built

PROMPTS = TOKENS[:2, :9]


@pytest.fixture(scope="module")
def model():
    return built("llama:4", tables={"draft": {"use": "s3d-midskip"}, "depth": {"use": "by-call"}})


def layers(model, **options):
    return np.flatnonzero(S3dMidskip(**options).layers(DecodeContext(model=model))).tolist()


def test_the_ends_of_the_stack_draft(model):
    assert layers(model) == [0, 3]
    assert layers(model, first=2, last=1) == [0, 1, 3] and layers(model, last=2) == [2, 3]
    assert layers(built("llama", tables={"depth": {"use": "by-call"}})) == [0, 2]
    with pytest.raises(InputError, match="first = 3 and last = 2, but the model has 4 layers"):
        layers(model, first=3, last=2)
    with pytest.raises(InputError, match="s3d-midskip needs a model .* depth = by-call"):
        layers(None)


def drafted(model, method, sampler, length=None):
    rows = rows_of(PROMPTS, sampler)
    for i, row in enumerate(rows):
        row.rng = np.random.default_rng(i)
    with model.session(2) as session:
        more = {"length": length or Fixed(5), "model": model}
        list(speculated(session, rows, method, "sample-match", **more))
    return [row.tokens for row in rows], sum((row.drafting for row in rows), Counter())


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_are_those_of_plain_decoding(model, temperature):
    sampler = Standard(temperature=temperature)
    rows = rows_of(PROMPTS, sampler)
    for i, row in enumerate(rows):
        row.rng = np.random.default_rng(i)
    want = plain(model.session(2), rows)
    part, few = drafted(model, S3dMidskip(), sampler)
    whole, all_ = drafted(model, S3dMidskip(first=2, last=2), sampler)
    assert part == whole == want
    assert few["accepted"] < few["drafted"] > 0
    assert temperature or all_["accepted"] == all_["drafted"], "all layers are right"


def test_the_middle_of_the_cache_stays(model):
    """Bytes of the layers that a draft leaves out; those of the others are the control."""
    with model.session(2) as session:
        session.prompt(PROMPTS)
        state = session._core.backend._state
        before = {name: value.clone() for name, value in state.items()}
        session.run(PROMPTS[:, :1], run_layers=S3dMidskip().layers(DecodeContext(model=model)))
        changed = {
            n
            for n, value in before.items()
            if not torch.equal(value, session._core.backend._state[n])
        }
    assert {f"kv.{i}.{what}" for i in (0, 3) for what in "kv"} <= changed
    assert not {f"kv.{i}.{what}" for i in (1, 2) for what in "kv"} & changed
