"""Laws of kv.select methods that choose tokens: a list has each once, a choice depends on what came before it alone,
and every token is in one unit.
"""

import math

import numpy as np
import pytest
import torch

from accel.ir.entries.group import GROUP
from accel.ir.errors import InputError
from accel.ir.invariants import Invariant
from accel.ir.ops.attention import attention, operands_of
from accel.ir.ops.units import best_tokens
from accel.ir.program import ancestors
from accel.ir.region import Conditional
from accel.ir.sizes import FEW
from accel.passes.kv.inputs import call
from accel.passes.kv.select._history import Histories
from accel.passes.kv.select._tokens import Memory, Tokens, searches
from accel.passes.kv.select._units import Units
from accel.runtime.session.state.units import UnitGroups

from ..select_case import AXIS, Selecting, built, constants
from ..session_ways import close, singles
from .test_kv_select import law_rows, law_singles, lists


def memory(method):
    """What a method of tokens keeps; one of a history has a state of its own."""
    return method.memory(4, 8, 2) if isinstance(method, Tokens) else Memory()


TOKENS = [name for name in AXIS.names() if issubclass(AXIS.method(name), Tokens | Histories)]
HISTORY = [name for name in TOKENS if built(name).layout.width < FEW]
UNITS = [name for name in TOKENS if issubclass(AXIS.method(name), Units)]
MEMORY = [name for name in TOKENS if name in HISTORY or memory(built(name)).entries]
every = pytest.mark.parametrize("name", TOKENS)
STANDS = {AXIS.method(name).__bases__: name for name in reversed(TOKENS)}.values()
of_each_class = pytest.mark.parametrize(  # no choice counts
    "name", [pytest.param(n, marks=() if n in STANDS else pytest.mark.long) for n in TOKENS]
)
each = pytest.mark.parametrize("name", UNITS)
remembers = pytest.mark.parametrize("name", MEMORY)
histories = pytest.mark.parametrize("name", HISTORY)
B, G, N, D = 2, 2, 23, 6


def distinct(rows, count):
    """Each token once in a row: keys of the first layer are equal where the tokens are."""
    r = np.random.default_rng(0)
    return np.stack([3 + r.permutation(98)[:count] for _ in range(rows)])


def groups(method, seed=0, counts=(N, 9), units=(6, 3)):
    x = torch.randn(B, G, N, D, generator=torch.Generator().manual_seed(seed))
    real = torch.arange(N) < torch.tensor(counts)[:, None]
    return x, real, torch.arange(6) < torch.tensor(units)[:, None]


def grouped(method, keys, real, units, generated):
    """What a method's `group` says of what it names; a session says that three and four tokens lie together in turn."""
    known = {"keys": keys, "real": real, "units": units}
    known |= constants(method, keys.shape[1], keys.shape[3])
    known["marks"] = torch.arange(keys.shape[2]).mul(2).div(7, rounding_mode="floor") * real
    known |= {
        n: known["marks"].roll(2, 1).sub(known["marks"]).float() for n in memory(method).lasting
    }
    return call(method.group, {**known, "generated": torch.tensor(generated)[:, None]})


def law_partition(method, seed, generated=(False, False)):
    """Each real token is in one of its row's units; what a row and head makes of its keys, it makes alone."""
    x, real, units = groups(method, seed)
    labels, means = grouped(method, x, real, units, generated)
    assert means.dtype == torch.float32 and means.shape == (B, G, 6, D)
    for row, count in enumerate(real.sum(1).tolist()):
        few = int(units[row].sum())
        assert ((labels[row, :, :count] >= 0) & (labels[row, :, :count] < few)).all()
        cut = units[[row]][:, :few]
        alone, its = grouped(
            method, x[[row], :, :count], real[[row], :count], cut, generated[row : row + 1]
        )
        assert torch.equal(alone[0], labels[row, :, :count])
        torch.testing.assert_close(its[0], means[row, :, :few])
        one, _ = grouped(
            method, x[[row], 1:, :count], real[[row], :count], cut, generated[row : row + 1]
        )
        assert torch.equal(one[0], labels[row, 1:, :count])


@each
@pytest.mark.parametrize("generated", [(False, False), (True, False)], ids=str)
def test_every_token_is_in_one_unit(name, generated):
    law_partition(built(name), sum(generated), generated)


@each
def test_padding_that_counts_is_caught(name):
    class Broken(type(built(name))):
        def group(self, keys, real, units, generated):
            return grouped(
                built(name), keys, torch.ones_like(real), units, generated[:, 0].tolist()
            )

    with pytest.raises(AssertionError):
        law_partition(Broken(**AXIS.small(name)), 0)


def brute(worth, label, seen, count):
    """Unit by unit, in the order of worth, slot by slot."""
    found = []
    for unit in sorted(range(len(worth)), key=lambda u: (-worth[u], u)):
        found += [s for s in range(len(label)) if label[s] == unit and seen[s]]
    return (found + [-1] * count)[:count]


@pytest.mark.parametrize("count", [1, 7, 40])
def test_tokens_are_listed_unit_by_unit_and_the_last_is_cut(count):
    g = torch.Generator().manual_seed(count)
    worth = torch.randint(-3, 3, (B, G, 3, 5), generator=g).float()
    label = torch.randint(0, 5, (B, G, 17), generator=g)
    seen = torch.rand(B, 1, 3, 17, generator=g) < 0.7
    found = best_tokens(worth, label, seen, count)
    assert found.shape == (B, G, 3, count)
    for b, h, t in np.ndindex(B, G, 3):
        want = brute(worth[b, h, t].tolist(), label[b, h].tolist(), seen[b, 0, t].tolist(), count)
        assert found[b, h, t].tolist() == want
    worth[..., 2] = math.nan
    first = best_tokens(worth, label, torch.ones_like(seen), 1)[..., 0]
    assert (label[:, :, None].expand(-1, -1, 3, -1).gather(3, first[..., None]) == 2).all()


def law_lists(case, tokens):
    """A token reads the sinks, itself and all in no unit yet, and as many more as it may; each once."""
    plan = case.method.plan
    with case.session(2) as session:
        session.prompt(tokens[:, :39], np.array([39, 14]))
        singles(session, tokens[:, 39:56])
        found_few = False
        for found in lists(case, session):
            for row, length in enumerate(session.lengths.tolist()):
                origin = (39, 14)[row]
                whole = max(0, length - (FEW - 1) - origin) // plan.every
                end = origin + whole * plan.every
                for head in found[row, :, 0].tolist():
                    read = [s for s in head if s >= 0]
                    assert len(set(read)) == len(read)
                    if memory(case.method).whole and len(read) == length + 1:
                        continue
                    found_few = True
                    assert {*range(plan.sinks), *range(end, length + 1)} <= set(read)
                    assert all(0 <= s <= length for s in read)
                    chosen = len([s for s in read if plan.sinks <= s < end])
                    most = case.method.tokens_read - plan.sinks
                    if hasattr(case.method, "in_layer"):
                        most = (
                            found.shape[3] - plan.sinks - plan.tail
                        )  # layers read unequal numbers
                    assert chosen == min(most, end - plan.sinks)
        assert found_few, "or all read everything, and this says nothing"


def law_labels(case, tokens):
    """Slots of one unit are next to none of another's: units of a prompt and of each segment are numbered apart."""
    plan = case.method.plan
    with case.session(2) as session:
        session.prompt(tokens[:, :39], np.array([39, 14]))
        singles(session, tokens[:, 39:56])
        state = session._core.backend._state
        for layer in range(2):
            label = state[f"units.{layer}.label"]
            for row, origin in enumerate((39, 14)):
                ends = [origin, *range(origin + plan.every, session.lengths[row] + 1, plan.every)]
                seen = set()
                for start, stop in zip([plan.sinks, *ends], ends, strict=False):
                    new = set(label[row, :, start:stop].flatten().tolist())
                    assert not seen & new and max(new) < state[f"units.{layer}.mean"].shape[2]
                    seen |= new


def law_rewind_prompts(case, tokens):
    """What was forgotten leaves no trace, of whole prompts, and of generated tokens behind them."""
    other = case.tokens(*tokens.shape, seed=9)
    for length in (33,) if memory(case.method).entries else (21, 33):
        with case.session(2) as straight, case.session(2) as bent:
            for session in (straight, bent):
                session.prompt(tokens[:, :20])
                singles(session, tokens[:, 20:length])
            bent.run(other[:, length:41])
            bent.prompt(other[:, 41:53])
            singles(bent, other[:, 53:56])
            bent.rewind(length)
            assert np.array_equal(
                singles(straight, tokens[:, length:]), singles(bent, tokens[:, length:])
            )
            for session in (straight, bent):
                session.rewind(0)
                session.prompt(tokens[:, :30])
            assert np.array_equal(*(singles(s, tokens[:, 30:]) for s in (straight, bent)))


def law_forks(case, tokens):
    """Rows that were selected, and forks, go on as they would have alone."""
    with case.session(2) as session:
        session.prompt(tokens[:, :30], np.array([30, 18]))
        singles(session, tokens[:, 30:40])
        with session.fork() as other:
            want = singles(other, tokens[:, 40:])
        session.select([1, 1])
        singles(session, tokens[:, 40:42])
        session.select([0])
        with case.session(1) as alone:
            alone.prompt(tokens[[1], :18])
            singles(alone, tokens[[1], 30:40])
            alone.run(tokens[[0], 40:41])
            alone.run(tokens[[0], 41:42])
            close(singles(session, tokens[[1], 42:]), singles(alone, tokens[[1], 42:]))
    assert np.isfinite(want).all()


def law_listed_once(case, tokens):
    """A token reads itself, and what lies before it, each once."""
    with case.session(2) as session:
        session.prompt(tokens[:, :39], np.array([39, 14]))
        singles(session, tokens[:, 39:44])
        for found in lists(case, session):
            for row, length in enumerate(session.lengths.tolist()):
                for head in found[row, :, 0].tolist():
                    read = [s for s in head if s >= 0]
                    assert len(set(read)) == len(read) <= case.method.count
                    assert length in read and max(read) == length


def law_back(case, tokens):
    """What was forgotten of the last FEW tokens leaves no trace, in calls of one token and of several."""
    other = case.tokens(*tokens.shape, seed=9)
    for length, calls in ((24, (1, 2, 1, 3)), (22, (7, 9, 16)), (37, (FEW,))):
        with case.session(2) as straight, case.session(2) as bent:
            for session in (straight, bent):
                session.prompt(tokens[:, :20])
                session.run(tokens[:, 20:length])
            start = length
            for width in calls:
                bent.run(other[:, start : start + width])
                start += width
            bent.rewind(length)
            for a, b in ((length, length + 1), (length + 1, length + 7)):
                assert np.array_equal(straight.run(tokens[:, a:b]), bent.run(tokens[:, a:b]))


LAWS = [law_lists, law_labels, law_rewind_prompts, law_forks]


@pytest.mark.few(1)
@every
@pytest.mark.parametrize("law", [law_listed_once, law_singles, law_rows, law_back])
def test_law_of_lists(selecting, law, name):
    if law is law_singles and name in HISTORY:
        return  # its calls of several tokens read everything: see below
    case = selecting(name)
    law(case, distinct(2, 64))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", sorted({*MEMORY} - {*HISTORY}))
def test_rewinds_into_unknown_choices_are_refused(selecting, name):
    """The end of a prompt, and what lies in it, has none."""
    case = selecting(name)
    tokens = distinct(1, 90)
    with case.session() as session:
        session.prompt(tokens[:, :40])
        singles(session, tokens[:, 40:80])
        able = session.capabilities
        assert (able.back, able.width, able.trees) == (FEW, FEW, False)
        with pytest.raises(InputError, match=r"cannot rewind row 0 to 47.*give 48\.\.80, the end"):
            session.rewind(47)
        for length in (48, 40, 11, 0):
            session.rewind(length)


@histories
def test_rewinds_of_more_than_the_history_spares_are_refused(selecting, name):
    """And what calls of several tokens give is no more than whole attention."""
    case, whole = selecting(name), selecting()
    tokens = distinct(1, 90)
    with case.session() as session, whole.session() as every_key:
        for one in (session, every_key):
            one.prompt(tokens[:, :40])
        close(session.run(tokens[:, 40:48]), every_key.run(tokens[:, 40:48]))
        singles(session, tokens[:, 48:80])
        able = session.capabilities
        assert (able.back, able.width, able.trees) == (FEW, 1, False)
        for length in (47, 40, 11):
            with pytest.raises(InputError, match=f"cannot rewind row 0 to {length}.*48..80, or 0"):
                session.rewind(length)
        for length in (48, 0):
            session.rewind(length)


@histories
def test_methods_of_a_history_say_that_calls_of_several_tokens_differ(selecting, name):
    assert Invariant.DECODE_WIDTH in AXIS.method(name).breaks
    with pytest.raises(AssertionError):
        case = selecting(name)
        law_singles(case, distinct(2, 64))


def chain(queries, before, known, least):
    """Token after token."""
    found = []
    for row in range(len(queries)):
        taken, last = [], (before[row], 0) if known[row] else None
        for i, query in enumerate(queries[row]):
            like = -2 if last is None else torch.cosine_similarity(query, last[0], dim=0)
            last = last if like >= least else (query, i + 1)
            taken.append(last[1])
        found.append(taken)
    return found


@pytest.mark.parametrize("least", [-1.0, 0.0, 0.3, 0.6, 2.0])
@pytest.mark.parametrize("tokens", [1, 2, 5, FEW])
def test_searches_are_those_of_token_after_token(tokens, least):
    g = torch.Generator().manual_seed(tokens)
    queries, before = torch.randn(3, tokens, 4, generator=g), torch.randn(3, 4, generator=g)
    queries = queries.cumsum(1)
    known = torch.tensor([True, False, True])
    want = chain(queries, before, known, least)
    assert searches(queries, before, known, least).tolist() == want
    if least > 1:
        assert want == [list(range(1, tokens + 1))] * 3


@pytest.mark.few(2)
@each
@pytest.mark.parametrize("law", LAWS)
def test_law(selecting, law, name):
    case = selecting(name)
    law(case, case.tokens(2, 72 if law is law_rewind_prompts else 64))


@pytest.mark.few(2)
@every
def test_what_is_read_matters(selecting, name):
    """Or the laws above would say nothing."""
    small, whole = selecting(name), selecting()
    tokens = whole.tokens(1, 70)
    with small.session() as a, whole.session() as b:
        first = [s.prompt(tokens[:, : FEW + 8]) for s in (a, b)]
        assert np.array_equal(*first), "a long call reads everything"
        assert (
            np.abs(singles(a, tokens[:, FEW + 8 :]) - singles(b, tokens[:, FEW + 8 :])).max() > 1e-2
        )


@pytest.mark.few(1)
@of_each_class
def test_who_reads_everything_decodes_what_the_model_does(selecting, name):
    case, whole = selecting(name, tokens_read=64), selecting()
    tokens = whole.tokens(1, 62)
    with case.session() as a, whole.session() as b:
        close(a.prompt(tokens[:, :20]), b.prompt(tokens[:, :20]))
        close(singles(a, tokens[:, 20:]), singles(b, tokens[:, 20:]))


def broken(monkeypatch, **changed):
    for name, function in changed.items():
        monkeypatch.setattr(UnitGroups, name, function)


@pytest.mark.few(1)
@each
def test_a_rewind_that_keeps_what_was_grouped_is_caught(selecting, name, monkeypatch):
    case = selecting(name)
    broken(monkeypatch, rewind=lambda self, backend, wanted, lengths: False)
    with pytest.raises(AssertionError):
        law_rewind_prompts(case, case.tokens(2, 72))


@pytest.mark.few(1)
@each
def test_segments_that_are_read_at_once_are_caught(stateful, name):
    """By units, as soon as they are grouped: a call of several tokens cannot do so."""
    case = Selecting(stateful("llama"), built(name))
    for node in case.program.nodes(attention.default, entry=case.program.step):
        asked = ancestors([operands_of(node).pages], set())
        regions = {n.target for n in asked if isinstance(n.target, Conditional)}
        for at in (at for region in regions for at in region.graph.nodes):
            if at.target is torch.ops.aten.sub.Tensor and at.args[1] == FEW - 1:
                at.args = (at.args[0], 0)
    with pytest.raises(AssertionError):
        law_singles(case, case.tokens(2, 64))


@each
def test_rows_grouped_as_one_are_caught(selecting, name, monkeypatch):
    case = selecting(name)
    group = UnitGroups._group

    def together(self, backend, stop, origin):
        group(self, backend, np.full_like(stop, stop.max()), origin)

    broken(monkeypatch, _group=together)
    with pytest.raises(AssertionError):
        law_labels(case, case.tokens(2, 64))


@each
def test_the_entry_groups_what_it_is_told(selecting, name):
    entry = selecting(name).program.entries[GROUP.name]
    assert {"start", "stop", "first", "units", "origin", "ranks", "numbers"} <= set(entry.inputs)
    assert not any(n.endswith(".v") for n in entry.inputs)
