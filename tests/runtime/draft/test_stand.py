"""STAND: the memory against the mean of all distributions, and drafts that are drawn from it."""

from collections import Counter

import numpy as np
import pytest
import tree_template as tool

from accel.compiler.assemble import assemble
from accel.ir.errors import RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.decode.context import DecodeContext
from accel.runtime.draft.stand import Memory, Stand, grams
from accel.runtime.sample.standard import Standard
from accel.runtime.tree._shaped import Formed
from accel.runtime.tree.stand import Stand as Template
from accel.runtime.tree.static import Static
from accel.runtime.verify import Chance, Target, Verdict
from accel.runtime.verify.rrs_wor import RrsWor

from ...draft_case import rows_of
from ...grow_case import Asked, table, tree_of
from ...store_case import SIZE, decode, plain
from ...verify_case import distance


class Session:
    vocab_size, batch = SIZE, 1


def law(memory):
    """Of tokens that are never left out, the running mean is the mean of all that was seen after an n-gram."""
    rng, told = np.random.default_rng(0), {}
    for _ in range(200):
        keys = grams(rng.integers(0, 2, rng.integers(1, 6)).tolist())
        tokens = rng.permutation(6)[: rng.integers(1, 7)]
        chances = rng.dirichlet(np.ones(tokens.size))
        memory.add(keys, tokens.tolist(), chances.tolist())
        line = np.zeros(6)
        line[tokens] = chances
        for key in keys:
            told.setdefault(key, []).append(line)
    for key, lines in told.items():
        tokens, chances = memory.find([key])
        found = np.zeros(6)
        found[tokens] = chances
        assert np.allclose(found, np.mean(lines, 0), atol=1e-5)
        assert chances == sorted(chances, reverse=True)


class Latest(Memory):
    """It keeps what was seen last."""

    def _read(self, slot):
        return [], []


def test_it_keeps_the_mean():
    law(Memory(1 << 20, 10))
    with pytest.raises(AssertionError):
        law(Latest(1 << 20, 10))


def test_the_likeliest_stay_and_the_oldest_go():
    memory = Memory(240 * 3 + 3 * 8 * 2 + 10, 2)
    for n in range(5):
        memory.add([n], [7, 8, 9], [0.2, 0.5, 0.3])
    assert [memory.find([n]) is not None for n in range(5)] == [False, False, True, True, True]
    assert memory.find([0, 3, 4])[0] == [8, 9], "the first that is known, its likeliest tokens"
    memory.suppose([4, 9], 1)
    assert memory.find([4])[0] == [8, 9] and memory.find([9]) == ([1], [1.0])
    memory.add([9], [3], [0.5])
    assert memory.find([9]) == ([3], [0.5]), "what the target says counts alone"


def test_the_longest_known_context_is_read():
    assert len(grams([1])) == 0 and len({*grams([1, 2, 3, 4]), *grams([0, 2, 3, 4])}) == 4
    assert grams([0, 0, 5]) != grams([0, 5]) and len(grams([9] * 7)) == 3
    row = rows_of([[1, 2, 3, 4, 9, 5, 2, 3, 4, 8, 1]])[0]
    row.accept(2, None)
    row.accept(3, None)
    paths = {"tree": Static(paths=[[0], [0, 0], [0, 0, 0]]), "verify": RrsWor()}
    drafters = Stand().open(Session, [row], DecodeContext(paths))
    assert drafters.draft({0: 5}, None)[0].tokens.tolist() == [4, 9, 5], "9, not 8, after 1 2 3 4"


def test_drafted_tokens_have_the_odds_of_the_target():
    """Drawn trees of a full memory, against what the target says; drawn tokens stand more often than the likeliest."""
    sampler, rng, rule = Standard(temperature=1.0, top_k=3), np.random.default_rng(0), RrsWor()
    table = np.random.default_rng(3).standard_normal((4, 4)).astype(np.float32)
    laws = [sampler.distribution(line, np.array([1])) for line in table]
    memory, runs = Memory(1 << 16, 10), 250
    for last, law_ in enumerate(laws):
        for before in range(4):
            memory.add(grams([before, last]), law_.tokens.tolist(), law_.probabilities.tolist())
    methods = {"tree": Static(paths=[[0], [0, 0]]), "verify": rule}
    found, stood = {}, {True: 0, False: 0}
    for drawn in (True, False):
        row = rows_of([[3]], sampler)[0]
        row.rng = rng
        row.accept(1, None)
        drafters = Stand().open(Session, [row], DecodeContext(methods, store=memory))
        drafters._vocab = 4
        if not drawn:
            drafters.draws = [None]
        for _ in range(runs):
            tree = drafters.draft({0: 2}, None)[0]
            logits = table[[1, *tree.tokens.tolist()]]
            verdict = rule(Target(tree, logits, row.seen, sampler), Chance(rng))
            stood[drawn] += len(verdict.path)
            if drawn:
                first = (*tree.tokens[list(verdict.path)].tolist(), verdict.token)[0]
                found[(first,)] = found.get((first,), 0) + 1 / runs
    want = {(int(t),): p for t, p in zip(laws[1].tokens, laws[1].probabilities, strict=True)}
    assert distance(found, want) < 0.08
    assert stood[True] > 1.1 * stood[False]


def test_tokens_are_those_of_plain_decoding_and_all_that_stands_is_learnt():
    for sampler in (Standard(), Standard(temperature=0.8)):
        assert decode(Stand(), [[1, 2, 3], [4, 5, 6]], sampler)[0] == plain(
            [[1, 2, 3], [4, 5, 6]], sampler
        )
    row = rows_of([[1, 2, 3]])[0]
    context = DecodeContext({"tree": Static(), "verify": RrsWor()})
    drafters = Stand().open(Session, [row], context)
    row.accept(4, None)
    tree = drafters.draft({0: 3}, None)[0]
    assert not len(tree)
    logits = np.zeros((1, SIZE), np.float32)
    logits[0, 7] = 20
    drafters.observe(0, tree, Verdict((), 7), logits)
    for context_ in ([3, 4], [2, 3, 4], [1, 2, 3, 4]):
        tokens, chances = drafters._memories[0].find(grams(context_)[:1])
        assert tokens[0] == 7 and chances[0] == pytest.approx(1)


def law_of_templates(chosen):
    """Each node after its parent and its earlier siblings; of two that could come next, the one that stood more often;
    what stood.
    """
    rng = np.random.default_rng(0)
    for count in (3, 9, 40):
        stood = Counter()
        for _ in range(60):
            path = ()
            while len(path) < 4 and rng.random() < 0.7:
                path = (*path, int(rng.geometric(0.6)) - 1)
                stood[path] += 1
        found, open_ = chosen(stood, count), {(0,)}
        assert len(found) <= count and all(path in stood for path in found)
        for path in found:
            assert path in open_ and stood[path] == max(stood[other] for other in open_)
            open_ -= {path}
            open_ |= {(*path, 0), (*path[:-1], path[-1] + 1)}


def test_a_template_is_of_the_nodes_that_stood_most_often():
    law_of_templates(tool.best)
    with pytest.raises(AssertionError):
        law_of_templates(lambda stood, count: [path for path, _ in stood.most_common(count)])
    with pytest.raises(AssertionError):
        law_of_templates(lambda stood, count: sorted(tool.best(stood, count)))
    counted = tool.Counted(Formed(((0,), (1,), (1, 0))))
    tree = tree_of(counted, 3, Asked(table(6, 0)))
    counted.observe(tree, [1, 2])
    counted.observe(tree, [])
    assert counted.rounds == 2 and counted.stood == {(1,): 1, (1, 0): 1}


def test_the_bundled_template_is_cut_where_more_nodes_do_not_pay():
    sizes = [
        len(tree_of(Template().begin(lambda n, each=each: 1 + each * n), 99, Asked(table(90, 0))))
        for each in (10.0, 0.05, 0.0)
    ]
    assert sizes[0] == 1 < sizes[1] < sizes[2] > 20


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no JSON", "holds no template .*tree_template.py"),
        ('{"paths": [[0]]}', "holds no template .'stand'"),
        ('{"paths": [[0]], "stand": []}', "paths and stand differ in length"),
        ('{"paths": [[0]], "stand": [2.0]}', "2.0 is not how often a node stands"),
        ('{"paths": [[1]], "stand": [0.5]}', r"path \[1\] lacks its parent \[0\]"),
    ],
)
def test_a_template_that_is_none(tmp_path, text, why):
    file = tmp_path / "template.json"
    file.write_text(text)
    with pytest.raises(RecipeError, match=f"tree.stand: .*{why}"):
        Template(str(file))


def test_bad_options():
    for options, why in [
        ({"kept": 0}, "kept is 0; give 1 to 64"),
        ({"bytes": 100}, "bytes is 100; give at least"),
    ]:
        with pytest.raises(RecipeError, match=f"draft.stand: {why}"):
            Stand(**options)


def test_what_it_goes_with():
    plan = assemble(Recipe(tables={"draft": {"use": "stand"}, "tree": {"use": "dyspec"}}))
    assert plan.recipe.tables["verify"]["use"] == "rrs-wor"
