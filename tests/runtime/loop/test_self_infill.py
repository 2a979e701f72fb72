"""Self-infilling over the toy: against a reference without sessions, its phases, loops, ends, bad input."""

from types import SimpleNamespace

import numpy as np
import pytest

import accel
from accel.compiler.assemble import assemble
from accel.ir.errors import InputError, RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.artifact.artifact import open_artifact
from accel.runtime.backends.onnx.backend import OrtBackend
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.logits_processors import Processed
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import self_infill
from accel.runtime.loop.self_infill import SelfInfill
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.sample.standard import Standard
from accel.runtime.session.session import Session

from ...draft_case import plain, rows_of
from ..test_logits_processors import held_to

PROMPTS = [[5, 17, 200, 3, 88], [9], list(range(40, 61)), [7, 8, 99], [1, 2], [250, 30, 30]]
NAMES = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>"]
ENDS = list(range(100, 130))  # what ends a text here
WHAT = "an"


@pytest.fixture(scope="module")
def tokenizer(toy):
    made = toy.tokenizer(300)
    made.add_special_tokens(NAMES)
    assert made.get_vocab_size() <= toy.vocab
    return Tokenizer(made.to_str().encode())


def eager(tokenizer):
    """A greedy sampler that likes to end a middle."""
    return Processed(Standard(), 320, {tokenizer.vocabulary[NAMES[3]]: 8.0})


def run(toy, tokenizer, rows, options, bos=None):
    """The rows' tokens, and all that was asked for each of them, by its prompt's first token."""
    asked, run_ = {}, self_infill._Filler._run
    model = SimpleNamespace(tokenizer=tokenizer, facts=SimpleNamespace(bos=bos))

    def spied(self, hold, tokens):
        asked.setdefault(self._row.prompt[0], []).append((hold, list(tokens)))
        return run_(self, hold, tokens)

    found = []
    for start in range(0, len(rows), 3):
        group = rows[start : start + 3]
        with pytest.MonkeyPatch.context() as patched, toy.session(batch=len(group)) as session:
            patched.setattr(self_infill._Filler, "_run", spied)
            method = SelfInfill(**{"suffix": WHAT} | options)
            given = list(method.tokens(session, group, DecodeContext(model=model)))
            assert session.batch == len(group) and not session.lengths.any()
        found += [[token for i, token in given if i == n] for n in range(len(group))]
    assert found == [row.tokens for row in rows] and all(row.finish for row in rows)
    return found, asked


def reference(toy, tokenizer, prompt, threshold, limit):
    """(the greedy text, whether it was filled in), from whole texts alone."""
    pre, suf, mid, end = (tokenizer.vocabulary[name] for name in NAMES)
    begin = tokenizer.encode(WHAT, special=False)

    def logits(ids, middle=False):
        found = toy.oracle(np.array([pre, *ids]))[-1].astype(np.float64)
        found[end] = found[end] + 8 if middle else -np.inf
        found[[pre, suf, mid]] = -np.inf
        return found

    def written(lead, text, most):
        """Text that goes on behind `lead` up to its end; None where it has none."""
        while len(text) < most:
            text = [*text, int(logits([*lead, *text]).argmax())]
            if text[-1] in ENDS:
                return text
        return None

    def filled(head):
        rest = written([*prompt, *head, suf], begin, limit - len(head))
        if rest is None or not tokenizer.decode(rest[len(begin) :]).strip():
            return None
        middle = []
        while len(head) + len(middle) + len(rest) <= limit:
            token = int(logits([*prompt, *head, suf, *rest[:-1], mid, *middle], True).argmax())
            if token == end or token in ENDS:
                return [*head, *middle, *rest]
            middle.append(token)
        return None

    text = []
    while len(text) < limit:
        found = logits([*prompt, *text])
        if 1 / np.exp(found - found.max()).sum() < threshold:
            if WHAT not in tokenizer.decode(text).split("\n")[-1]:
                whole = filled(text)
                if whole is not None:
                    return whole, True
                threshold = 0
        text.append(int(found.argmax()))
        if text[-1] in ENDS:
            break
    return text, False


def law_of_texts(toy, tokenizer):
    """Each is the reference's, whether it was filled in or not."""
    filled = []
    for threshold in (0.0, 0.3, 0.6):
        rows = rows_of(PROMPTS, eager(tokenizer), limit=24, eos=ENDS)
        got, _ = run(toy, tokenizer, rows, {"threshold": threshold})
        for prompt, tokens in zip(PROMPTS, got, strict=True):
            want, whether = reference(toy, tokenizer, prompt, threshold, 24)
            assert tokens == want
            filled.append(whether and threshold > 0)
    assert 2 <= sum(filled) < len(filled) - 8, filled


def test_texts_are_those_of_the_reference(toy, tokenizer):
    law_of_texts(toy, tokenizer)


def test_where_a_session_cannot_go_back_rows_run_anew(toy, tokenizer, monkeypatch):
    rewind = Session.rewind

    def refused(self, length):
        asked = np.broadcast_to(length, self.lengths.shape)
        assert ((asked == self.lengths) | (asked == 0)).all()
        rewind(self, length)

    monkeypatch.setattr(Session, "rewind", refused)
    with pytest.raises(AssertionError):  # the control: it does go back
        law_of_texts(toy, tokenizer)
    monkeypatch.setattr(Session, "held_from", property(lambda self: self.lengths))
    law_of_texts(toy, tokenizer)


@pytest.mark.few(1)
@pytest.mark.parametrize("broken", ["sentinels", "order", "back"])
def test_other_texts_are_caught(toy, tokenizer, monkeypatch, broken):
    filler = self_infill._Filler
    if broken == "sentinels":  # of the middle: nothing is banned, so it never ends otherwise
        monkeypatch.setattr(filler, "_allowed", lambda self, line, middle=False: line)
    elif broken == "order":  # the text is as it was written
        filled = filler._filled

        def swapped(self, *args):
            found = yield from filled(self, *args)
            return None if found is None else (found[1], found[0])

        monkeypatch.setattr(filler, "_filled", swapped)
    else:  # what was written in vain stays in the session
        call = self_infill._Calls.__call__

        def kept(self, asks):
            held = self._session.lengths
            return call(self, {i: ask._replace(hold=int(held[i])) for i, ask in asks.items()})

        monkeypatch.setattr(self_infill._Calls, "__call__", kept)
    with pytest.raises(AssertionError):
        law_of_texts(toy, tokenizer)


def law_of_phases(toy, tokenizer, sampler, **options):
    """What a row's session holds: a prefix, a suffix that begins as it must, a middle; no sentinel is in its text."""
    marks = [tokenizer.vocabulary[name] for name in NAMES]
    begin = tokenizer.encode(WHAT, special=False)
    rows = rows_of(PROMPTS, sampler, limit=24, eos=ENDS)
    got, asked = run(toy, tokenizer, rows, {"threshold": 0.9} | options)
    assert not set(marks) & {token for tokens in got for token in tokens}
    orders = set()
    for row in rows:
        held = [marks[0], *row.prompt.tolist()]
        for hold, tokens in asked.get(row.prompt[0], ()):
            held[hold:] = tokens
            found = [token for token in held if token in marks]
            assert found == marks[: len(found)] and len(found) < 4
            orders.add(len(found))
            if marks[1] in held:
                place = held.index(marks[1])
                assert held[place + 1 : place + 1 + len(begin)] == begin
    assert orders == {1, 2, 3}
    return got


@pytest.mark.few(1)
@pytest.mark.parametrize("sampler", [Standard(), Standard(temperature=1.0, top_k=20)])
def test_phases_come_in_their_order(toy, tokenizer, sampler):
    """And each row gets what it gets alone; a random interruption leaves some out."""
    always = law_of_phases(toy, tokenizer, sampler)
    for prompt, tokens in zip(PROMPTS, always, strict=True):
        row = rows_of([prompt], sampler, limit=24, eos=ENDS)
        assert run(toy, tokenizer, row, {"threshold": 0.9})[0] == [tokens]
    assert always != law_of_phases(toy, tokenizer, sampler, randomly=True)


def test_a_suffix_that_begins_otherwise_is_caught(toy, tokenizer, monkeypatch):
    filled = self_infill._Filler._filled

    def other(self, text, hold, lead, begin):
        return filled(self, text, hold, lead, begin[:-1])

    monkeypatch.setattr(self_infill._Filler, "_filled", other)
    with pytest.raises(AssertionError):
        law_of_phases(toy, tokenizer, Standard())


def test_with_a_threshold_of_0_it_is_plain_decoding(toy, tokenizer):
    """Of the prompt behind the prefix sentinel, which comes after a first token of the model's own."""
    banned = {tokenizer.vocabulary[name]: -np.inf for name in NAMES}
    for bos, place in ((None, 0), (5, 1)):
        for sampler in (Standard(), Standard(temperature=0.8)):
            prompts = [np.insert(p, place if p[0] == bos else 0, 300) for p in PROMPTS[:3]]
            assert tokenizer.vocabulary[NAMES[0]] == 300
            sampler = Processed(sampler, 320, banned)
            want = plain(toy.session(batch=3), rows_of(prompts, sampler, limit=24))
            rows = rows_of(PROMPTS[:3], sampler, limit=24)
            assert run(toy, tokenizer, rows, {"threshold": 0}, bos)[0] == want


def test_a_text_that_nothing_may_follow_is_not_filled_in(toy, tokenizer):
    """It goes on from left to right, where the request lets it."""
    want, _ = run(toy, tokenizer, rows_of(PROMPTS, limit=24), {"threshold": 0})
    for loops in (0, 1):
        rows = rows_of(PROMPTS, limit=24)
        for row in rows:
            row.sampler = Processed(Standard(), 320, processors=[held_to(PROMPTS, want)])
        got, asked = run(toy, tokenizer, rows, {"threshold": 0.9, "loops": loops})
        suffix = tokenizer.vocabulary[NAMES[1]]
        assert got == want
        assert all(any(suffix in ids for _, ids in asked[prompt[0]]) for prompt in PROMPTS)


def test_loops_keep_what_is_before_the_rest(toy, tokenizer):
    """Each time it is behind the prompt without a sentinel that the text goes on; then one is filled in whose rest
    begins with the last one's, up to `suffix`.
    """
    once = rows_of(PROMPTS, eager(tokenizer), limit=24, eos=ENDS)
    run(toy, tokenizer, once, {"threshold": 0.6})
    twice = rows_of(PROMPTS, eager(tokenizer), limit=24, eos=ENDS)
    got, asked = run(toy, tokenizer, twice, {"threshold": 0.6, "loops": 2})
    pre, suf, mid, _ = (tokenizer.vocabulary[name] for name in NAMES)
    plainly = again = 0
    for row, tokens in zip(twice, got, strict=True):
        anew = [ask for hold, ask in asked[row.prompt[0]] if hold == 0]
        prompt = row.prompt.tolist()
        runs = [ask for ask in anew if ask[0] != pre]
        assert len(runs) == 2 and all(ask[: len(prompt)] == prompt for ask in runs)
        assert not any({pre, suf, mid} & set(ask) for ask in runs)
        filled = [ask for ask in anew if ask[0] == pre]
        assert all(ask[1 : 2 + len(prompt)] == [*prompt, suf] for ask in filled)
        begins = [tokenizer.decode(ask[2 + len(prompt) :]) for ask in filled]
        assert len(begins) == 1 and all(text.endswith(WHAT) for text in begins)
        kept = runs[-1][len(prompt) :]
        again += tokens[: len(kept)] == kept and len(kept) > 0
        plainly += tokens == reference(toy, tokenizer, row.prompt.tolist(), 0.6, 24)[0]
    assert again and [row.tokens for row in once] != got and plainly < len(PROMPTS)


@pytest.mark.few(1)
@pytest.mark.parametrize("ends", [{"limit": 1}, {"limit": 5}, {"max_context": 24}])
def test_rows_end_within_their_room(toy, tokenizer, ends):
    rows = rows_of(PROMPTS, eager(tokenizer), eos=ENDS, **ends)
    run(toy, tokenizer, rows, {"threshold": 0.9, "loops": 1})
    for row in rows:
        assert row.finish in ("eos", "length", "context")
        assert len(row.tokens) <= ends.get("limit", 24) and row.seen.size <= 24 + 3


def test_generate_and_stream(toy, tokenizer):
    """Log-probabilities are told of all tokens, forced ones too; a session that was given is left empty."""
    artifact = open_artifact(toy.path)
    tables = {"loop": {"use": "self-infill", "threshold": 0.9, "suffix": WHAT, "loops": 1}}
    with CompiledModel(
        OrtBackend(artifact), artifact.facts, artifact=artifact, tokenizer=tokenizer,
        recipe={"tables": tables},
    ) as model:  # fmt: skip
        out = model.generate(PROMPTS, 24, eos=ENDS, logprobs=1)
        for tokens, told in zip(out.tokens, out.logprobs, strict=True):
            assert [next(iter(one)) for one in told] == tokens
        with model.prompt_session([5, 17, 200]) as session:
            tokens = list(model.stream([3, 88], 24, eos=ENDS, session=session))
            assert tokens == out.tokens[0] and session.length == 0
        text = model.generate("for i in", 24, stop="a")
        assert "a" not in text.text[0]


def test_bad_input(toy, tokenizer):
    assert assemble(Recipe.load("self-infill")).grade == "approximate"
    for options, why in (({"threshold": 1.5}, "threshold is 1.5"), ({"loops": -1}, "loops is -1")):
        with pytest.raises(RecipeError, match=f"loop.self-infill: {why}"):
            SelfInfill(**options)
    for given, why in ((None, "has no tokenizer"), (toy.path, "has a tokenizer without them")):
        with pytest.raises(InputError, match=f"fim_prefix>, <fim_suffix>, .*this model {why}"):
            SelfInfill().check(given and Tokenizer(given / "tokenizer.json"))
    with pytest.raises(
        InputError, match="has a tokenizer without them"
    ):  # before the model is read
        accel.optimize(object(), "self-infill", tokenizer=str(toy.path / "tokenizer.json"))
    with pytest.raises(RecipeError, match="self-infill cannot be combined|self-infill.*h2o"):
        assemble(Recipe(tables={"kv.score": {"use": "h2o"}, "loop": {"use": "self-infill"}}))
