"""Blocks of masks that a model which sees both ways fills: against the model itself, one call a block, bad input."""

from types import SimpleNamespace

import numpy as np
import pytest

import accel
from accel.compiler import draft_build, optimize
from accel.compiler.assemble import assemble
from accel.compiler.build_options import BuildOptions
from accel.compiler.load.source import Folder
from accel.ir.errors import InputError, RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.decode.context import DecodeContext
from accel.runtime.draft.gad import Gad
from accel.runtime.session.session import Session

from ...diffusion_case import LONGEST, MASK, Filler, Slots, prompts
from ...draft_case import rows_of

LIMITS = {0: 6, 1: 3}


@pytest.fixture(scope="module", params=[True, False], ids=["shift", "own"])
def filler(request):
    module = Filler(request.param).eval()
    with accel.optimize(
        module, {"loop": {"use": "dllm-lowconf"}}, target="eager", max_context=LONGEST, max_batch=3, verify=False
    ) as compiled:  # fmt: skip
        yield module, compiled


def opened(compiled, rows, costs=None):
    model = SimpleNamespace(draft_model=compiled, tokenizer=None)
    return Gad().open(SimpleNamespace(vocab_size=MASK + 1), rows, DecodeContext({}, costs, model))


class Drafted:
    """What a row's slots hold, by token."""

    def __init__(self, module):
        self.shift, self.slots, self.text = module.shift, Slots(module), 0

    def block(self, seen, size):
        """The likeliest token of each of `size` masks behind `seen`; slots of an older block are masks again."""
        start = min(self.text, len(seen) - self.shift)
        after = max(len(seen) + size, len(self.slots.kept[0]))
        tokens = [*seen[start:], *[MASK] * (after - len(seen))]
        logits = self.slots.write(tokens, range(start, after))[len(seen) - start - self.shift :]
        logits[:, MASK] = -np.inf
        self.text = len(seen)
        return logits[:size].argmax(1).tolist()


def law(module, compiled, spoil=lambda drafters: None):
    """Three drafts of two rows, of which a different number of tokens stand; the second row misses one."""
    rows, rng = rows_of(prompts(), limit=60), np.random.default_rng(3)
    drafters, slots = opened(compiled, rows), [Drafted(module) for _ in rows]
    found = set()
    for turn, asked in enumerate((LIMITS, {0: 2}, LIMITS)):
        spoil(drafters)
        trees = drafters.draft(asked, None)
        assert trees.keys() == asked.keys()
        for i, limit in asked.items():
            want = slots[i].block(rows[i].seen.tolist(), limit)
            assert trees[i].tokens.tolist() == want and trees[i].branch is None
            assert trees[i].q is None and MASK not in want
            found |= set(want)
        for i, row in enumerate(rows):
            for token in rng.integers(0, MASK, 1 + 2 * i + turn):
                row.accept(int(token), None)
    assert len(found) > 4, "blocks that say nothing"
    drafters.close()


def test_a_block_is_what_the_model_fills(filler):
    law(*filler)


def test_other_blocks_are_caught(filler):
    def beside(drafters):
        drafters._shift = 1 - drafters._shift

    def stale(drafters):  # what stood since is not run
        drafters._text[:] = [row.seen.size for row in drafters._rows]

    for spoil in (beside, stale):
        with pytest.raises((AssertionError, InputError)):
            law(*filler, spoil)


def test_a_block_is_one_call_and_ends_with_the_context(filler, monkeypatch):
    _, compiled = filler
    rows = rows_of([[7] * (LONGEST - 4), [5, 6], [8] * LONGEST], limit=9)
    calls, write = [], Session.write
    monkeypatch.setattr(Session, "write", lambda *given: calls.append(given) or write(*given))
    drafters = opened(compiled, rows)
    trees = drafters.draft({0: 25, 1: 25, 2: 25}, None)
    assert {i: len(tree) for i, tree in trees.items()} == {0: 4, 1: 25} and len(calls) == 1
    assert drafters.kv_bytes > 0 and drafters.draft({2: 5}, None) == {} and len(calls) == 1


def test_recipes():
    gad, tolerant = (assemble(Recipe.load(name)) for name in ("gad", "specdec-nar"))
    assert (gad.grade, tolerant.grade) == ("lossless", "approximate")


class Words:
    def __init__(self, *names):
        self.vocabulary = {name: i for i, name in enumerate(names)}


def test_bad_input(tmp_path):
    with pytest.raises(RecipeError, match="draft = gad relies on CHAINS|sets its own draft shape"):
        assemble(Recipe(tables={"draft": {"use": "gad"}, "tree": {"use": "static"}}))
    with pytest.raises(
        InputError, match="gad: this model was built without a masked-diffusion model"
    ):
        Gad().open(None, [], DecodeContext())
    one, other = Words("a"), Words("b")
    draft = SimpleNamespace(tokenizer=other, facts=SimpleNamespace(diffusion=1))
    model = SimpleNamespace(draft_model=draft, tokenizer=one)
    with pytest.raises(InputError, match="fills masks has another tokenizer"):
        Gad().open(None, [], DecodeContext(model=model))
    for use, masks, why in (
        ("gad", None, "decodes token by token"),
        ("model", 1, "use draft = gad"),
    ):
        plan = assemble(Recipe(tables={"draft": {"use": use}}))
        facts = SimpleNamespace(diffusion=masks, draft_head=None)
        with pytest.raises(RecipeError, match=rf"draft\.{use}: .*{why}"):
            draft_build._check(plan, Folder(tmp_path), None, None, facts)


def test_a_model_of_other_tokens_is_refused_at_build(tmp_path, monkeypatch):
    """It fills masks by its own tokens, which no text takes to the target's."""
    theirs = tmp_path / "tokenizer.json"
    theirs.touch()
    plan = assemble(Recipe(tables={"draft": {"use": "gad"}}))
    masks = SimpleNamespace(mask=1)
    facts = SimpleNamespace(
        diffusion=masks, encoder=None, max_batch=8, vocab_size=9, draft_head=None
    )
    target = SimpleNamespace(max_batch=8, vocab_size=9, num_layers=1)
    monkeypatch.setattr(Folder, "tokenizer", Words("a", "b"))
    draft_build._check(plan, Folder(tmp_path), target, Words("a", "b"), facts)
    with pytest.raises(
        RecipeError, match="another tokenizer .* set `path` to a model of the same tokens:"
    ) as e:
        draft_build._check(plan, Folder(tmp_path), target, Words("b", "a"), facts)
    assert "bundled" not in str(e.value)
    with pytest.raises(RecipeError, match="the bundled one is of the bundled model; set `path` to"):
        draft_build._check(plan, Folder(Gad().draft_folder()), target, Words("b", "a"), facts)


@pytest.mark.parametrize("loop", ["pearl", "specbranch", "lookahead-reasoning"])
def test_a_loop_that_gives_tokens_refuses_a_draft_model_of_others_at_build(
    loop, tmp_path, monkeypatch
):
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    draft = {"use": "model", "path": str(tmp_path)}
    plan = assemble(Recipe(tables={"draft": draft, "loop": {"use": loop}}))
    target = SimpleNamespace(max_batch=8, vocab_size=9, num_layers=1, layers=())
    monkeypatch.setattr(Folder, "tokenizer", Words("a", "b"))
    draft_build.check_draft(plan, target, Words("a", "b"))
    with pytest.raises(RecipeError, match=rf"loop\.{loop}: .* another tokenizer .* set `path`"):
        draft_build.check_draft(plan, target, Words("b", "a"))
    speculative = assemble(Recipe(tables={"draft": draft}))
    draft_build.check_draft(speculative, target, Words("b", "a"))  # by text


def test_a_draft_model_that_cannot_draft_is_refused_before_any_pass(
    stateful, tmp_path, monkeypatch
):
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    monkeypatch.setattr(optimize, "rewrite", lambda *_: pytest.fail("a pass ran"))
    recipe = Recipe(tables={"draft": {"use": "model", "path": str(tmp_path)}})
    with pytest.raises(RecipeError, match="has 9 tokens and the model"):
        optimize.build_captured(stateful("llama"), recipe, BuildOptions(), None, tmp_path / "out")
    assert not (tmp_path / "out").exists()
