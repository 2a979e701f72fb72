"""A draft model with another tokenizer: texts go over and back, and tokens are the target's own."""

from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers, trainers

from accel.ir.axis import Axis
from accel.ir.errors import InputError
from accel.ir.invariants import Invariant
from accel.runtime.call import Outputs
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.costs import Costs
from accel.runtime.draft._texts import LOOK, _Text
from accel.runtime.draft.model import Model
from accel.runtime.inputs.text import Tokenizer, same_tokens
from accel.runtime.sample.standard import Standard
from accel.runtime.session.session import Session

from ..draft_case import plain, rows_of, speculated

TEXT = (
    "def add(a, b):\n    return a + b  # naïve café, 你好\nfor i in range(10): print(i, i * i)\n"
    * 3
)


def trained(vocabulary, spaces=False):
    """Byte-level, or with a mark for spaces before words, as Llama's."""
    inner = Inner(models.BPE(unk_token="<eos>") if spaces else models.BPE())
    if spaces:
        inner.pre_tokenizer = pre_tokenizers.Metaspace()
        inner.decoder = decoders.Metaspace()
        alphabet = sorted(set(TEXT))
    else:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<eos>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    inner.train_from_iterator([TEXT], trainer)
    return Tokenizer(inner.to_str().encode())


@pytest.fixture(scope="module")
def pair(toy):
    return Tokenizer(toy.path / "tokenizer.json"), trained(300)


def test_tokenizers_are_told_apart(pair, toy):
    here, there = pair
    assert not same_tokens(here, there) and same_tokens(
        here, Tokenizer(toy.path / "tokenizer.json")
    )
    assert same_tokens(here, None)


LOOPS = Axis("loop", "accel.runtime.loop")


@pytest.mark.parametrize(
    "name", [n for n in LOOPS.names() if Invariant.DRAFT_MODEL in LOOPS.build(n).relies]
)
def test_a_loop_that_gives_tokens_to_its_draft_model_says_that_they_are_others(pair, toy, name):
    here, there = pair
    beside = SimpleNamespace(session=lambda batch: toy.session(batch=batch), tokenizer=there)
    context = DecodeContext(model=SimpleNamespace(draft_model=beside, tokenizer=here))
    with toy.session() as session:
        with pytest.raises(InputError, match=f"loop.{name}: the draft model has another tokenizer"):
            list(LOOPS.build(name).tokens(session, rows_of([[1, 2, 3]]), context))
        assert not session.lengths.any(), "nothing ran"


@pytest.mark.parametrize("spaces", [False, True])
def test_what_goes_over_is_the_text(pair, spaces):
    """At any length the draft model's tokens are those of the whole text, and a true draft comes back as it was."""
    here, there = pair[0], trained(200, spaces)
    seen, text, right, total = np.array(here.encode(TEXT)), _Text(here, there), 0, 0
    for end in range(1, seen.size - 12, 5):
        whole = here.decode(seen[:end])
        ids = text.read(seen[:end])
        if ids is None:
            assert whole.endswith("�")
            continue
        assert ids.tolist() == there.encode(whole)
        follows = there.encode(here.decode(seen[: end + 12]))[ids.size :][:4]
        if there.encode(here.decode(seen[: end + 12]))[: ids.size] == ids.tolist():
            got, want = text.back(ids, follows), seen[end : end + 12].tolist()
            right += sum(np.cumprod([a == b for a, b in zip(got, want, strict=False)]))
            total += len(got)
    assert right > 0.6 * total > 30
    assert text.sure > 40, "anchors are found"
    assert seen.size > 4 * LOOK


class Knows:
    """A backend session that says how given texts go on."""

    def __init__(self, inner, texts, size):
        self.inner, self.texts, self.size = inner, texts, size

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self, tokens, positions, slots, rows, *more):
        self.inner.step(tokens, positions, slots, rows, *more)
        out = np.zeros((*rows.shape, self.size), np.float32)
        for b, n in np.ndindex(rows.shape):
            ids, place = self.texts[b], int(positions[b, rows[b, n]]) + 1
            out[b, n, ids[place] if 0 < place < len(ids) else 0] = 9.0
        return Outputs(out, {})


class Printable:
    """A backend session that says nothing but ASCII."""

    def __init__(self, inner, tokenizer):
        self.inner = inner
        texts = [tokenizer.decode([t]) for t in range(320)]
        self.bad = np.array([not (t.isascii() and t.isprintable() and t) for t in texts])

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self, *args):
        out = self.inner.step(*args)
        out.logits[..., self.bad] = -1e4
        return out


@pytest.mark.parametrize("rule", ["spec-chain", "sample-match"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_the_targets(pair, toy, rule, temperature):
    here, there = pair
    group = [
        here.encode(text) for text in ("def add(a, b", "x", "for i in range(10): print(i, i * i)")
    ]
    sampler = Standard(temperature=temperature)

    def target():
        return toy.session(batch=3, wrap=lambda backend: Printable(backend, here))

    want = plain(target(), rows_of(group, sampler, limit=40))
    texts = [there.encode(here.decode(p + t)) for p, t in zip(group, want, strict=True)]

    def session(batch):
        backend = Knows(toy.engines["ort"].open_session(batch), texts, 320)
        return Session(backend, batch, vocab_size=320, max_context=1300)

    costs = Costs((1, 32), (1.0, 1.0))
    second = SimpleNamespace(
        session=session,
        tokenizer=there,
        costs=costs,
        facts=SimpleNamespace(vocab_size=320, eos=(0,), max_batch=3),
    )
    with target() as opened:
        rows = rows_of(group, sampler, limit=40)
        model = SimpleNamespace(draft_model=second, tokenizer=here)
        list(speculated(opened, rows, Model(), rule, tokens=6, model=model))
    drafted, stood = (sum(row.drafting[name] for row in rows) for name in ("drafted", "accepted"))
    if not temperature or rule == "sample-match":
        assert [row.tokens for row in rows] == want
        assert stood > 0.6 * drafted > 20
    assert drafted > 0 and all(0 <= t < 320 for row in rows for t in row.tokens)
