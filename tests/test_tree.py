"""Attention under a tree: every path of guesses has the logits that it would have alone, and one can be kept."""

import itertools

import models
import numpy as np
import pytest

from accel.compiler.pipeline import pipeline
from accel.ir.capture.capture import capture
from accel.ir.errors import InputError, PassError
from accel.ir.ops.attention import attention
from accel.ir.recipe import Recipe
from accel.ir.spec import verify
from accel.passes import run
from accel.passes.state.trees import Trees
from accel.runtime.model.load import from_artifact
from accel.runtime.tree import Tree

from .kv_case import table
from .test_recurrence import mamba
from .tree_case import FORKS, PARENTS, ancestors, call_of, with_trees

EVICTING = Recipe(
    "snapkv",
    {
        "kv.score": table("snapkv"),
        "kv.budget": table("uniform", tokens_kept=8),
        "kv.when": {"use": "prompt"},
    },
)
KINDS = {  # architecture, recipe, target, how far logits may be from those of single calls
    "eager": ("mistral", "base", "eager", 5e-5),
    "onnx": ("mistral", "base", "onnx", 5e-5),
    "batch-invariant": ("llama", "batch-invariant", "onnx", 0.0),
    "kv-int8": ("llama", "kv-int8", "onnx", 5e-5),
    "evicted": ("llama", EVICTING, "onnx", 5e-5),
    "positions": ("gpt2", "base", "onnx", 5e-5),
    "latent": ("plain_latent", "base", "eager", 5e-5),
}


@pytest.fixture(scope="module")
def build():
    """A model of each kind, built once: name -> (model, tolerance)."""
    made = {}

    def get(name):
        if name not in made:
            architecture, recipe, target, off = KINDS[name]
            model = models.ARCHITECTURES[architecture]()
            made[name] = (
                with_trees(
                    model, recipe, target=target, max_context=256, max_batch=3, verify=off == 0
                ),
                off,
            )
        return made[name]

    yield get
    for model, _ in made.values():
        model.close()


def alone(model, prompt, *rows):
    """The logits [V] after the last token of each row, its tokens run one by one after the prompt."""
    found = []
    with model.session() as session:
        session.prompt(prompt[None])
        for tokens in rows:
            found.append([session.run([[token]]) for token in tokens][-1][0, 0])
            session.rewind(prompt.size)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_each_path_is_as_if_alone(build, name):
    model, off = build(name)
    rng = np.random.default_rng(0)
    prompts = [
        rng.integers(3, 50, n) for n in (9, 125, 14)
    ]  # a chunk of attention ends within the second's tree
    trees = [Tree(rng.permutation(45)[: len(p)] + 3, np.array(p)) for p in FORKS]
    tokens, seen, lengths = call_of(trees, [5, 6, 7])
    with model.session(batch=3) as session:
        padded = np.zeros((3, 125), np.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: prompt.size] = prompt
        session.prompt(padded, [p.size for p in prompts])
        held = session.lengths
        logits = session.guess(tokens, seen, lengths)
        assert (session.lengths == held).all(), "nothing is held of guesses"
        for b, tree in enumerate(trees):
            rows = [
                tokens[b, [0, *(1 + n for n in tree.path(node))]] for node in range(-1, len(tree))
            ]
            np.testing.assert_allclose(
                logits[b, : len(rows)], alone(model, prompts[b], *rows), atol=off, rtol=0
            )
        kept = [[0, 1, 4, 7, 8], [0, 1, 2], []]
        with session.fork() as other, pytest.raises(InputError, match="no tree to accept from"):
            other.keep(kept)
        some = np.array([[0, 2], [1, 0], [0, 0]])
        of_some = session.guess(tokens, seen, lengths, some)
        np.testing.assert_allclose(
            of_some, np.take_along_axis(logits, some[:, :, None], 1), atol=off, rtol=0
        )
        session.keep(kept)
        assert (session.lengths == held + [5, 3, 0]).all()
        got = session.run([[8], [9], [10]])[:, 0]
        for b, (columns, last) in enumerate(zip(kept, (8, 9, 10), strict=True)):
            (want,) = alone(model, prompts[b], [*tokens[b, columns], last])
            np.testing.assert_allclose(got[b], want, atol=off, rtol=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["eager", "batch-invariant"])
def test_guesses_leave_no_trace(build, name, monkeypatch):
    """Neither those that a later call drops, nor what a failed call wrote; a commit that does nothing would."""
    model, off = build(name)
    prompt = np.arange(3, 12)
    tree = Tree(np.array([20, 30, 21, 31]), np.array([-1, -1, 0, 1]))
    want = alone(model, prompt, [5, 6], [5, 6, 7])
    with model.session() as session:
        session.prompt(prompt[None])
        for drop in (
            lambda: None,
            lambda: session.rewind(9),
            lambda: session.fork().close(),
            session.end_prompt,
        ):
            session.guess(*call_of([tree], [5]))
            drop()
            np.testing.assert_allclose(session.run([[5, 6]])[0, -1], want[0], atol=off, rtol=0)
            session.rewind(9)
        session.guess(*call_of([tree], [5]))
        with monkeypatch.context() as broken:
            broken.setattr(type(session._core.backend), "part", lambda *_: {})
            session.keep([[0]])
        session.run([[6]])
        wrong = session.run([[7]])[0, 0]
        assert np.abs(wrong - want[1]).max() > 1e-3, "a guess that stays is seen"


@pytest.mark.parametrize("name", ["eager", "onnx"])
def test_a_tree_that_memory_is_too_small_for_is_forgotten(build, name, monkeypatch):
    """Nothing of it was written, so nothing is to be taken out of buffers that are not there."""
    model, off = build(name)
    tree = Tree(np.array([20, 30]), np.array([-1, -1]))
    with model.session() as session:
        with monkeypatch.context() as broken:
            broken.setattr(type(session._core.backend), "resize", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                session.guess(*call_of([tree], [5]))
        got = session.run([[5, 6]])[0, -1]
        np.testing.assert_allclose(got, model.logits([[5, 6]])[0, -1], atol=off, rtol=0)


def test_what_no_path_is_or_no_tree_is_refused(build):
    model, _ = build("eager")
    tree = Tree(np.array([20, 30, 21]), np.array([-1, -1, 0]))
    tokens, seen, lengths = call_of([tree], [5])
    with model.session() as session:
        session.run([[4, 5]])
        with pytest.raises(InputError, match=r"give bools \[1, 4, 4\]"):
            session.guess(tokens, seen[:, :2], lengths)
        with pytest.raises(InputError, match="ancestors first"):
            session.guess(tokens, seen.transpose(0, 2, 1), lengths)
        for columns, match in (
            ([0], r"give \[1, N\] with N of 1..4"),
            ([[4]], r"the call has 0\.\.3"),
        ):
            with pytest.raises(InputError, match=match):
                session.guess(tokens, seen, lengths, columns)
        with pytest.raises(InputError, match="would hold 258 tokens"):
            session.guess(np.zeros((1, 256), int), np.tri(256, dtype=bool)[None])
        session.tokens = held = [np.array([4, 5])]
        with pytest.raises(InputError, match="call session.guess first"):
            session.keep([[0]])
        assert session.tokens is held
        session.guess(tokens, seen, lengths)
        for path, match in (
            ([0, 1, 2], "comes after"),
            ([1], "whole path"),
            ([4], "0..3"),
            ([3], "comes after"),
        ):
            with pytest.raises(InputError, match=match):
                session.keep([path])
        for paths in ([[0], [0]], 5):
            with pytest.raises(InputError, match="one for each row"):
                session.keep(paths)
        session.keep([[0, 1, 3]])
        assert session.length == 5
    with model.session() as session, pytest.raises(InputError, match="no tree to accept from"):
        session.keep([[]])


def test_models_without_trees_say_so(stateful):
    from accel.compiler.facts_json import model_facts
    from accel.runtime.backends.eager import EagerBackend
    from accel.runtime.model.compiled import CompiledModel

    program = stateful("llama")
    with (
        CompiledModel(EagerBackend(program), model_facts(program)) as model,
        model.session() as session,
    ):
        assert not session.capabilities.trees
        with pytest.raises(InputError, match="takes no draft trees"):
            session.guess([[1, 2]], np.tri(2, dtype=bool)[None])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("architecture", "recipe", "match"),
    [
        (mamba, "base", "is not per-token state"),
        (
            models.ARCHITECTURES["llama"],
            {"kv.select": {"use": "quest", "page": 4}},
            "keeps bounds of pages",
        ),
        (
            models.ARCHITECTURES["llama"],
            {"kv.reuse": {"use": "paged-prefix"}},
            "shares token blocks",
        ),
    ],
)
def test_state_that_keeps_a_trace_is_refused(architecture, recipe, match):
    with pytest.raises(PassError, match=match):
        with_trees(architecture(), recipe, target="eager", max_context=64, verify=False)


def test_every_variant_takes_a_tree(build):
    """The portable one, too, which batch-invariant models do not take for trees."""
    model, _ = build("onnx")
    tree = Tree(np.array([20, 30, 21, 31]), np.array([-1, -1, 0, 1]))
    found = []
    for kernels in model.artifact.entries["step"].graphs:
        with from_artifact(model.artifact, kernels=kernels) as one, one.session() as session:
            session.prompt(np.arange(3, 12)[None])
            found.append(session.guess(*call_of([tree], [5])))
    for a, b in itertools.pairwise(found):
        np.testing.assert_allclose(a, b, atol=5e-5)
    exact, _ = build("batch-invariant")
    with from_artifact(exact.artifact, kernels="grouped") as one, one.session() as session:
        assert not session.capabilities.trees


def test_a_tree_without_its_slots_is_refused():
    program = capture(models.ARCHITECTURES["mistral"](), max_context=64)
    run(program, pipeline(recipe_passes=[Trees()]))
    node = program.nodes(attention.default)[0]
    node.kwargs = {"tree": node.kwargs["tree"]}
    with pytest.raises(PassError, match="a tree needs the slot of the call's first key"):
        verify(program, "the test")


def test_another_branch_would_be_noticed(build):
    """A control: a tree that lets one token see another branch changes that token's logits alone."""
    model, _ = build("onnx")
    tokens = np.random.default_rng(4).integers(3, 50, (1, len(PARENTS)))
    wrong = ancestors()
    wrong[5, 1] = True
    with model.session() as session:
        session.prompt(np.arange(3, 12)[None])
        off = np.abs(
            session.guess(tokens, ancestors()[None]) - session.guess(tokens, wrong[None])
        ).max(axis=(0, 2))
    assert off.argmax() == 5 and off[5] > 1e-3 and (np.delete(off, 5) == 0).all()
