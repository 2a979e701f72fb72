"""Tokens that left early run again with later ones: what a session computes against forwards without a cache."""

import numpy as np
import pytest
import torch

from accel.commands.recipes import parts_of
from accel.compiler.assemble import assemble
from accel.ir.depth import LAYERS_RAN
from accel.ir.errors import InputError, RecipeError
from accel.ir.invariants import Invariant
from accel.ir.recipe import Recipe
from accel.passes.depth.calm import Calm
from accel.runtime.session.state.pending import PendingTokens

from .depth_case import LAYERS, NEVER, TOKENS, far, oracle

WINDOW, START = 3, 9
REFEED = dict(use="calm", cache="refeed", first=1, every=1, window=WINDOW, threshold=NEVER)
BY = ["softmax", "max", "state"]


def logits_after(module, tokens, depth):
    """The last logits [B,V] where all tokens [B,T] go through the first `depth` layers alone."""
    ran = np.repeat((np.arange(LAYERS) < depth)[:, None], tokens.shape[1], 1)
    return oracle(module, tokens, ran)[:, -1]


def sure(module, tokens, depth, by):
    """How sure each row's last token is behind so many layers [B]."""
    if by == "state":
        with torch.no_grad():
            states = module(torch.tensor(tokens), output_hidden_states=True).hidden_states
        a, b = (states[i][:, -1].double() for i in (depth - 1, depth))
        return torch.cosine_similarity(a, b, dim=-1).numpy()
    odds = np.exp(logits_after(module, tokens, depth).astype(np.float64))
    best = np.sort(odds / odds.sum(-1, keepdims=True), axis=-1)
    return best[:, -1] - (best[:, -2] if by == "softmax" else 0)


class Plain:
    """The rule, by forwards without a cache: which layers a step runs, and what is pending behind it."""

    def __init__(self, module, by, limit):
        self.module, self.by, self.limit = module, by, limit
        self.pending = np.zeros(2, int)

    def sure(self, tokens, depth):
        """Whether all rows are."""
        return all(
            sure(self.module, np.array([t]), depth, self.by)[0] >= self.limit for t in tokens
        )

    def step(self, tokens):
        """Of two rows, whose last token is new: how many layers run, and the logits [2,V]."""
        depth = LAYERS
        if self.pending.max() + 1 <= WINDOW:
            depth = next((d for d in range(1, LAYERS) if self.sure(tokens, d)), LAYERS)
        self.pending = self.pending + 1 if depth < LAYERS else np.zeros_like(self.pending)
        logits = [logits_after(self.module, np.array([t]), depth)[0] for t in tokens]
        return depth, np.stack(logits)


class OneRow(Plain):
    """The control: the last row decides for all."""

    def sure(self, tokens, depth):
        return super().sure(tokens[-1:], depth)


class Before(Plain):
    """The control: the token before the new one decides."""

    def sure(self, tokens, depth):
        return super().sure([t[:-1] for t in tokens], depth)


def limit_of(module, tokens, by, share=0.45):
    """A threshold at which a share of tokens does not leave."""
    lengths, depths = range(START, 20), range(1, LAYERS)
    found = [max(sure(module, tokens[:, : n + 1], d, by).min() for d in depths) for n in lengths]
    return float(np.quantile(found, share))


def pending(session):
    return session.observer(PendingTokens).pending


def cache(session):
    """Keys and values of the tokens of two rows, by name and row."""
    held = session._core.backend.buffers()
    names = [n for n in held if n.endswith((".k", ".v"))]
    return {
        (n, row): held[n][row, :, : session.lengths[row]].copy() for n in names for row in (0, 1)
    }


def whole(compiled, rows):
    """The cache of the model where all tokens of rows run all layers."""
    counts = np.array([len(row) for row in rows])
    tokens = np.stack([np.pad(row, (0, counts.max() - len(row))) for row in rows])
    with compiled.session(2) as session:
        session.run(tokens, counts)
        return cache(session)


def same(found, full):
    return all(far(array, full[name]) < 1e-5 for name, array in found.items())


@pytest.mark.few(1)
@pytest.mark.parametrize(("target", "by"), [*(("onnx", by) for by in BY), ("eager", "softmax")])
def test_each_step_is_a_forward_without_a_cache_that_ends_at_its_layer(target, by, deep):
    """The controls decide otherwise: a row alone, or a token that was there before."""
    module, compiled = deep("llama", target, **REFEED, by=by)
    limit = limit_of(module, TOKENS, by)
    plain, row, before = (rule(module, by, limit) for rule in (Plain, OneRow, Before))
    depths, wrong = [], []
    with compiled.session(2) as session:
        session.prompt(TOKENS[:, :START])
        for n in range(START, 20):
            out = session.step(TOKENS[:, n : n + 1], want=[LAYERS_RAN], threshold=limit)
            depth, logits = plain.step(TOKENS[:, : n + 1])
            assert (out.extra[LAYERS_RAN] == depth).all() and out.extra[LAYERS_RAN].shape == (2, 1)
            assert far(out.logits[:, -1], logits) < 1e-4
            assert (pending(session) == plain.pending).all()
            assert (session.lengths == n + 1).all()
            depths.append(depth)
            wrong.append([rule.step(TOKENS[:, : n + 1])[0] for rule in (row, before)])
            if depth == LAYERS and target == "onnx":
                assert same(cache(session), whole(compiled, TOKENS[:, : n + 1]))
    assert len(set(depths)) > 1 and depths.count(LAYERS) > 1
    assert all(depths != list(other) for other in zip(*wrong, strict=True))


def test_without_what_is_pending_the_cache_is_not_the_models(deep, monkeypatch):
    """The control: a session that forgets a token."""
    _, compiled = deep("llama", **REFEED)

    def through(tokens):
        with compiled.session(2) as session:
            session.prompt(tokens[:, :START])
            for n in range(START, START + 2):
                session.run(tokens[:, n : n + 1], threshold=0.0)
            got = session.run(tokens[:, START + 2 : START + 3], threshold=NEVER)
            return same(cache(session), whole(compiled, tokens)), got

    tokens = TOKENS[:, : START + 3]
    right, want = through(tokens)
    assert right and far(want, compiled.logits(tokens)[:, -1:]) < 1e-4
    note = PendingTokens.after

    def forgets(self, *step):
        note(self, *step)
        self.pending = np.minimum(self.pending, 1)

    monkeypatch.setattr(PendingTokens, "after", forgets)
    right, got = through(tokens)
    assert not right and far(got, want) > 1e-3


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_pending_goes_on_through_all_that_sessions_do(seed, deep, tmp_path):
    """Rewinds, forks, copies of rows, files, wide calls and prompts between tokens that leave."""
    module, compiled = deep("llama", **REFEED)
    rng = np.random.default_rng(seed)
    limit = limit_of(module, TOKENS, "softmax", 0.05)
    plain, rows = Plain(module, "softmax", limit), [list(row[:START]) for row in TOKENS]
    session, seen = compiled.session(2), []
    session.prompt(TOKENS[:, :START])
    for _ in range(40):
        act = str(rng.choice(["step"] * 6 + ["rewind", "fork", "select", "file", "wide", "prompt"]))
        if max(map(len, rows)) > 40:
            act = "rewind"
        seen.append((act, bool(pending(session).any())))
        if act == "step":
            new = rng.integers(0, 90, (2, 1))
            rows = [[*row, int(t)] for row, t in zip(rows, new[:, 0], strict=True)]
            out = session.step(new, want=[LAYERS_RAN], threshold=limit)
            depth, logits = plain.step(rows)
            assert (out.extra[LAYERS_RAN] == depth).all()
            assert far(out.logits[:, 0], logits) < 1e-4
        elif act == "rewind":
            back = rng.integers(0, 4, 2) if len(rows[0]) < 40 else np.array([20, 20])
            rows = [row[: max(START - 4, len(row) - n)] for row, n in zip(rows, back, strict=True)]
            gone = session.lengths - [len(row) for row in rows]
            session.rewind([len(row) for row in rows])
            plain.pending = np.maximum(plain.pending - gone, 0)
        elif act == "fork":
            other = session.fork()
            session.run(TOKENS[:, :1], threshold=0.0)  # which the fork does not see
            session.close()
            session = other
        elif act == "select":
            order = rng.integers(0, 2, 2)
            session.select(order)
            rows, plain.pending = [list(rows[i]) for i in order], plain.pending[order]
        elif act == "file":
            session.save(tmp_path / "rows")
            session.close()
            session = compiled.open_session(tmp_path / "rows")
        else:
            new, counts = rng.integers(0, 90, (2, 3)), rng.integers(1, 4, 2)
            counts[rng.integers(2)] = 3
            rows = [
                [*row, *part[:n]] for row, part, n in zip(rows, new.tolist(), counts, strict=True)
            ]
            call = session.run if act == "wide" else session.prompt
            got, plain.pending = call(new, counts), np.zeros(2, int)
            for row, n, logits in zip(rows, counts, got, strict=True):
                last = logits[n - 1 if act == "wide" else 0]
                assert far(last, logits_after(module, np.array([row]), LAYERS)[0]) < 1e-4
                assert not logits[n:].any()
            assert same(cache(session), whole(compiled, rows))
        assert (pending(session) == plain.pending).all()
        assert session.lengths.tolist() == [len(row) for row in rows]
    assert sum(was for act, was in seen if act != "step") > 3
    session.run(TOKENS[:, :1])
    session.run(TOKENS[:, 1:2], threshold=0.0)
    rows = [[*row, *new] for row, new in zip(rows, TOKENS[:, :2].tolist(), strict=True)]
    with compiled.session(2) as other:  # which takes what the model holds
        assert pending(session).all() and other.take(session, session.lengths)
        assert same(cache(other), whole(compiled, rows))
    session.close()


def test_a_call_that_fails_leaves_tokens_pending(deep, monkeypatch):
    module, compiled = deep("llama", **REFEED)
    with compiled.session(2) as session:
        session.prompt(TOKENS[:, :START])
        session.run(TOKENS[:, START : START + 1], threshold=0.0)
        for width in (1, 5):
            with monkeypatch.context() as patch:
                patch.setattr(PendingTokens, "settle", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    session.run(TOKENS[:, START + 1 : START + 1 + width])
            assert (
                pending(session).tolist() == [1, 1] and session.lengths.tolist() == [START + 1] * 2
            )
        got = session.run(TOKENS[:, START + 1 : START + 6])
        assert far(got, compiled.logits(TOKENS[:, : START + 6])[:, -5:]) < 1e-4


def test_rows_without_a_new_token_wait_with_the_others(deep):
    module, compiled = deep("llama", **REFEED)
    with compiled.session(2) as session:
        session.prompt(TOKENS[:, :START])
        session.run(TOKENS[:, START : START + 1], threshold=0.0)
        got = session.run(TOKENS[:, START + 1 : START + 2], [1, 0], threshold=0.0)
        assert pending(session).tolist() == [2, 1] and not got[1].any()
        want = logits_after(module, TOKENS[:1, : START + 2], 1)
        assert far(got[0], want) < 1e-4
        session.run(TOKENS[:, START + 2 : START + 3], [0, 1])
        rows = [TOKENS[0, : START + 2], [*TOKENS[1, : START + 1], TOKENS[1, START + 2]]]
        assert same(cache(session), whole(compiled, rows))


def test_the_recipes_choose_what_they_say():
    assert Recipe.load("calm-refeed").tables == {"depth": {"use": "calm", "cache": "refeed"}}
    refeed, meta = (assemble(Recipe.load(f"calm-{n}")).methods["depth"] for n in ("refeed", "meta"))
    assert (
        Invariant.APPEND_ONLY in refeed.breaks and Invariant.LAYERS_BY_CALL not in refeed.provides
    )
    assert len(meta.steps()) == 2 and len(refeed.steps()) == 1
    assert [one.key for one in parts_of(Recipe.load("calm-meta"))] == ["calm"]
    assert not parts_of(Recipe.load("calm")) and not parts_of(Recipe.load("calm-refeed"))


@pytest.mark.parametrize(
    "other", [("kv.codec", "kivi"), ("kv.select", "quest"), ("draft", "layerskip")]
)
def test_what_relies_on_tokens_that_are_written_once_is_refused(other):
    axis, use = other
    with pytest.raises(RecipeError, match=use):
        assemble(Recipe.load({"depth": {"use": "calm", "cache": "refeed"}, axis: {"use": use}}))


def test_what_no_caller_may_ask_for(deep):
    _, compiled = deep("llama", **REFEED)
    with compiled.session() as one, compiled.session() as other:
        assert one.capabilities.width == 1
        assert not one.capabilities.joins and not one.capabilities.trees
        one.prompt(TOKENS[:1, :START])
        one.run(TOKENS[:1, START : START + 1], threshold=0.0)
        with pytest.raises(InputError, match="run_layers leaves out a layer"):
            one.run(TOKENS[:1, :1], run_layers=[True, True, True, False])
        with pytest.raises(InputError, match="rows cannot join"):
            one.join(other)
        assert pending(one).tolist() == [1]
        one.run(TOKENS[:1, :1], run_layers=[True] * LAYERS, threshold=NEVER)
        assert not pending(one).any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache": "defer"}, "cache 'defer' does not exist; known: propagate, refeed"),
        ({"window": 0}, "window is 0; give 1 to 64"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(RecipeError, match=words):
        Calm(**options)
