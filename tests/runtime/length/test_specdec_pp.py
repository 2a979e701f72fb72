"""specdec-pp: what its head tells, how it is trained, when a draft ends by it, and what is refused."""

import json

import numpy as np
import pytest
import reference_data
import reference_export
import torch
from safetensors.numpy import save_file

import accel
from accel.compiler.assemble import assemble
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs import head as trainer
from accel.compiler.train.source import Source
from accel.compiler.train.train import train
from accel.ir.axis import find_axes
from accel.ir.errors import CaptureError, InputError, RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.trained_part import sample
from accel.runtime.length import specdec_pp
from accel.runtime.length._head import chance
from accel.runtime.length.specdec_pp import SpecdecPp
from accel.runtime.loop.speculative import Speculative
from accel.runtime.speculation.round_cost import unmeasured_cost

from ...draft_case import plain, rows_of
from ...length_case import one

METHODS = {"draft": "model", "tree": "chain", "verify": "sample-match"}
SHIPPED = reference_data.REFERENCE / "specdec-pp.safetensors"


@pytest.fixture(scope="module")
def pair():
    return opened_pair(reference_data.REFERENCE / "draft")


def opened_pair(draft):
    quiet = (lambda *_: None,) * 2
    source = Source(reference_data.REFERENCE, None, None, *quiet)
    return trainer.open_pair(SpecdecPp(), source, TrainOptions(draft=draft))[0]


def head_of(file):
    return SpecdecPp(trained=str(file)).part


def a_head(inner=8, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(size).astype(np.float32) / 3
        for name, size in SpecdecPp.sizes(inner).items()
    }


def test_the_head_reads_odds_and_computes_as_it_was_trained():
    logits = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32) * 3
    tokens = np.arange(5)
    x, p = SpecdecPp.features(logits, tokens), torch.from_numpy(logits).softmax(-1)
    np.testing.assert_allclose(x[:, 0], p[np.arange(5), tokens].log(), atol=1e-5)
    np.testing.assert_allclose(x[:, 1:-1], p.sort(descending=True).values[:, :16].log(), atol=1e-5)
    np.testing.assert_allclose(x[:, -1], -(p * p.log()).sum(-1), atol=1e-4)
    head = a_head()
    tensors = {n: torch.from_numpy(t) for n, t in head.items()}
    want = SpecdecPp.odds(tensors, torch.from_numpy(x)).sigmoid()
    np.testing.assert_allclose(chance(SpecdecPp.odds(head, x)), want, atol=1e-5)
    few = SpecdecPp.features(np.array([[0, -np.inf, 1]], np.float32), np.array([2]))
    assert few.shape == (1, 18) and np.isfinite(few).all()


def test_the_head_that_comes_along_tells_what_stands(pair):
    """Over a held-out file, by the loss of training: better than the best constant; one that knows nothing, or
    reads other tokens' odds, is not.
    """
    window = reference_export.windows(reference_export.load_tokenizer())[5:6, :500]
    x, stands = pair.examples(window, torch.ones(window.shape), torch.Generator().manual_seed(0))

    def lost(found):
        found = torch.as_tensor(found).clamp(1e-6, 1 - 1e-6)
        return float(trainer.loss(found.logit(), stands))

    constant = min(lost(torch.full((len(stands),), c)) for c in np.linspace(0.02, 0.98, 49))
    found = chance(SpecdecPp.odds(head_of(SHIPPED), x.numpy()))
    assert lost(found) < constant - 0.05
    untrained = {name: tensor.numpy() for name, tensor in pair.start(32, 0)[0].items()}
    other = chance(SpecdecPp.odds(untrained, x.numpy()))
    for control in (np.random.default_rng(0).permutation(found), other):
        assert lost(control) > constant


def by_own_odds():
    """A head that goes by the token's own chance alone."""
    head = {name: np.zeros(size, np.float32) for name, size in SpecdecPp.sizes(4).items()}
    head["first"][0, 0] = head["last"][0, 1] = 1
    head["last.bias"][1] = 6
    return head


def lengths(threshold, least=2, most=9, head=None):
    """Of twelve drafts, each the same path of tokens whatever the threshold."""
    pace, found = specdec_pp._Pace(SpecdecPp(threshold, least, most), head or by_own_odds()), []
    for draft in range(12):
        rng, drafted, more = np.random.default_rng(draft), 0, True
        while more and drafted < pace.limit():
            logits = [rng.standard_normal(30).astype(np.float32)]
            more = pace.more(one(int(rng.integers(30)), drafted), logits)
            drafted += 1
        pace.observe(drafted, 0)
        found.append(drafted)
    return found


def test_a_draft_ends_where_a_token_has_likely_fallen():
    assert lengths(1.0) == [9] * 12 and lengths(0.0) == [2] * 12
    by_threshold = [lengths(h) for h in (0.0, 0.3, 0.6, 0.9, 0.99, 1.0)]
    for less, more in zip(by_threshold, by_threshold[1:], strict=False):
        assert all(a <= b for a, b in zip(less, more, strict=True))
    assert len({tuple(found) for found in by_threshold}) > 3
    assert len(set(lengths(0.6))) > 1, "each draft is its own"


def test_the_chance_is_that_of_all_tokens_so_far():
    """Each stands with a chance of 1/2: after two, one of them falls with 3/4."""
    head = {name: np.zeros(size, np.float32) for name, size in SpecdecPp.sizes(4).items()}
    for threshold, drafted in ((0.4, 1), (0.5, 2), (0.74, 2), (0.75, 3), (0.9, 4)):
        assert set(lengths(threshold, 1, head=head)) == {drafted}


@pytest.mark.long
def test_training_learns_and_can_be_left(pair, tmp_path):
    options = TrainOptions(rate=1e-2, minutes=1.0, length=16)
    ids = reference_export.windows(reference_export.load_tokenizer())[2:4, :33]
    known = torch.ones(2, 32)

    def begun(name):
        return trainer.HeadRun(pair, pair.start(8, 0), options, tmp_path / name)

    whole, first = begun("a"), begun("b")
    losses = [whole.learn(ids, known)["loss"] for _ in range(25)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    for _ in range(9):
        first.learn(ids, known)
    first.save()
    second = begun("b")
    second.load()
    for _ in range(16):
        second.learn(ids, known)
    for a, b in zip(whole.tensors, second.tensors, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.long
def test_training_a_head_and_what_is_wrong(tmp_path):
    out, text = tmp_path / "h.safetensors", tmp_path / "text"
    text.write_text("def f(x):\n    return x + 1\n" * 40)
    model, draft = reference_data.REFERENCE, reference_data.REFERENCE / "draft"
    given = {"out": out, "text": text, "length": 24, "minutes": 0.003, "inner": 4}
    with pytest.raises(InputError, match="draft=…"):
        train("specdec-pp", model, given)
    with pytest.raises(CaptureError, match="config.json"):
        train("specdec-pp", model, {**given, "draft": tmp_path})
    made = train("specdec-pp", model, {**given, "draft": draft})
    assert "steps in" in made.message and head_of(out)["first"].shape == (18, 4)


class Other:
    """A draft model that a model drafts for."""

    def __init__(self, one, second):
        self.session, self.draft_model = one.session, second


@pytest.mark.long
def test_the_recipe_gives_the_tokens_of_plain_decoding():
    """With the head and the draft model that come along, none of the tokens near a tie; to another model they are
    refused.
    """
    sizes = {"max_context": 160, "max_batch": 1, "target": "eager"}
    with accel.optimize(reference_data.REFERENCE, "specdec-pp", verify=False, **sizes) as model:
        methods = {axis: find_axes()[axis].build(use) for axis, use in METHODS.items()}
        methods["length"] = SpecdecPp(threshold=0.9, least=1)
        prompts = [
            model.tokenizer.encode(text) for text in ("def f(x):\n", "aa: 1\nbb: 2\naa: 1\nbb:")
        ]
        want = [plain(model.session(), rows_of([p], limit=40, max_context=160))[0] for p in prompts]
        accepted, lengths = 0, set()
        for prompt, tokens in zip(prompts, want, strict=True):
            rows = rows_of([prompt], limit=40, max_context=160)
            with model.session() as session:
                list(Speculative().tokens(session, rows, DecodeContext(methods, None, model)))
            assert rows[0].tokens == tokens
            accepted += rows[0].drafting["accepted"]
            lengths |= {drafted for drafted, _ in rows[0].drafts}
        assert accepted > 20 and len(lengths) > 2
        with pytest.raises(InputError, match="another model"):
            SpecdecPp().fit(Other(model.draft_model, model))


# What is refused


class Session:
    """Of a model that gives the same logits after anything."""

    vocab_size = 100

    def __init__(self, logits):
        self.logits = logits

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, tokens):
        return np.broadcast_to(self.logits, (*tokens.shape, 100))


class Model:
    def __init__(self, seed, draft_model=None):
        self.logits, self.draft_model = (
            np.random.default_rng(seed).standard_normal(100),
            draft_model,
        )
        self.asked = 0

    def session(self):
        self.asked += 1
        return Session(self.logits)


@pytest.fixture
def written(tmp_path):
    """written(name, …) -> the file of a head for Model(0) and its draft Model(1)."""

    def make(name="head", change=(), **metadata):
        told = {"model": sample(Model(0).session), "draft": sample(Model(1).session)}
        metadata = {"method": "specdec-pp", "model": json.dumps(told)} | metadata
        tensors = {f"0.{n}": t for n, t in a_head().items()} | dict(change)
        save_file(tensors, tmp_path / name, metadata)
        return str(tmp_path / name)

    return make


def test_a_head_of_other_models_is_refused(written):
    method, model = SpecdecPp(trained=written()), Model(0, Model(1))
    method.fit(model)
    method.fit(model)
    assert model.asked == 1, "a model that is known is not asked again"
    model = Model(0, Model(1))
    for changed in (model, model.draft_model):
        changed.logits = (
            changed.logits + np.random.default_rng(5).standard_normal(100) * 0.2
        )  # as weights of few bits do
    method.fit(model)
    for wrong, words in ((Model(2, Model(1)), "another model"), (Model(0, Model(3)), "another draft model"),
                         (Model(0), "another draft model")):  # fmt: skip
        told = f"was trained for {words}; train it: accel-compile train specdec-pp"
        with pytest.raises(InputError, match=told):
            method.fit(wrong)
    with pytest.raises(InputError, match="the bundled file was trained for another model"):
        SpecdecPp().fit(Model(0, Model(1)))


def test_files_that_hold_no_head_are_refused(written, tmp_path):
    (tmp_path / "cut").write_bytes(b"123")
    for file, words in [
        (tmp_path / "none", "does not exist"),
        (tmp_path / "cut", "not a complete safetensors file"),
        (written("other", method="trim-kv"), "holds 'trim-kv'"),
        (
            written("small", {"0.block1": np.zeros((3, 3), np.float32)}),
            r"block1 of size \[3, 3\], but \[8, 8\]",
        ),
        (
            written("less", {"0.first": np.zeros((2, 8), np.float32)}),
            r"first of size \[2, 8\], but \[18, 8\]",
        ),
        (
            written("one", {"0.first": np.zeros((), np.float32)}),
            r"first of size \[\], but \[18, 0\]",
        ),
        (written("blank", model=""), "does not tell which two models it is for"),
        (written("half", model='{"model": [1.0]}'), "does not tell which two models it is for"),
        (
            written("words", model='{"model": ["a"], "draft": [1.0]}'),
            "does not tell which two models it is for",
        ),
    ]:
        with pytest.raises(
            InputError, match=f"specdec-pp: .*{words}.*train it: accel-compile train"
        ):
            SpecdecPp(trained=str(file)).begin(unmeasured_cost)


def test_options_that_cannot_be():
    for options in ({"threshold": 2.0}, {"least": 0}, {"least": 5, "most": 4}):
        with pytest.raises(RecipeError, match="length.specdec-pp: .*give"):
            SpecdecPp(**options)


def test_a_drafter_without_a_draft_model_is_refused():
    tables = {"draft": {"use": "iad"}, "length": {"use": "specdec-pp"}}
    with pytest.raises(
        RecipeError,
        match="length = specdec-pp cannot be combined with draft = iad: .*a draft model.*nearest recipe",
    ):
        assemble(Recipe(tables=tables))
    tables["draft"] = {"use": "model"}
    assert assemble(Recipe(tables=tables)).methods["length"] == SpecdecPp()
