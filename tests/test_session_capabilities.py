"""What a session says that it can do is what it does, whatever a recipe makes of its state."""

from dataclasses import replace

import numpy as np
import pytest

from accel.compiler.assemble import assemble
from accel.ir.errors import InputError, RecipeError
from accel.ir.recipe import Recipe
from accel.ir.tables import Tables
from accel.passes.trained import Trained
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.loop.speculative import reach
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.rows import by_row
from accel.runtime.session import core
from accel.runtime.session.observers.observer import Capabilities
from accel.runtime.session.state.block_codec import BlockCodecState
from accel.runtime.session.state.eviction import EvictionState

from .kv_case import EVICTING, evicting, recipe, table
from .prefill_case import built, far
from .runtime.test_rows import hidden

PROMPT, AFTER, BLOCK = 24, 36, 8
CALLS = [9, 3, 1, 1, 1, 1, 4]  # tokens of the calls that are taken back
TOKENS, OTHERS = np.random.default_rng(3).integers(3, 50, (2, 1, PROMPT + AFTER))


def evicts(score, when, **axes):
    tables = {
        "kv.score": table(score),
        "kv.budget": table("uniform", tokens_kept=8),
        "kv.when": when,
    }
    return tables | {f"kv.{axis}": {"use": name} for axis, name in axes.items()}


def can(**more):
    """Of a model that was built without trees."""
    return Capabilities(trees=False, **more)


AT_PROMPT, EVERY = {"use": "prompt"}, {"use": "every", "tokens": 5}
ANY, NONE = can(), can(back=0)
CASES = {  # recipe, or architecture -> tables, and what is expected
    "base": ({}, ANY),
    "snapkv": (evicts("snapkv", AT_PROMPT), ANY),
    "snapkv-chunk": (evicts("snapkv", {"use": "chunk"}), ANY),
    "snapkv-every": (evicts("snapkv", EVERY), can(back=0, width=1, joins=False)),
    "kivi-4": (
        {"kv.codec": {"use": "kivi", "bits": 4, "group": 4, "residual": BLOCK}},
        can(back=BLOCK),
    ),
    "kv-int8": ({"kv.codec": {"use": "kv-int8"}}, ANY),
    "quest": (
        {"kv.select": {"use": "quest", "tokens_read": 12, "page": 4, "dense_layers": 0}},
        can(width=32),
    ),
    # which leave nothing in the state
    "tidaldecode": (
        {"kv.select": {"use": "tidaldecode", "tokens_read": 7, "dense_layers": 0}},
        can(width=32),
    ),
    "tokenselect": (
        {
            "kv.select": {
                "use": "tokenselect",
                "tokens_read": 6,
                "sinks": 2,
                "window": 4,
                "dense_layers": 0,
                "reuse": 2.0,
            }
        },
        can(width=32),
    ),
    "h2o": (evicts("h2o", EVERY), can(back=0, width=1, joins=False)),
    "mikv": (evicts("h2o", AT_PROMPT, keep="mikv"), NONE),
    "calm": (
        {"depth": {"use": "calm", "threshold": 1e-6, "first": 1, "every": 1}},
        can(width=1, joins=False),
    ),
    "unified-skip": ({"depth": {"use": "unified-skip", "speedup": 1.5}}, can(width=1, joins=False)),
    "paged-prefix": ({"kv.reuse": {"use": "paged-prefix", "block": 4, "blocks": 64}}, ANY),
    "pie": ({"kv.reuse": {"use": "pie"}}, ANY),
    "cacheblend": ({"kv.reuse": {"use": "cacheblend"}}, ANY),
    "gemfilter": ({"prefill.prune": {"use": "gemfilter", "tokens": 12}}, ANY),
    "promptdistill": ({"prefill.prune": {"use": "promptdistill", "tokens": 12}}, ANY),
    "critiprefill": (
        {
            "prefill.sparse": {
                "use": "critiprefill",
                "segment": 8,
                "block": 4,
                "budget": 8,
                "threshold": 8,
            }
        },
        ANY,
    ),
    "cp-ring": ({"prefill.ranks": {"use": "cp-ring", "least": 8}}, ANY),
    "mamba": ({}, can(free_rewind=False, free_drafts=False)),
    "falcon_h1": (evicts("snapkv", AT_PROMPT), can(free_rewind=False, free_drafts=False)),
}


@pytest.fixture(scope="module")
def prompted(stateful):
    """prompted(name) -> a session of a recipe that holds a prompt; made once, to be forked."""
    made = {}

    def get(name):
        if name not in made:
            tables, _ = CASES[name]
            if name == "mamba":
                program = stateful(name)
                model = CompiledModel(EagerBackend(program), program.facts)
            elif name == "falcon_h1":
                model = evicting(stateful(name), tables)
            else:
                model = built("llama", tables=tables)
            get.models[name], made[name] = model, model.session()
            made[name].prompt(TOKENS[:, :PROMPT])
        return made[name]

    get.models = {}
    return get


def ran(session, widths, tokens=TOKENS):
    """Logits of the tokens after the prompt in calls of these widths; where sessions allow any, cut to their room."""
    out, start, any_width = [], PROMPT, session.capabilities.width is None
    for width in widths:
        end = start + width
        while start < end:
            wide = min(end - start, int(session.room[0])) if any_width else width
            out.append(session.run(tokens[:, start : start + wide]))
            start += wide
    return np.concatenate(out, axis=1)


def law_of_width(session, claim):
    """Calls of up to `width` tokens give the rows of single ones, and calls of one more do not."""
    with session.fork() as single:
        rows = ran(single, [1] * AFTER)

    def same(width):
        """Whether calls of so many tokens do, wherever they begin."""
        for ahead in (0, 1):
            count = (AFTER - ahead) // width
            with session.fork() as wide:
                got = ran(wide, [1] * ahead + [width] * count)
            if far(got, rows[:, : ahead + width * count]) > 1e-4:
                return False
        return True

    widest = AFTER - 1 if claim.width is None else claim.width
    for width in sorted({2, 7, widest}):
        assert width > widest or same(width), f"calls of {width} tokens differ from single ones"
    assert claim.width is None or not same(claim.width + 1), "wider calls are single ones too"


def law_of_back(session, claim):
    """The newest tokens since the prompt can be taken back, so many, and leave no trace; others are refused."""

    def refused(count):
        """Whether so many cannot be taken back somewhere on the way, in calls of several tokens and of one."""
        last, start = PROMPT + sum(CALLS), PROMPT
        mixed = np.where(np.arange(PROMPT + AFTER) < last - count, TOKENS, OTHERS)
        with session.fork() as live, session.fork() as other:
            for width in CALLS:
                live.run(TOKENS[:, start : start + width])
                other.run(mixed[:, start : start + width])
                start += width
                if start - PROMPT >= count:
                    with live.fork() as back:
                        try:
                            back.rewind(back.lengths - count)
                        except InputError as error:
                            assert "cannot rewind row" in str(error)
                            return True
            for each in (live, other):
                each.rewind(each.lengths - count)
            assert far(*(each.run(TOKENS[:, -5:]) for each in (live, other))) < 1e-5, (
                "they left a trace"
            )
        return False

    most = sum(CALLS) if claim.back is None else claim.back
    for count in sorted({1, BLOCK, most}):
        assert count > most or not refused(count), f"{count} tokens cannot be taken back"
    assert claim.back is None or refused(claim.back + 1), "more can be taken back"


def law_of_free_rewind(session, claim):
    """The call after a rewind runs its own tokens and no others; or it does run others."""
    with session.fork() as live:
        ran(live, [6, 1, 1, 1])
        try:
            live.rewind(live.lengths - 2)
        except InputError:
            assert claim.back is not None, "no two tokens can be taken back"
            return
        before = live.stats["tokens"]
        live.run(TOKENS[:, -1:])
        assert (live.stats["tokens"] - before == live.batch) == claim.free_rewind


def law_of_chunks(session, claim):
    """A prompt in several calls gives the row that it gives in one."""
    found = []
    for sizes in ((), (7, 9), (20, 1, 1)) if claim.chunks else ():
        with session.fork() as live:
            live.rewind(0)
            for size in sizes:
                start = int(live.lengths[0])
                live.run(TOKENS[:, start : start + size], last_only=True)
            rest = live.prompt(TOKENS[:, int(live.lengths[0]) : PROMPT])
            found.append(np.concatenate([rest, ran(live, [1, 3])], axis=1))
    for got in found[1:]:
        assert far(got, found[0]) < 1e-4, "prompts cannot run in chunks"


LAWS = [law_of_width, law_of_back, law_of_free_rewind, law_of_chunks]
CHUNKS = {"base", "snapkv", "kv-int8", "paged-prefix", "pie", "cp-ring", "mamba", "falcon_h1"}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_a_session_does_what_it_says(prompted, name):
    session = prompted(name)
    assert session.capabilities == replace(CASES[name][1], chunks=name in CHUNKS)
    for law in LAWS:
        law(session, session.capabilities)


def opened_for(model, rows):
    """The observers of an empty session of so many rows, more than a compiled model takes at once."""
    if isinstance(model, CompiledModel):
        return [factory.open(rows) for factory in model._sessions.observers]
    return model.session(rows)._core.observers


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_what_a_session_knows_of_its_rows_is_declared(prompted, name):
    session = prompted(name).fork()
    opened = opened_for(prompted.models[name], 7)
    session.select([0] * 7)  # nothing else has this size
    session.run(np.repeat(TOKENS[:, PROMPT : PROMPT + 1], 7, 0))
    observers = [*opened, *session._core.observers]
    assert not [(type(one), hidden(one, 7)) for one in observers if hidden(one, 7)]


def test_rows_that_are_not_declared_are_caught(prompted, monkeypatch):
    """Negative control."""
    prompted("snapkv")
    monkeypatch.delitem(by_row(EvictionState), "_last")
    (factory,) = (f for f in prompted.models["snapkv"]._sessions.observers if f is not None)
    assert hidden(factory.open(7), 7) == ["_last"]


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_may_draft_where_its_sessions_can_take_drafts_back(name):
    """What the loop says before anything is built is what it says of a session."""
    tables, claim = CASES[name]

    def refused(act, error):
        try:
            act()
        except error:
            return True
        return False

    built = refused(
        lambda: assemble(Recipe(tables={**tables, "draft": {"use": "iad"}})), RecipeError
    )
    assert built == refused(lambda: reach(claim), InputError)


EVICTS = [  # each method that evicts and brings no file, of a recipe that does so when a prompt is whole
    (axis.name.removeprefix("kv."), name)
    for axis in EVICTING
    for name in axis.names()
    if axis.name != "kv.when" and not issubclass(axis.method(name), (Trained, Tables))
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("axis", "name"), EVICTS)
def test_prompts_that_end_in_eviction_run_in_chunks(axis, name):
    """Where nothing but keys, values and the last queries is scored; what is added up by call is not."""
    made = recipe(kept=8) | {f"kv.{axis}": table(name, axis)}
    session = built("llama", tables=made).session()
    session.prompt(TOKENS[:, :PROMPT])
    law_of_chunks(session, session.capabilities)
    plan = session.observer(EvictionState).plan
    assert session.capabilities.chunks == (not plan.counts and not plan.notes)


@pytest.mark.long
def test_what_single_tokens_add_up_is_caught():
    """`cam` counts the attention of generated tokens, and takes a call of one token for such."""
    session = built("llama", tables=recipe(kept=8, keep="cam")).session()
    session.prompt(TOKENS[:, :PROMPT])
    assert not session.capabilities.chunks
    with pytest.raises(AssertionError, match="cannot run in chunks"):
        law_of_chunks(session, replace(session.capabilities, chunks=True))


LIES = [
    ("base", law_of_width, {"width": 32}),
    ("quest", law_of_width, {"width": None}),
    ("quest", law_of_width, {"width": 31}),
    ("snapkv-every", law_of_width, {"width": 2}),
    ("unified-skip", law_of_width, {"width": None}),
    ("base", law_of_back, {"back": 7}),
    ("mikv", law_of_back, {"back": 1}),
    ("snapkv-every", law_of_back, {"back": None}),
    ("kivi-4", law_of_back, {"back": BLOCK + 1}),
    ("kivi-4", law_of_back, {"back": BLOCK - 1}),
    ("base", law_of_free_rewind, {"free_rewind": False}),
    ("mamba", law_of_free_rewind, {"free_rewind": True}),
]


@pytest.mark.few(3)
@pytest.mark.parametrize("name, law, lie", LIES)
def test_a_session_that_says_otherwise_is_caught(prompted, name, law, lie):
    with pytest.raises(AssertionError):
        law(prompted(name), replace(CASES[name][1], **lie))


def test_a_session_that_says_more_room_than_it_has_is_caught(prompted, monkeypatch):
    session = prompted("kivi-4")
    assert 1 <= session.room[0] < 2 * BLOCK
    monkeypatch.setattr(
        BlockCodecState, "call_room", lambda self, lengths: np.full(len(lengths), 99)
    )
    with pytest.raises(AssertionError, match="differ from single ones"):
        law_of_width(session, session.capabilities)


def test_a_rewind_that_leaves_a_trace_is_caught(prompted, monkeypatch):
    monkeypatch.setattr(type(prompted("base")), "rewind", lambda self, length: None)
    with pytest.raises(AssertionError, match="left a trace"):
        law_of_back(prompted("base"), ANY)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["kivi-4", "gemfilter", "promptdistill", "snapkv-every"])
def test_prompts_that_cannot_run_in_chunks_are_caught(prompted, name):
    session = prompted(name)
    with pytest.raises(AssertionError, match="cannot run in chunks"):
        law_of_chunks(session, replace(session.capabilities, chunks=True))


@pytest.mark.parametrize("target", ["eager", "onnx"])
@pytest.mark.few(1)
def test_a_short_call_after_a_rewind_keeps_the_slots_that_a_compression_left(monkeypatch, target):
    """More than the call needs: rows of two blocks, then of three tokens."""
    monkeypatch.setattr(core, "STEP", 4)
    model = built("llama", target, tables=CASES["kivi-4"][0])
    with model.session() as session, model.session() as new:
        session.prompt(TOKENS[:, : 3 * BLOCK - 1])
        session.rewind(0)
        for part in (slice(0, 3), slice(3, 4)):
            assert far(session.run(OTHERS[:, part]), new.run(OTHERS[:, part])) < 1e-5
