"""Every method is held to what it declares: what its recipe does not break is tried on a session and holds, and what
it breaks fails the trial. Recipes that are refused, built all the same, fail the trial of what they were refused for.
"""

import re
from collections.abc import Callable

import numpy as np
import pytest

from accel.compiler import assemble as assembling
from accel.compiler.assemble import EVICTION, assemble
from accel.ir.axis import find_axes
from accel.ir.errors import AccelError, InputError, RecipeError
from accel.ir.invariants import PROVIDED, Invariant
from accel.ir.ops.attention import attention, operands_of
from accel.ir.recipe import Recipe
from accel.ir.tables import Tables
from accel.passes.kv.codec import At
from accel.passes.kv.codec import Base as Codec
from accel.passes.trained import Trained
from accel.runtime.tree import Siblings

from ..prefill_case import _MADE, LAYERS, TOKENS, built, far

AXES = find_axes()
FOLDERS = (
    "depth",
    "head",
    "kv",
    "numerics",
    "prefill",
    "weights",
)  # whose methods change the graph
METHODS = [
    (axis, use)
    for axis in AXES
    for use in AXES[axis].names()
    if axis.partition(".")[0] in FOLDERS
    and not issubclass(AXES[axis].method(use), Trained | Tables)
]  # a trained part or a table fits no random model
PROMPT, CUT = 40, 20  # tokens; where a prompt is cut in two
ROWS = TOKENS[:1]
NEAR = 1e-4  # of the largest logit
ROUNDED = 0.05  # where activations are rounded, which may turn a number to the next step
HALF = 1e-3  # where a number in the last bit may turn a scale in float16 to the next one


def tables(*uses):
    """Small tables of `axis=method`; what evicts gets a score and a budget."""
    found = {a: {"use": u, **AXES[a].small(u)} for a, _, u in (use.partition("=") for use in uses)}
    if found.keys() & set(EVICTION):
        found.setdefault("kv.score", {"use": "knorm"})
        found.setdefault("kv.budget", {"use": "uniform", **AXES["kv.budget"].small("uniform")})
        when = AXES["kv.score"].method(found["kv.score"]["use"]).when
        found.setdefault("kv.when", {"use": when, **AXES["kv.when"].small(when)})
    return found


def prompted(model, count=PROMPT):
    session = model.session(1)
    session.prompt(ROWS[:, :count])
    return session


def ran(session, *widths, start=PROMPT):
    """Logits [1,n,V] of calls of so many tokens each."""
    out = []
    for width in widths:
        out.append(session.run(ROWS[:, start : start + width]))
        start += width
    return np.concatenate(out, axis=1)


def positions(session):
    """Of each place that holds tokens of a row (a layer's, a head's): their positions, in the order of slots."""
    state = session._core.backend._state
    named = {name: state[name].numpy() for name in state if re.search(r"^(kv|kept)\b.*\bpos\b", name)}  # fmt: skip
    if any(name.startswith("pool.") for name in state):  # blocks hold what slots do not
        return [list(range(int(session.lengths[0])))]
    kept = [a.reshape(a.shape[1], -1) for n, a in named.items() if n.startswith("kept")]
    recent = [a.reshape(-1) for n, a in named.items() if n.startswith("kv")]
    rows = [row for a in kept for row in a] or [np.zeros(0, int)]
    new = recent or [np.zeros(0, int)]
    return [[int(p) for p in (*a, *b) if p >= 0] for a in rows for b in new]


def decode_width(model, near=NEAR):
    count = PROMPT - CUT
    with prompted(model, CUT) as session:
        want = ran(session, *[1] * count, start=CUT)
    for width in (2, 3):
        found, start = [], CUT
        with prompted(model, CUT) as session:
            while start < PROMPT:
                wide = min(width, PROMPT - start, int(session.room.min()))
                found.append(ran(session, wide, start=start))
                start += wide
        assert len(found) < count
        assert far(np.concatenate(found, axis=1), want) < near


def rewind(model, near=NEAR):
    with prompted(model) as back, prompted(model) as never:
        ran(back, 1, 1, 4)
        try:
            back.rewind(back.lengths - 5)
        except InputError as error:
            raise AssertionError(error) from error
        ran(never, 1)
        assert far(*(ran(s, 2, start=PROMPT + 6) for s in (back, never))) < near


def call_independent(model, near=NEAR):
    with prompted(model) as whole, prompted(model, CUT) as cut:
        ran(cut, *[1] * (PROMPT - CUT), start=CUT)
        same = (whole.lengths == cut.lengths).all()  # tokens; or others went, and the rest moved
        if same or model.program.facts.kv is not None:
            assert far(ran(whole, 2), ran(cut, 2)) < near


def all_tokens_held(model, near=NEAR):
    with prompted(model) as session:
        assert session.lengths.tolist() == [PROMPT]
        assert all(len(found) == PROMPT for found in positions(session))


def tokens_contiguous(model, near=NEAR):
    with prompted(model) as session:
        assert all(found == list(range(len(found))) for found in positions(session))
        went = session.lengths[0] < PROMPT  # those between, and the rest moved
        assert not (went and model.program.facts.kv is not None)


def uniform_slots(model, near=NEAR):
    """There is one table of the slots' positions, not one more for some layers."""
    with prompted(model) as session:
        assert {n for n in session._core.backend._state if n.startswith("kv.pos")} <= {"kv.pos"}


def fixed_layers(model, near=NEAR):
    assert len(model.facts.layers) == LAYERS


def heads_alike(model, near=NEAR):
    with prompted(model) as session:
        state = session._core.backend._state
        assert holds(heads_level, model)
        for name, value in state.items():
            if re.search(r"^kept\b.*\bpos$", name):
                assert (value == value[:, :1]).all()


def heads_level(model, near=NEAR):
    with prompted(model) as session:
        assert not any(name.endswith(".counts") for name in session._core.backend._state)


def layers_by_call(model, near=NEAR):
    with prompted(model) as session:
        try:
            session.run(ROWS[:, :1], run_layers=np.arange(LAYERS) != 1)
        except InputError as error:
            raise AssertionError(error) from error


def branches_by_call(model, near=NEAR):
    with prompted(model) as session:
        try:
            session.run(ROWS[:, :1], run_mlp=np.arange(LAYERS) != 1)
        except InputError as error:
            raise AssertionError(error) from error


def all_layers_run(model, near=NEAR):
    assert not holds(layers_by_call, model, near)


def plain_keys(model, near=NEAR):
    with prompted(model) as session:
        state = session._core.backend._state
        keys = [x for name, x in state.items() if re.search(r"\bk\b", name)]
        assert all(x.is_floating_point() for x in keys)
        assert not any(name.startswith(("pages.", "units.")) for name in state), (
            "something was made of them"
        )


def full_attention(model, near=NEAR):
    """Where a value of the first layer (that reads pages, if some do) is another, a token's logits are: each is read.
    Of the second token behind a prompt, since some methods let the first read everything. Prompts alike.
    """
    assert "sparse" not in model.program.entries
    nodes = model.program.nodes(attention.default, entry=model.program.step)
    paged = (n.meta["layer"] for n in nodes if operands_of(n).pages is not None)
    name = f"kv.{next(paged, 0)}.v"
    with prompted(model) as session:
        ran(session, 1)
        value = session._core.backend._state.get(name)
        if value is None or not value.is_floating_point() or not value.numel():
            return
        there = session._core.backend._state["kv.pos"][0] >= 0
        want = ran(session.fork(), 1, start=PROMPT + 1)
        for slot in there.nonzero()[:, 0].tolist():
            with session.fork() as other:
                state = other._core.backend._state
                state[name] = state[name].clone()
                state[name][:, :, slot] += 5
                assert far(ran(other, 1, start=PROMPT + 1), want) > 1e-6, f"slot {slot} is not read"


def row_private(model, near=NEAR):
    """Of two sessions with one prompt, each runs all of it."""
    ran = []
    for _ in range(2):
        with model.session(1) as session:
            session.prompt(TOKENS[1:2, :PROMPT])
            ran.append(session.stats["tokens"])
    assert ran[0] == ran[1]


TRIALS: dict[Invariant, Callable] = {
    Invariant.DECODE_WIDTH: decode_width,
    Invariant.REWIND: rewind,
    Invariant.CALL_INDEPENDENT: call_independent,
    Invariant.ALL_TOKENS_HELD: all_tokens_held,
    Invariant.TOKENS_CONTIGUOUS: tokens_contiguous,
    Invariant.UNIFORM_SLOTS: uniform_slots,
    Invariant.FIXED_LAYERS: fixed_layers,
    Invariant.HEADS_ALIKE: heads_alike,
    Invariant.HEADS_LEVEL: heads_level,
    Invariant.ALL_LAYERS_RUN: all_layers_run,
    Invariant.LAYERS_BY_CALL: layers_by_call,
    Invariant.BRANCHES_BY_CALL: branches_by_call,
    Invariant.PLAIN_KEYS: plain_keys,
    Invariant.FULL_ATTENTION: full_attention,
    Invariant.ROW_PRIVATE: row_private,
}


BY_CHANCE = {Invariant.HEADS_ALIKE}  # heads of a small model may choose the same tokens


def holds(trial, model, near=NEAR):
    try:
        trial(model, near)
    except AssertionError:
        return False
    return True


def scaled_in_half(methods):
    """Whether single tokens are stored with scales in float16."""
    return any(
        dtype == "float16"
        for method in methods
        if isinstance(method, Codec) and not method.storage.block
        for dtype, _ in method.parts(At("k", 8)).values()
    )


def test_heads_that_hold_other_tokens_are_seen():
    assert not holds(heads_alike, built("llama", tables=tables("kv.score=knorm")))


@pytest.mark.few(1)
@pytest.mark.parametrize(("axis", "use"), METHODS)
def test_what_is_broken_fails_and_all_else_holds(axis, use):
    asked = tables(f"{axis}={use}")
    methods = assemble(Recipe(tables=asked)).methods.values()
    gone = {what for method in methods for what in method.breaks}
    there = {what for method in methods for what in method.provides}
    model = built("llama", tables=asked)
    near = ROUNDED if axis == "weights" else HALF if scaled_in_half(methods) else NEAR
    found = {what: holds(trial, model, near) for what, trial in TRIALS.items()}
    want = {what: what in there if what in PROVIDED else what not in gone for what in TRIALS}
    wrong = [
        f"{what.name}: {'holds' if ok else 'fails'}"
        for what, ok in found.items()
        if want[what] != ok and not (ok and what in BY_CHANCE)
    ]
    assert not wrong, wrong


FORCED = {  # recipes that are refused for an invariant, one of each pair of axes that differs in kind
    ("kv.codec=kivi", "prefill.prune=promptdistill"): Invariant.UNIFORM_SLOTS,
    ("kv.reuse=paged-prefix", "prefill.prune=promptdistill"): Invariant.UNIFORM_SLOTS,
    ("kv.score=knorm", "depth=shortgpt"): Invariant.FIXED_LAYERS,
    ("kv.codec=squat", "depth=shortgpt"): Invariant.FIXED_LAYERS,
    ("kv.score=snapkv", "depth=by-call"): Invariant.ALL_LAYERS_RUN,
    ("kv.score=h2o", "depth=unified-skip"): Invariant.ALL_LAYERS_RUN,
    ("kv.reuse=paged-prefix", "depth=by-call"): Invariant.ALL_LAYERS_RUN,
    ("kv.reuse=pie", "depth=calm"): Invariant.ALL_LAYERS_RUN,
    ("kv.reuse=pie", "kv.score=knorm"): Invariant.TOKENS_CONTIGUOUS,
    ("kv.reuse=pie", "prefill.prune=gemfilter"): Invariant.ALL_TOKENS_HELD,
    ("kv.codec=kivi", "kv.reuse=paged-prefix"): Invariant.ROW_PRIVATE,
    ("kv.select=quest", "kv.reuse=paged-prefix"): Invariant.ROW_PRIVATE,
    ("kv.reuse=pie", "kv.codec=kv-int8"): Invariant.PLAIN_KEYS,
    ("kv.reuse=pie", "kv.select=quest"): Invariant.PLAIN_KEYS,
    ("kv.score=h2o", "kv.select=quest"): Invariant.FULL_ATTENTION,
    ("kv.score=h2o", "prefill.sparse=critiprefill"): Invariant.FULL_ATTENTION,
    ("kv.reuse=pie", "prefill.sparse=critiprefill"): Invariant.CALL_INDEPENDENT,
}


@pytest.mark.few(3)
@pytest.mark.parametrize("uses", FORCED, ids="+".join)
def test_what_is_refused_is_refused_for_a_reason_that_is_true(uses, monkeypatch):
    """Built all the same, it cannot be built or run, or what one side relies on does not hold."""
    what, asked = FORCED[uses], tables(*uses)
    if what is Invariant.FULL_ATTENTION:
        asked["kv.budget"]["tokens_kept"] = (
            2 * PROMPT
        )  # tokens that were dropped are not read either
    with pytest.raises(RecipeError, match=what.name):
        assemble(Recipe(tables=asked))
    monkeypatch.setattr(assembling, "conflicts", lambda methods: [])
    try:
        assert not holds(TRIALS[what], built("llama", tables=asked))
    except (AccelError, RuntimeError, ValueError, LookupError, TypeError) as error:
        assert str(error)  # it cannot even be built, or run
    finally:
        _MADE.pop(("llama", "eager", str(asked)), None)


@pytest.mark.parametrize(
    ("axis", "use"), [(a, u) for a in ("loop", "tree") for u in AXES[a].names()]
)
def test_loops_and_trees_declare_what_they_do(axis, use):
    method = AXES[axis].build(use)
    branches = getattr(method, "trees", False) or getattr(method, "branches", False)
    assert (Invariant.CHAINS in method.breaks) == branches
    if axis == "tree":
        apart = branches and method.siblings is Siblings.APART
        assert (Invariant.EXCHANGEABLE_SIBLINGS in method.breaks) == apart
    assert (Invariant.APPEND_ONLY in method.breaks) == getattr(method, "masked_diffusion", False)
