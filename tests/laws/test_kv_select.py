"""Laws of the kv.select axis: a page speaks for itself, a token's choice depends on what came before it alone."""

import functools
import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.compiler.assemble import GRADES
from accel.ir.invariants import Invariant
from accel.ir.ops.attention import attention, operands_of
from accel.ir.ops.choice import best_pages
from accel.ir.ops.pages import fetch_pages
from accel.ir.program import DTYPES, ancestors, compute
from accel.ir.region import Conditional
from accel.passes.kv.select import FEW, LEAST
from accel.passes.kv.select._pages import Pages
from accel.passes.trained import Trained

from ..select_case import AXIS, Selecting, built, constants, scores, summary
from ..session_ways import close, singles

NAMES = [name for name in AXIS.names() if issubclass(AXIS.method(name), Pages)]
STANDS = {AXIS.method(name).__bases__: name for name in reversed(NAMES)}.values()
each = pytest.mark.parametrize("name", NAMES)
of_each_class = (
    pytest.mark.parametrize(  # what is of the class beneath a method, and no choice counts
        "name", [pytest.param(n, marks=() if n in STANDS else pytest.mark.long) for n in NAMES]
    )
)
some = settings(max_examples=8, deadline=None, derandomize=True)
B, G, R, N, D = 2, 2, 3, 5, 6


def keys(seed, page):
    return torch.randn(B, G, N, page, D, generator=torch.Generator().manual_seed(seed))


def queries(seed, rows=R):
    return torch.randn(B, G, rows, D, generator=torch.Generator().manual_seed(seed + 1))


# What is kept of a page, and what a query makes of it


def law_alone(method, seed):
    """A page's parts and its score are those that it has among others, whatever these are."""
    x, q = keys(seed, method.page), queries(seed)
    whole = summary(method, x)
    worth = scores(method, q, x)
    assert worth.shape == (B, G, R, N) and worth.isfinite().all()
    loud = x * torch.tensor([1.0, 1e3, 1.0, 1e3, 1e3])[:, None, None]
    for found in (x[:, :, [0, 2]], loud[:, :, [0, 2]], loud):
        pages = [0, 2] if found.shape[2] == N else [0, 1]
        parts = summary(method, found)
        for name, part in parts.items():
            assert torch.equal(part[:, :, pages], whole[name][:, :, [0, 2]]), name
        torch.testing.assert_close(scores(method, q, found)[..., pages], worth[..., [0, 2]])
    torch.testing.assert_close(scores(method, q[:, :, [1]], x)[:, :, 0], worth[:, :, 1])


@each
@some
@given(seed=st.integers(0, 1 << 20))
def test_a_page_speaks_for_itself(name, seed):
    law_alone(built(name), seed)


def hears(name, function):
    """The function, for which each page's keys are less the mean of all."""

    @functools.wraps(function)
    def broken(self, *args, **more):
        given_ = inspect.signature(function).bind(self, *args, **more).arguments
        if name in given_:
            given_[name] = given_[name] - given_[name].mean(2, keepdim=True)
        return function(**given_)

    return broken


@each
def test_a_page_that_hears_others_is_caught(name):
    method = built(name)

    class Broken(type(method)):
        summary = hears("keys", type(method).summary)
        score = hears("keys", type(method).score)

    with pytest.raises(AssertionError):
        law_alone(Broken(**vars(method)), 0)


@each
def test_parts_are_as_declared(name):
    method = built(name)
    assert method.grade in GRADES
    for width, page in ((1, 1), (6, 4), (64, 16)):
        x = torch.randn(B, G, N, method.page if method.page == 1 else page, width)
        parts, declared = summary(method, x), method.parts(width)
        assert list(parts) == list(declared)
        for part, (dtype, sizes) in declared.items():
            assert parts[part].dtype == DTYPES[dtype] and parts[part].shape == (B, G, N, *sizes)


def law_update(method, seed):
    """What it says of a page that the call fills is its summary; of pages that the call leaves alone, what it said."""
    rng, page = np.random.default_rng(seed), method.page
    for slots_, tokens in ((12, 1), (12, 5), (11, 11), (4, 1), (40, 30)):
        x = torch.randn(2, G, slots_, D, generator=torch.Generator().manual_seed(seed))
        slots = torch.from_numpy(rng.integers(0, slots_ - tokens + 1, 2))
        slots[0] = min(page - 1, slots_ - tokens)
        want = summary(method, x[:, :, : slots_ // page * page].unflatten(2, (-1, page)))
        sizes = {
            name: (2, G, -(-slots_ // page), *tail) for name, (_, tail) in method.parts(D).items()
        }
        held = {name: torch.full(shape, 9.0) for name, shape in sizes.items()}
        table = constants(method, G, D)
        found = method.update(held, x, torch.zeros(2, tokens, dtype=torch.int64), slots, **table)
        for name, part in found.items():
            for row, start in enumerate(slots.tolist()):
                filled = slice(start // page, (start + tokens) // page)
                assert torch.equal(part[row][:, filled], want[name][row][:, filled]), name
                far = (
                    tokens + page - 2
                ) // page + 1  # what is computed anew without need is full and near
                for other in (
                    n
                    for n in range(part.shape[2])
                    if not start // page - far < n < start // page + far
                ):
                    assert (part[row][:, other] == 9).all(), name


@each
@some
@given(seed=st.integers(0, 1 << 20))
def test_what_is_kept_of_a_page_follows_its_keys(name, seed):
    law_update(built(name), seed)


@each
def test_an_update_that_forgets_the_last_page_is_caught(name):
    method = built(name)

    if not method.parts(D):
        return  # it keeps nothing

    class Broken(type(method)):
        def update(self, held, keys, q_pos, slots, **table):
            few = max(1, q_pos.shape[1] - 2 * self.page)
            return super().update(held, keys, q_pos[:, :few], slots, **table)

    with pytest.raises(AssertionError):
        law_update(Broken(**vars(method)), 0)


# Sessions


def lists(case, session, at=-1):
    """What the tokens of a call would choose [B,G,T,K], of each layer, given the session's state now."""
    found = []
    graph = case.program.step.graph
    state = session._core.backend._state
    for node in graph.find_nodes(op="call_function", target=attention.default):
        wanted = operands_of(node).pages
        if wanted is None:
            continue
        tokens = np.full((session.batch, 1), 5)
        given = {
            "tokens": tokens, "positions": session.lengths[:, None], "slots": session.lengths,
            "rows": np.zeros((session.batch, 1), np.int64),
        }  # fmt: skip
        inputs = {n: torch.from_numpy(np.array(a)) for n, a in given.items()} | state
        values = {}
        with torch.no_grad():
            for each_ in graph.nodes:
                if each_.op == "output":
                    break
                values[each_] = compute(each_, case.program.params, inputs, values)
        found.append(values[wanted])
    return found


def law_lists(case, tokens):
    """A token's own page comes first; the others lie before it, each once, as many as it may read."""
    with case.session(2) as session:
        session.run(tokens[:, :39], np.array([39, 14]))  # the next slot is a page's last
        for pages in lists(case, session):
            for row, length in enumerate(session.lengths):
                for head in pages[row, :, 0].tolist():
                    own, before = int(length) // case.method.page, [p for p in head[1:] if p >= 0]
                    assert head[0] == own and len(set(before)) == len(before)
                    assert all(0 <= p < own for p in before)
                    assert len(before) == min(own, case.method.count - 1)


def law_singles(case, tokens):
    """A call of several tokens gives what as many calls of one do."""
    with case.session(2) as session:
        session.run(tokens[:, :34])
        several = [session.run(tokens[:, a:b]) for a, b in ((34, 45), (45, 48))]
        session.rewind(34)
        close(np.concatenate(several, 1), singles(session, tokens[:, 34:48]))


def law_rewind(case, tokens, wrap=None):
    """What was forgotten leaves no trace, wherever in a page the session goes on."""
    other = case.tokens(*tokens.shape, seed=9)
    for length in (5, 16, 30):
        with case.session(2) as straight, case.session(2, wrap) as bent:
            for session in (straight, bent):
                session.run(tokens[:, :length])
            bent.run(other[:, length:44])
            bent.rewind(length)
            for a, b in ((length, length + 1), (length + 1, length + 7), (length + 7, 44)):
                assert np.array_equal(straight.run(tokens[:, a:b]), bent.run(tokens[:, a:b]))
            assert np.array_equal(singles(straight, tokens[:, 44:]), singles(bent, tokens[:, 44:]))


def law_rows(case, tokens):
    """A row beside a longer one is as it is alone."""
    lengths = np.array([40, 7])
    with case.session(2) as both:
        first, then = both.run(tokens[:, :40], lengths), singles(both, tokens[:, 40:46])
        for row, n in enumerate(lengths):
            with case.session(1) as alone:
                close(first[row, :n], alone.run(tokens[[row], :n])[0])
                close(then[row], singles(alone, tokens[[row], 40:46])[0])


def law_unwritten(case, tokens):
    """Keys in slots that hold nothing, and what is said of pages that are not full, say nothing."""
    with case.session(2) as clean, case.session(2) as dirty:
        for session in (clean, dirty):
            session.run(tokens[:, :33])
        state = dirty._core.backend._state
        for name in state:
            if name.endswith(".k"):
                state[name][:, :, 33:] = math.nan
            if name.startswith("pages."):
                state[name][:, :, 33 // case.method.page :] = math.nan
        assert np.array_equal(singles(clean, tokens[:, 33:46]), singles(dirty, tokens[:, 33:46]))


LAWS = [law_lists, law_singles, law_rewind, law_rows, law_unwritten]


@pytest.mark.few(4)
@each
@pytest.mark.parametrize("law", LAWS)
def test_law(selecting, law, name):
    case = selecting(name)
    if law is law_singles and Invariant.DECODE_WIDTH in case.method.breaks:
        with pytest.raises(AssertionError):
            law(case, case.tokens(2, 56))
    else:
        law(case, case.tokens(2, 56))


@pytest.mark.few(4)
@each
def test_what_is_read_matters(selecting, name):
    """Or the laws above would say nothing."""
    small, whole = selecting(name), selecting()
    tokens = whole.tokens(1, 60)
    with small.session() as a, whole.session() as b:
        first = [s.run(tokens[:, : FEW + 8]) for s in (a, b)]
        assert np.array_equal(*first), "a long call reads everything"
        assert (
            np.abs(singles(a, tokens[:, FEW + 8 :]) - singles(b, tokens[:, FEW + 8 :])).max() > 1e-2
        )


def test_the_end_of_a_long_call_reads_everything(selecting, monkeypatch):
    """However few tokens are left behind the longest graph call."""
    monkeypatch.setattr("accel.runtime.session.core.CHUNK", 80)
    small, whole = selecting("quest"), selecting()
    with small.session() as a, whole.session() as b:
        for end in (85, 81):
            tokens = whole.tokens(1, end)
            close(a.run(tokens), b.run(tokens))
            a.rewind(0)
            b.rewind(0)


@pytest.mark.few(1)
@of_each_class
@pytest.mark.parametrize("read", [64, 1 << 20])
def test_who_reads_everything_decodes_what_the_model_does(selecting, name, read):
    case, whole = selecting(name, tokens_read=read), selecting()
    tokens = whole.tokens(1, 60)
    with case.session() as a, whole.session() as b:
        close(a.run(tokens[:, :20]), b.run(tokens[:, :20]))
        last = [5, 5]
        for _ in range(30):
            logits = [s.run(np.full((1, 1), t)) for s, t in zip((a, b), last, strict=True)]
            close(*logits)
            last = [int(x.argmax()) for x in logits]
            assert last[0] == last[1]


@each
def test_the_choice_does_not_ask_for_values(selecting, name):
    case = selecting(name)
    graph = case.program.step.graph
    for layer, node in enumerate(graph.find_nodes(op="call_function", target=attention.default)):
        pages = operands_of(node).pages
        if pages is None:
            assert layer in case.method.layout.choosers or layer < case.method.dense_layers
            continue
        while pages.target is fetch_pages.default:
            pages = pages.args[0]  # the list as it was chosen
        layer = pages.meta["layer"]
        assert isinstance(pages.args[0].target, Conditional)
        asked = {str(n.target) for n in ancestors([pages], set()) if n.op == "placeholder"}
        reads = f"kv.{layer}.v" in asked, f"kv.{layer}.k" in asked
        assert reads == (False, not isinstance(case.method, Trained))


# What the laws must catch


def broken(stateful, method, **changed):
    """The method with some of its parts replaced."""
    return Selecting(stateful("llama"), type("Broken", (type(method),), changed)(**vars(method)))


@pytest.mark.few(1)
@of_each_class
def test_tokens_that_choose_together_are_caught(stateful, name):
    if Invariant.DECODE_WIDTH in built(name).breaks:
        return  # so they do, and say it

    def vote(self, scores, seen):
        return scores.amax(2).amax(2, keepdim=True).expand(-1, -1, scores.shape[3], -1)

    case = broken(stateful, built(name), vote=vote)
    with pytest.raises(AssertionError):
        law_singles(case, case.tokens(2, 56))


@each
def test_pages_that_are_not_kept_up_to_date_are_caught(selecting, name):
    """After the first call."""
    case = selecting(name)
    if not case.method.parts(D):
        return  # it keeps nothing

    def frozen(backend):
        step, held = backend.step, {}

        def once(*args):
            logits = step(*args)
            now = {n: t for n, t in backend._state.items() if n.startswith("pages.")}
            backend._state |= {n: held.setdefault(n, t) for n, t in now.items()}
            return logits

        backend.step = once
        return backend

    with pytest.raises(AssertionError):
        law_rewind(case, case.tokens(2, 56), frozen)


@pytest.mark.few(1)
@of_each_class
def test_a_page_that_is_listed_twice_is_caught(stateful, name):
    """The token's own, in the place of another."""
    case = broken(stateful, built(name, tokens_read=64))
    for node in case.program.nodes(best_pages.default, entry=case.program.step):
        with node.graph.inserting_after(node):
            own = node.graph.call_function(torch.ops.aten.slice.Tensor, (node, 3, 0, 1))
        with node.graph.inserting_after(own):
            more = node.graph.call_function(torch.ops.aten.slice.Tensor, (node, 3, 0, -1))
        with node.graph.inserting_after(more):
            twice = node.graph.call_function(torch.ops.aten.cat.default, ((own, more), 3))
        node.replace_all_uses_with(twice, lambda user, new=(own, more): user not in new)
    with pytest.raises(AssertionError):
        law_lists(case, case.tokens(2, 56))


def test_three_pages_are_read_at_least():
    for name in NAMES:
        few, many = built(name, tokens_read=1), built(name, tokens_read=400)
        assert LEAST <= few.count < many.count
