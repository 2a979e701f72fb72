"""The public interface of a compiled model, on the toy: tokens, text, figures, errors, threads."""

import gc
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from accel.ir.errors import ArtifactError, InputError, RecipeError
from accel.ir.facts import Facts
from accel.runtime.model import compiled as module
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.model.load import load
from accel.runtime.sample.standard import Standard
from accel.runtime.session.core import SessionCore


@pytest.fixture(scope="module")
def eager(toy):
    facts = Facts("Toy", toy.vocab, toy.context, max_batch=2, eos=(0,))
    return CompiledModel(toy.engines["eager"], facts)


def plain(toy, prompt, limit, options=None, seed=None, eos=(0,)):
    """The tokens by the cache-free oracle."""
    ids, rng, sampler = list(prompt), np.random.default_rng(seed), Standard(**(options or {}))
    for _ in range(limit):
        ids.append(sampler(toy.oracle(np.array(ids))[-1], np.array(ids), rng))
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]


PROMPTS = [[5, 6, 7], [9], list(range(40, 57)), [1, 2], [300, 200, 100, 3]]


@pytest.mark.parametrize("target", ["model", "eager"])
@pytest.mark.parametrize(
    "options", [{}, dict(temperature=1.0, top_k=9), dict(repetition_penalty=1.5)], ids=str
)
def test_each_prompt_gets_what_it_would_get_alone(toy, target, options, request):
    model = request.getfixturevalue(target)
    out = model.generate(PROMPTS, 9, seed=11, **options)
    assert out.tokens == [plain(toy, p, 9, options, 11) for p in PROMPTS]
    assert out.tokens == [model.generate(p, 9, seed=11, **options).tokens[0] for p in PROMPTS]
    assert out.stats["tokens"] == sum(map(len, out.tokens))


def test_the_law_catches_rows_that_see_one_another(toy, model, monkeypatch):
    """The control: a loop that gives padding to the model as if it were text."""
    plain_run = SessionCore.run
    monkeypatch.setattr(
        SessionCore,
        "run",
        lambda self, tokens, lengths, *o, **more: plain_run(self, tokens, None, *o, **more),
    )
    assert model.generate(PROMPTS[0], 9).tokens == [plain(toy, PROMPTS[0], 9)], "right alone"
    assert model.generate(PROMPTS, 9).tokens != [plain(toy, p, 9) for p in PROMPTS]


def test_rows_that_end_early_leave_the_others_alone(toy, model):
    """Each row ends at another time: at the token that this row would have as its third, or not at
    all.
    """
    whole = [plain(toy, p, 8, eos=()) for p in PROMPTS[:3]]
    eos = [whole[0][2]]
    out = model.generate(PROMPTS[:3], 8, eos=eos)
    assert out.tokens == [plain(toy, p, 8, eos=eos) for p in PROMPTS[:3]]
    assert (
        out.stats["finish"][0] == "eos" and len(out.tokens[0]) <= 3 and out.tokens[0][-1] == eos[0]
    )


def test_seeds(model):
    def tokens(seed):
        return model.generate([4, 5], 12, temperature=1.5, seed=seed, eos=[]).tokens

    assert tokens(1) == tokens(1) != tokens(2)
    assert tokens(None) != tokens(None)
    rows = model.generate([[4, 5], [4, 5]], 12, temperature=1.5, seed=1, eos=[]).tokens
    assert rows[0] == rows[1] == tokens(1)[0]


def test_forms_of_a_prompt(toy, model):
    want = plain(toy, [5, 6, 7], 4)
    one = [5, 6, 7]
    forms = [one, tuple(one), np.array(one), np.array([one], np.int32), torch.tensor(one)]
    forms += [torch.tensor([one]), [one], [np.array(one, np.uint8)], [torch.tensor(one)]]
    forms += [[np.int64(i) for i in one], list(torch.tensor(one))]
    for form in forms:
        assert model.generate(form, 4).tokens == [want], form
    ids = model.tokenizer.encode("the dog")
    mixed = model.generate(["the dog", one, ids], 4)
    assert mixed.tokens == [plain(toy, ids, 4), want, plain(toy, ids, 4)]
    assert model.generate("the dog", 4).tokens == [mixed.tokens[0]]
    assert mixed.text == [model.tokenizer.decode(t) for t in mixed.tokens]


def test_figures(toy, model):
    out = model.generate([5, 6, 7], 6, eos=[])
    stats = out.stats
    assert stats["calls"] == 6 and stats["tokens"] == 6 and stats["tokens_per_call"] == 1.0
    assert stats["prompt_tokens"] == 3 and stats["finish"] == ["length"]
    assert stats["prefill_seconds"] > 0 and stats["decode_seconds"] > 0
    assert stats["tokens_per_second"] == pytest.approx(5 / stats["decode_seconds"])
    assert stats["kv_bytes"] == 256 * (8 + 2 * 2 * 8 * 4)
    assert stats["peak_memory"] > 10_000_000
    assert model.generate([[1], [2], [3], [4]], 2, eos=[]).stats["calls"] == 4, (
        "two groups of two calls"
    )


def test_the_end_of_the_context(toy, model):
    prompt = toy.tokens(toy.context - 3).tolist()
    out = model.generate([prompt, [5, 6]], 8, eos=[])
    assert [len(t) for t in out.tokens] == [3, 8] and out.stats["finish"] == ["context", "length"]
    full = model.generate(toy.tokens(toy.context), 5)
    assert full.tokens == [[]] and full.stats["finish"] == ["context"] and full.text == [""]


def test_stop_strings(model):
    plain = model.generate("the", 30, temperature=1.0, seed=4, eos=[])
    text = plain.text[0]
    stop = text[5:9]
    cut = model.generate("the", 30, temperature=1.0, seed=4, eos=[], stop=stop)
    assert cut.text == [text[: text.find(stop)]]
    assert (
        cut.stats["finish"] == ["stop"] and cut.tokens[0] == plain.tokens[0][: len(cut.tokens[0])]
    )
    assert stop in model.tokenizer.decode(cut.tokens[0])
    assert stop not in model.tokenizer.decode(cut.tokens[0][:-1])
    none = model.generate("the", 30, temperature=1.0, seed=4, eos=[], stop=["never", "neither"])
    assert none.text == plain.text and none.tokens == plain.tokens


def test_stream(model):
    options = dict(temperature=1.0, seed=4, eos=[])
    want = model.generate("the", 30, **options)
    stream = model.stream("the", 30, **options)
    pieces = list(stream)
    assert "".join(pieces) == want.text[0] and len(pieces) > 5
    assert stream.tokens == want.tokens[0] and stream.stats["tokens"] == 30
    assert list(model.stream(model.tokenizer.encode("the"), 30, **options)) == want.tokens[0]
    stop = want.text[0][5:9]
    cut = model.generate("the", 30, stop=stop, **options).text[0]
    assert "".join(model.stream("the", 30, stop=stop, **options)) == cut
    assert "".join(model.stream(["the"], 30, **options)) == want.text[0]


def test_a_stream_comes_as_it_is_made(model):
    stream = model.stream([5, 6], 50, eos=[])
    assert stream.stats["calls"] == 0
    next(stream), next(stream)
    assert stream.stats["calls"] == 2 and len(stream.tokens) == 2


@pytest.mark.parametrize("how", ["close", "with", "forget"])
def test_ending_a_stream_early_frees_its_session(model, monkeypatch, how):
    closed = []
    plain = module.Session.close
    monkeypatch.setattr(module.Session, "close", lambda self: (closed.append(1), plain(self)))
    stream = model.stream([5, 6], 50, eos=[])
    next(stream)
    assert not closed
    if how == "close":
        stream.close()
        stream.close()
    elif how == "with":
        with stream:
            pass
    else:
        del stream
        gc.collect()
    assert closed


def test_logits_of_any_batch(toy, model):
    tokens = toy.tokens(2 * toy.batch + 1, 6)
    got = model.logits(tokens)
    assert got.dtype == np.float32 and got.shape == (*tokens.shape, toy.vocab)
    np.testing.assert_allclose(got, [toy.oracle(row) for row in tokens], atol=2e-4)
    assert model.logits(torch.tensor(tokens)).shape == got.shape
    for bad in ([1, 2], [[]], [[toy.vocab]], np.zeros((1, toy.context + 1), int), [["a"]]):
        with pytest.raises(InputError):
            model.logits(bad)


def test_threads_share_a_model(toy, model):
    want, got = [plain(toy, p, 12) for p in PROMPTS], {}

    def work(i):
        got[i] = model.generate(PROMPTS[i % 5], 12).tokens[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(15)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(15)] == want * 3


def test_save_and_load(toy, model, eager, tmp_path):
    model.save(tmp_path / "copy")
    with load(tmp_path / "copy") as again:
        assert again.generate([5, 6, 7], 5).tokens == model.generate([5, 6, 7], 5).tokens
        assert again.program is None and again.report == {"seconds": 0.1}
    with pytest.raises(ArtifactError, match="target='onnx'"):
        eager.save(tmp_path / "eager")


def test_without_a_tokenizer(toy, eager, tmp_path):
    assert eager.generate([5, 6], 3).text is None
    assert list(eager.stream([5, 6], 3)) == eager.generate([5, 6], 3).tokens[0]
    for act in (eager.generate, eager.stream):
        with pytest.raises(InputError, match="no tokenizer.*token ids"):
            act("text")
        with pytest.raises(InputError, match="stop needs a tokenizer"):
            act([5], stop="x")
    assert load(toy.write(tmp_path / "bare", tokenizer=False)).tokenizer is None


BAD_PROMPTS = [
    ("", "prompt 0 is empty"),
    ([], "prompts are empty"),
    ([[]], "prompt 0 is empty"),
    ([[1], []], "prompt 1 is empty"),
    ([[1], ""], "prompt 1 is empty"),
    ([1, 999], "prompt 0: token 999 at place 1 is not in the vocabulary .0..319"),
    ([[1], [-1]], "prompt 1: token -1"),
    ([1.5], "float64"),
    ([True], "bool"),
    ([None], "prompt 0"),
    (None, "there is no prompt"),
    (3, "are int"),
    ({1: 2}, "dict"),
    (b"bytes", "bytes"),
    (np.zeros((1, 1, 1), int), "shape"),
    ([[[1]]], "shape"),
    ([1, [2]], "prompt 0 has shape"),
    ([1] * 1301, "has 1301 tokens; max_context is 1300"),
]


@pytest.mark.parametrize("prompt, words", BAD_PROMPTS)
def test_bad_prompts(model, prompt, words):
    with pytest.raises(InputError, match=words):
        model.generate(prompt)


BAD_OPTIONS = [
    (dict(max_new_tokens=0), "max_new_tokens = 0 is out of range"),
    (dict(max_new_tokens=1.5), "max_new_tokens"),
    (dict(temperature=-1), "temperature"),
    (dict(top_k=0), "top_k"),
    (dict(top_p=2), "top_p"),
    (dict(min_p=-1), "min_p"),
    (dict(repetition_penalty=0), "repetition_penalty"),
    (dict(seed=-1), "seed"),
    (dict(seed="x"), "seed"),
    (dict(stop=""), "stop"),
    (dict(stop=["a", 3]), "stop"),
    (dict(stop=5), "stop"),
    (dict(eos=[999]), "eos: token 999"),
    (dict(eos="x"), "eos"),
]


@pytest.mark.parametrize("options, words", BAD_OPTIONS, ids=str)
def test_bad_options_are_refused_before_any_work(model, options, words):
    for act in (model.generate, model.stream):
        with pytest.raises(InputError, match=words):
            act([1, 2], **options)


def test_other_misuse(toy, model, tmp_path):
    with pytest.raises(InputError, match="max_batch = 3"):
        model.session(4)
    for batch in (0, -1, 1.5, None):
        with pytest.raises(InputError, match="batch"):
            model.session(batch)
    with pytest.raises(InputError, match="one prompt, not 2"):
        model.stream([[1], [2]])
    with pytest.raises(InputError, match="threads"):
        load(toy.path, threads=0)
    other, done = load(toy.path), []
    other._on_close = lambda: done.append(1)
    other.close()
    other.close()
    assert done == [1]
    for act in (lambda: other.generate([1]), lambda: other.logits([[1]]), other.session):
        with pytest.raises(InputError, match="closed"):
            act()


def test_loops_of_recipes(toy):
    facts = Facts("Toy", 10, 10)
    for table, words in [
        ({"use": "autoregresive"}, "did you mean 'autoregressive'"),
        ({"x": 1}, "option"),
        (3, "table"),
    ]:
        with pytest.raises(RecipeError, match=words):
            CompiledModel(toy.engines["eager"], facts, recipe={"tables": {"loop": table}})


def test_neither_torch_nor_the_compiler_is_imported(toy):
    code = (
        "import sys, accel\n"
        "m = accel.load(sys.argv[1]); out = m.generate('the', 5, temperature=1.0, stop='zzz'); "
        "m.logits([[1]])\n"
        "print(sorted({n.split('.')[0] for n in sys.modules} & {'torch', 'transformers', 'json'}))\n"
        "print([n for n in sys.modules if n.startswith(('accel.compiler', 'accel.passes'))])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(toy.path)], capture_output=True, text=True
    )
    assert out.stdout.split("\n")[:2] == ["['json']", "[]"], out.stderr
