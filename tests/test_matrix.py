"""Methods of different axes together: refused with a reason, or equal to the eager oracle. All of them are
run by tools/matrix/matrix.py; here is a sample.
"""

import random

import matrix
import matrix_greedy
import matrix_loops
import matrix_page
import pytest
from packs import Packs

from accel.runtime.backends.onnx import session as ort
from accel.runtime.loop import speculative
from accel.runtime.tree import Tree
from accel.runtime.verify import Verdict, spec_chain


@pytest.fixture(scope="module")
def runner():
    return matrix.Matrix()


@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", matrix.ARCHITECTURES)
def test_recipes_are_refused_or_right(runner, architecture):
    """Of up to nine methods: each pair of them is compared at once."""
    every = {case.tables for case in matrix.cases((2,))}
    pairs = [matrix.Case(architecture, tables) for tables in sorted(every)]
    packs, refused = Packs(matrix.Case, runner.assembles, runner.strict), 0
    packs.add(random.Random(architecture).sample(pairs, len(pairs)))
    while chosen := packs.next():
        seed, pack = chosen
        outcome = runner.run(pack)
        if outcome.kind == "refused":
            refused += 1
            assert outcome.why and refused < 200
        else:
            assert outcome.kind == "equal", f"{outcome.case}: {outcome.why}"
            if len(pack.tables) > 3:  # some pairs fit with little else
                break
        packs.settle(seed, outcome.kind)
    assert len(pack.tables) > 3


@pytest.mark.long
def test_what_slots_draw_with_noise_has_every_variant(runner):
    """Of numbers of a table, too."""
    case = matrix.Case("llama", (("kv.codec", "kv-fp8"), ("kv.score", "keyformer")))
    assert runner.run(case).why == ""


@pytest.mark.long
def test_what_a_fold_compares_may_be_bools(runner):
    """A codec of bytes compares numbers."""
    case = matrix.Case("llama", (("kv.codec", "kv-fp8"), ("weights", "int4-awq")))
    assert runner.run(case).why == ""


@pytest.mark.long
def test_blocks_may_be_none_yet(runner):
    """ONNX infers no size where another one is 0."""
    case = matrix.Case("llama", (("kv.codec", "rotatekv"), ("kv.score", "streaming-llm")))
    assert runner.run(case).why == ""


def test_a_wrong_cache_is_caught(runner, monkeypatch):
    case = matrix.Case("llama", (("kv.score", "knorm"), ("kv.when", "prompt")))
    assert runner.run(case).kind == "equal"
    right = ort.trimmed
    monkeypatch.setattr(
        ort,
        "trimmed",
        lambda state, found: {n: a[:, :, 1:] for n, a in right(state, found).items()},
    )
    assert runner.run(case).kind == "wrong"


def test_the_page_says_what_was_found(tmp_path):
    quest, bits, snap = (
        ("kv.select", "quest"),
        ("numerics", "batch-invariant"),
        ("kv.score", "snapkv"),
    )
    why = (
        "recipe 'x': numerics = batch-invariant cannot be combined with kv.select = quest: pages turn; "
        "leave one of the two out"
    )
    found = [
        matrix.Outcome(matrix.Case("llama", (quest, bits)), "refused", why),
        matrix.Outcome(matrix.Case("gpt2", (quest, bits)), "equal"),
        matrix.Outcome(matrix.Case("llama", (snap, quest)), "equal", within="llama: more"),
        matrix.Outcome(matrix.Case("llama", (snap, quest, bits)), "wrong", "logits differ"),
    ]
    matrix_page.write(
        tmp_path, found, [*(o.case for o in found), matrix.Case("gpt2", (snap, bits))]
    )
    page = (tmp_path / "composition.md").read_text(encoding="utf-8")
    assert "4 of 5" in page
    assert (
        "| 2 methods | 3 | 2 | 1 | 1 | 0 |" in page and "| 3 methods | 1 | 0 | 0 | 0 | 1 |" in page
    )
    assert "| `quest` | `batch-invariant` (llama) | pages turn |" in page
    assert "of the 1 with a pair that is refused, 0 are refused" in page
    assert (tmp_path / "composition" / "pairs.png").stat().st_size > 1000


LOOPS = matrix.stratified(matrix_loops.cases(), 6, seed=2)


@pytest.fixture(scope="module")
def loops():
    return matrix_loops.Loops()


@pytest.mark.few(1)
@pytest.mark.parametrize("part", range(2))
def test_loops_are_refused_or_right(loops, part):
    found = [loops.run(case) for case in LOOPS[3 * part : 3 * part + 3]]
    wrong = [f"{o.case}: {o.why}" for o in found if o.kind == "wrong"]
    assert not wrong, "\n".join(wrong)
    assert all(o.why for o in found if o.kind == "refused")


def test_a_wrong_token_of_a_draft_is_caught(loops, monkeypatch):
    case = matrix.Case("llama", (("draft", "prompt-lookup"), ("kv.codec", "kv-int8")))
    assert loops.run(case).kind == "equal"
    monkeypatch.setattr(
        speculative._Rounds, "_drafted", lambda self, limit: {i: Tree.chain([5]) for i in self.live}
    )
    monkeypatch.setattr(spec_chain.SpecChain, "__call__", lambda *_: Verdict((0,), 7))
    assert loops.run(case).kind == "wrong"


def test_every_way_to_guess_is_tried_as_it_is_named():
    """A shape brings a drafter that reaches it, but where the way names one."""
    greedy, named = matrix_greedy.Greedy(), 0
    for way in matrix_greedy.ways():
        tables = greedy._recipe(matrix.Case("bundled", way)).tables
        assert {axis: tables[axis]["use"] for axis, _ in way} == dict(way)
        named += len(way) > 1
    assert named > 20, "drafters with shapes"
