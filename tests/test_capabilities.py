"""What methods declare decides which recipes are built, and a refusal names both sides, the sentence and a way out."""

import re

import pytest

from accel.compiler.assemble import assemble, check_target
from accel.compiler.capabilities import Conflict, conflict_text, conflicts, providers, table
from accel.ir.axis import find_axes
from accel.ir.errors import RecipeError
from accel.ir.invariants import PROVIDED, Invariant, Method
from accel.ir.recipe import Recipe

AXES = find_axes()
EVERY = [(axis, use) for axis in AXES for use in AXES[axis].names()]
REFUSED = {  # a recipe of each invariant that one side relies on: who relies, who breaks it, what works
    Invariant.UNIFORM_SLOTS: ("kv.codec=kivi", "prefill.prune=promptdistill", "gemfilter for"),
    Invariant.HEADS_ALIKE: ("kv.codec=mha2gqa-svd", "kv.score=knorm", "streaming-llm for knorm"),
    Invariant.HEADS_LEVEL: ("kv.codec=kivi", "kv.budget=ada-kv", "without"),
    Invariant.FIXED_LAYERS: ("kv.score=knorm", "depth=shortgpt", " for shortgpt"),
    Invariant.ALL_LAYERS_RUN: ("kv.reuse=paged-prefix", "depth=calm", " for calm"),
    Invariant.TOKENS_CONTIGUOUS: ("kv.reuse=pie", "kv.score=knorm", "without"),
    Invariant.ALL_TOKENS_HELD: ("kv.reuse=pie", "prefill.prune=gemfilter", "yoco for gemfilter"),
    Invariant.ROW_PRIVATE: ("kv.codec=kivi", "kv.reuse=paged-prefix", "kv-int8 for kivi"),
    Invariant.PLAIN_KEYS: ("kv.reuse=pie", "kv.codec=kv-int8", "paged-prefix for pie"),
    Invariant.FULL_ATTENTION: ("kv.score=h2o", "kv.select=quest", " for h2o"),
    Invariant.APPEND_ONLY: ("depth=calm", "loop=dllm-threshold", "for dllm-threshold"),
    Invariant.CHAINS: ("kv.select=quest", "loop=lookahead", "for lookahead"),
    Invariant.EXCHANGEABLE_SIBLINGS: ("verify=spectr-kseq", "tree=static", "", "draft=model"),
    Invariant.CALL_INDEPENDENT: ("kv.reuse=pie", "prefill.sparse=critiprefill", "without"),
    Invariant.DECODE_WIDTH: ("loop=lookahead", "depth=calm", " for calm"),
    Invariant.BATCH_INVARIANCE: ("numerics=batch-invariant", "kv.select=quest", "without"),
    Invariant.REWIND: ("loop=lookahead", "kv.score=h2o", " for h2o"),
    Invariant.PROBABILITIES: ("tree=dyspec", "draft=token-recycling", "static for dyspec"),
    Invariant.DRAFT_MODEL: ("length=specdec-pp", "draft=iad", "cost-optimal for specdec-pp"),
    Invariant.LAYERS_BY_CALL: ("draft=layerskip", "depth=shortgpt", "for layerskip"),
    Invariant.BRANCHES_BY_CALL: ("draft=draft-verify", "depth=by-call", "by-branch for by-call"),
    Invariant.COARSE_READS: ("draft=quantspec", "kv.codec=kv-int8", "for quantspec"),
    Invariant.EVERY_TOKEN_RUNS: (
        "loop=contrastive",
        "kv.reuse=paged-prefix",
        "for contrastive",
    ),
    Invariant.FED_BY_BLOCK: ("loop=freedave", "canvas=dkv-cache", "dllm-lowconf for freedave"),
    Invariant.TEXT_PROMPT: ("loop=self-infill", "prompt=pause", "for self-infill"),
    Invariant.LATER_READS: ("loop=retro-attention", "kv.select=quest", "for retro-attention"),
}


def recipe(*uses):
    return Recipe(
        "mine", tables={a: {"use": u} for a, _, u in (use.partition("=") for use in uses)}
    )


def declares(relies=(), breaks=(), provides=()):
    class Declared(Method):
        pass

    Declared.relies, Declared.breaks, Declared.provides = map(frozenset, (relies, breaks, provides))
    return Declared()


def test_a_recipe_is_refused_exactly_where_one_relies_on_what_another_breaks():
    width, odds = Invariant.DECODE_WIDTH, Invariant.PROBABILITIES
    wide, narrow, asks = declares([width]), declares(breaks=[width]), declares([odds])
    gives = declares(provides=[odds])
    assert not conflicts({"a": wide, "b": gives}) and not conflicts({"b": narrow})
    assert not conflicts({"a": asks, "b": gives})
    assert not conflicts({"a": declares([width], [width])}), "no method is against itself"
    assert conflicts({"a": wide, "b": narrow, "c": narrow}) == [
        Conflict("a", width, "b"),
        Conflict("a", width, "c"),
    ]
    assert conflicts({"a": asks, "b": narrow}) == [Conflict("a", odds, "")]
    assert conflicts({"a": asks, "draft": narrow}) == [Conflict("a", odds, "draft")]
    assert "relies on PROBABILITIES, which no method" in conflict_text(
        Conflict("a", odds, ""), {"a": "x"}
    )


@pytest.mark.parametrize("what", REFUSED, ids=lambda what: what.name)
def test_a_refusal_names_both_sides_the_sentence_and_a_way_out(what):
    one, other, works, *more = REFUSED[what]
    with pytest.raises(RecipeError) as caught:
        assemble(recipe(one, other, *more))
    said = str(caught.value)
    a, b = (side.replace("=", " = ") for side in (one, other))
    assert said.startswith(f"recipe 'mine': {a} cannot be combined with {b}: ")
    assert f"relies on {what.name}, which the second" in said and what.value in said
    near = re.search(r"leave one of the two out \(the nearest recipe that works: (.*)\)$", said)
    assert near is not None and works in near[1], said


def test_every_invariant_has_a_refusal():
    assert REFUSED.keys() | {Invariant.HOST_MEMORY} == set(Invariant)  # of a target: see below


def test_a_target_is_a_side_too():
    plan = assemble(recipe("kv.reuse=pie"))
    check_target(plan, "onnx")
    with pytest.raises(
        RecipeError, match="kv.reuse = pie cannot be combined with target = triton: .*HOST_M"
    ):
        check_target(plan, "triton")


@pytest.mark.parametrize("axis, use", EVERY)
def test_declarations_mean_something(axis, use):
    """Each is of the vocabulary, and none is against itself; what is to be provided is not broken."""
    method = AXES[axis].build(use)
    assert isinstance(method, Method)
    for found in (method.relies, method.breaks, method.provides):
        assert isinstance(found, frozenset) and all(isinstance(one, Invariant) for one in found)
    assert method.provides <= PROVIDED and not method.breaks & PROVIDED
    assert not method.relies & method.breaks
    if axis == "draft":
        made = method.draft_folder() is not None or method.draft_recipe() is not None
        # whose model no one else can draft with: it fills masks, or reads features
        made = made and not method.fills and not method.head
        assert (Invariant.DRAFT_MODEL in method.provides) == made


def test_what_is_to_be_provided_is():
    assert all(providers(one) for one in PROVIDED)


def test_the_table_says_what_is_declared():
    rows = dict(zip(Invariant, table().splitlines()[2:], strict=True))
    for what, row in rows.items():
        assert row.startswith(f"| `{what.name}` | {what.value} |")
    relied, broken = rows[Invariant.REWIND].split(" | ")[2:]
    loops = AXES["loop"].names()
    relying = [n for n in loops if Invariant.REWIND in AXES["loop"].build(n).relies]
    assert relied == ", ".join(f"`{n}`" for n in relying) and {"pearl", "speculative"} < {*relying}
    assert {"`h2o`", "`every`"} <= {*broken.rstrip(" |").split(", ")}
    assert "all of kv.score" in rows[Invariant.TOKENS_CONTIGUOUS]
    assert "target `triton`" in rows[Invariant.HOST_MEMORY]
    assert "holds only with `magicdec`, `model`" in rows[Invariant.DRAFT_MODEL]
