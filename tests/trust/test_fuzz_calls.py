"""Whatever a caller gives: a result or an AccelError of one line, soon, and the model goes on as before."""

import math
from decimal import Decimal
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

import accel
from accel.ir.errors import AccelError
from accel.runtime.decode.sampling_params import SamplingParams

CONTEXT, BATCH = 32, 3
PROMPT = [5, 9, 2]
FEW, MANY = 120, 10_000
SOON = {
    "deadline": 10_000,  # ms
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": False,
}


class Strange:
    """Has what arrays have, and keeps none of it."""

    ndim, shape, dtype = -1, (2, 2), "U"

    def __array__(self, *_, **__):
        return "no array"

    def __len__(self):
        return -1

    def tolist(self):
        return None


class Text(str):
    pass


def endless():
    deep = []
    deep.append(deep)
    return deep


SCALARS = [
    None, True, False, 0, 1, 2, 3, -1, 7, 40, 10**6, 2**31, 2**63, -(2**63) - 1, 10**400, 0.0, 0.5, 1.0, -0.0, 1.5,
    1e308, 5e-324, math.nan, math.inf, -math.inf, 1j, Decimal("0.3"), Decimal("NaN"), Fraction(1, 3), "", "a",
    "ab ab", "\ud800", "\0", "\U0010ffff", "x" * 5000, Text("ab"), b"ab", bytearray(b"a"), object(), Strange(), int,
    len, np.int8(3), np.float16(0.5), np.float64("nan"), np.bool_(True), np.datetime64(1, "s"), np.str_("a"),
    np.zeros((0,)), np.zeros((2, 0), np.int64), np.zeros((1, 1, 1), np.int64), np.array(5), np.array([5.0, 2.0]),
    np.array([[5, 2], [3, 1]]), np.array([5, 2], np.uint64), np.array([2**64 - 1], np.uint64),
    np.array([None, 3], object), np.array(["a"]), np.ma.masked_array([5, 2], [True, False]),
    np.array([(1, 2)], [("a", int), ("b", int)]), torch.tensor([5, 2]), torch.tensor([[5.0]], requires_grad=True),
    torch.empty(2, dtype=torch.int64, device="meta"), torch.zeros(2, 2).to_sparse(), iter([5]), range(3),
    slice(1, 2), memoryview(b"ab"), endless(), {"a": 1}, {5: 0.5}, {5: math.nan}, {10**30: 1.0}, {5: "a"}, {3, 5},
]  # fmt: skip


def scalar(index):
    return SCALARS[index]


strange = st.integers(0, len(SCALARS) - 1).map(scalar)  # whose repr is short
anything = st.recursive(strange, lambda inner: st.lists(inner, max_size=4), max_leaves=8)
ids = st.integers(0, 36)
small = st.integers(-2, 40)
prompts = st.one_of(
    st.lists(ids, max_size=CONTEXT + 2), st.lists(st.lists(ids, max_size=5), max_size=5), st.text(max_size=20), anything
)  # fmt: skip
calls = st.lists(st.lists(ids, min_size=1, max_size=6), min_size=1, max_size=3)
likely = st.one_of(st.floats(), st.floats(0, 2), anything)
OPTIONS = {
    "max_new_tokens": st.one_of(small, anything), "temperature": likely, "top_k": st.one_of(small, anything),
    "top_p": likely, "min_p": likely, "repetition_penalty": likely, "seed": st.one_of(st.integers(), anything),
    "stop": st.one_of(st.text(max_size=3), st.lists(st.text(max_size=3), max_size=3), anything),
    "eos": st.one_of(st.lists(ids, max_size=3), anything), "encoder_input": anything, "sampling_params": anything,
    "n": st.one_of(st.integers(-1, 5), anything), "logprobs": st.one_of(small, anything),
    "logit_bias": st.one_of(st.dictionaries(ids, st.floats()), st.dictionaries(st.integers(), st.floats()), anything),
    "logits_processors": st.one_of(st.just([lambda seen, logits: logits]), st.just([lambda *_: "a"]), anything),
    "structured_outputs": anything, "language": anything, "task": anything, "timestamps": anything,
}  # fmt: skip
OF_PARAMS = {
    k: v
    for k, v in OPTIONS.items()
    if k
    not in (
        "max_new_tokens",
        "eos",
        "encoder_input",
        "sampling_params",
        "language",
        "task",
        "timestamps",
    )
}
OF_PARAMS |= {
    "max_tokens": OPTIONS["max_new_tokens"],
    "stop_token_ids": OPTIONS["eos"],
    "ignore_eos": strange,
}


def some(options):
    """A few of them, each with a value."""
    return st.lists(st.sampled_from(sorted(options)), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({n: options[n] for n in names})
    )


def bytes_tokenizer():
    """Byte-level BPE of 37 tokens: some texts have letters that it lacks."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        ["ab ba abba cab"], trainers.BpeTrainer(vocab_size=37, show_progress=False)
    )
    return made.to_str()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=CONTEXT,
    )  # fmt: skip
    text = tmp_path_factory.mktemp("fuzz") / "tokenizer.json"
    text.write_text(bytes_tokenizer())
    with accel.optimize(
        LlamaForCausalLM(config), max_context=CONTEXT, max_batch=BATCH, tokenizer=text, verify=False
    ) as made:
        yield made


@pytest.fixture(scope="module")
def right(model):
    """right() fails where the model gives other tokens than at first."""
    want = model.generate(PROMPT, 6, eos=[]).tokens
    return lambda: model.generate(PROMPT, 6, eos=[]).tokens == want


def told(call):
    """The call's result; None where it raised what a user can read."""
    try:
        return call()
    except AccelError as error:
        assert str(error) and "\n" not in str(error)
        return None


def drained(stream):
    """A stream's pieces; none of a refused one."""
    return [] if stream is None else list(stream)


def fuzz(cases):
    return settings(max_examples=cases, **SOON)


def one_generate(model, right, prompt, options):
    """`generate` and `stream` of the same arguments refuse the same, and leave the model as it was."""
    out = told(lambda: model.generate(prompt, **options))
    if out is not None:
        assert all(0 <= t < 37 for row in out.tokens for t in row)
    told(lambda: drained(model.stream(prompt, **{k: v for k, v in options.items() if k != "n"})))
    assert right()


def one_session(model, right, steps):
    """Calls of a session, each with what a user might give; after them it still computes what a new one does."""
    with model.session(2) as session, model.session(2) as fresh:
        want = fresh.run([PROMPT, PROMPT])
        for name, arguments in steps:
            if name == "fork":
                session.fork().close()
            else:
                told(partial(getattr(session, name), *arguments))
        session.rewind(0)
        got = session.run([PROMPT] * session.batch)  # as many as `select` left
        assert np.abs(got - want[:1]).max() < 1e-5
    assert right()


def one_params(model, right, options):
    params = told(lambda: SamplingParams(**options))
    if params is not None:
        told(lambda: model.generate(PROMPT, sampling_params=params))
    assert right()


def step(name, *arguments):
    return st.tuples(st.just(name), st.tuples(*arguments))


tokens = st.one_of(calls, anything)
STEPS = st.lists(
    st.one_of(
        step("run", calls),
        step("run", tokens, st.one_of(st.none(), anything)),
        step("prompt", tokens, st.one_of(st.none(), anything)),
        step("guess", tokens, anything, anything, anything),
        *(
            step(n, st.one_of(small, st.lists(small), anything))
            for n in ("keep", "rewind", "select")
        ),
        step("edit", anything, anything, anything),
        step("write", tokens, anything),
        step("encode", anything),
        step("fork"),
        step("end_prompt"),
    ),
    max_size=5,
)
FUZZ = {
    "generate": (one_generate, (prompts, some(OPTIONS))),
    "session": (one_session, (STEPS,)),
    "params": (one_params, (some(OF_PARAMS),)),
}
CASES = [pytest.param(name, FEW // len(FUZZ), id=name) for name in FUZZ] + [
    pytest.param(name, MANY, id=f"{name}-many", marks=pytest.mark.long) for name in FUZZ
]


@pytest.mark.few(1)
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("name", "cases"), CASES)
def test_calls(model, right, name, cases):
    check, arguments = FUZZ[name]

    @fuzz(cases)
    @given(st.tuples(*arguments))
    def run(found):
        check(model, right, *found)

    run()


@fuzz(FEW // 4)
@given(anything)
def test_what_opens_a_model(model, right, value):
    """`load`, `logits` and `session` of anything."""
    path = model.artifact.path
    told(lambda: model.logits(value))
    told(lambda: model.session(value).close())
    told(lambda: accel.load(path, kernels=value).close())
    if not (
        isinstance(value, (int, np.integer)) and 8 < value < 2**31
    ):  # as many threads would start
        told(lambda: accel.load(path, threads=value).close())
    if not isinstance(value, (str, int)):  # paths, and files that are open
        told(lambda: accel.load(value).close())
    assert right()


def test_the_fuzzer_sees_an_error_of_another_kind(model, right, monkeypatch):
    """The control: a bare error, one that says nothing, and a model that is left wrong."""
    for broken in (TypeError("bare"), AccelError("")):

        def fail(*_, _broken=broken, **__):
            raise _broken

        monkeypatch.setattr(type(model), "generate", fail)
        with pytest.raises((TypeError, AssertionError)):
            one_generate(model, right, PROMPT, {})
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        one_generate(model, lambda: False, PROMPT, {})
