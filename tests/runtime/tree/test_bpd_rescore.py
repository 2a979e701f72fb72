"""tree = bpd-rescore: its paths are the best of the whole lattice, by a plain count of n-grams."""

import itertools
import math

import numpy as np
import pytest

from accel.ir.errors import RecipeError
from accel.runtime.sample import Distribution
from accel.runtime.tree import NONE, ROOT, grown
from accel.runtime.tree.bpd_rescore import UNSEEN, BpdRescore, Ngrams, best_paths

VOCABULARY, COLUMNS = 9, 4


def laws(seed):
    """Of independent heads [K,V]."""
    return np.random.default_rng(seed).dirichlet(np.full(VOCABULARY, 0.7), COLUMNS)


def text(seed, size=60):
    return np.random.default_rng(seed).integers(0, 4, size) * 2  # odd tokens never occur


def plain_log(seen, order, state, token):
    """Counted anew from all places of the text."""
    places = [i for i in range(order - 1, len(seen)) if tuple(seen[i - order + 1 : i]) == state]
    count = sum(int(seen[i] == token) for i in places)
    return math.log((count + UNSEEN) / (len(places) + 1)) if places else math.log(UNSEEN)


def worth(path, seen, law, alpha, order):
    whole, value = [*seen.tolist(), *path], 0.0
    for i, token in enumerate(path):
        end = len(seen) + i
        state = tuple(whole[end - order + 1 : end])
        value += math.log(law[i, token]) + alpha * plain_log(seen.tolist(), order, state, token)
    return value


def all_paths(seen, law, alpha, order, width):
    """Every path of the lattice and its worth, the best first."""
    best = [np.argsort(-one, kind="stable")[:width].tolist() for one in law]
    found = {p: worth(p, seen, law, alpha, order) for p in itertools.product(*best)}
    return sorted(found.items(), key=lambda item: -item[1])


def tree_of(method, seen, law, limit, shape=None):
    shape = shape or method.begin()
    shape.read(seen)

    def expand(levels):
        (level,) = levels.values()
        depth[0] += 1
        if depth[0] > len(law):
            return {}
        ids = np.arange(VOCABULARY)
        return {0: [Distribution(ids, law[depth[0] - 1]) for _ in level.tokens]}

    depth = [0]
    return grown({0: shape.grow(limit)}, expand)[0]


def paths_of(tree):
    leaves = set(range(len(tree))) - set(tree.parents.tolist())
    return {tuple(tree.tokens[list(tree.path(n))].tolist()) for n in leaves}


@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 2.0])
def test_paths_are_the_best_of_the_lattice(order, alpha):
    for seed in range(6):
        seen, law = text(seed), laws(seed)
        method = BpdRescore(width=4, paths=5, alpha=alpha, order=order)
        want = all_paths(seen, law, alpha, order, 4)[:5]
        assert paths_of(tree_of(method, seen, law, 99)) == {path for path, _ in want}
        ngrams = Ngrams(order)
        ngrams.read(seen)
        columns = [[(t, math.log(one[t])) for t in np.argsort(-one)[:4].tolist()] for one in law]
        found = best_paths(columns, ngrams, alpha, 5)
        assert [path for _, path in found] == [path for path, _ in want]
        np.testing.assert_allclose([v for v, _ in found], [v for _, v in want])


def test_the_text_changes_the_draft():
    """The control: n-grams of another text, or without them, give other paths."""
    method, law = BpdRescore(width=4, paths=1, alpha=2.0), laws(1)
    found = {tuple(tree_of(method, text(seed), law, 99).tokens.tolist()) for seed in range(6)}
    assert len(found) > 1
    plain = BpdRescore(width=4, paths=1, alpha=0.0)
    (same,) = {tuple(tree_of(plain, text(seed), law, 99).tokens.tolist()) for seed in range(6)}
    assert same == tuple(law.argmax(1)), "without them it is the best of each head"


def test_a_refined_path_is_worth_no_less():
    for seed in range(6):
        seen, law = text(seed), laws(seed)
        tree = tree_of(BpdRescore(width=4, paths=1), seen, law, 99)
        values = [worth(p, seen, law, 0.5, 2) for p in (tree.tokens.tolist(), law.argmax(1))]
        assert values[0] >= values[1]


def test_text_that_grows_is_counted_once():
    seen, method, law = text(3), BpdRescore(width=4, paths=3, alpha=1.0, order=3), laws(3)
    shape = method.begin()
    for size in (0, 1, 2, 20, 21, 60):
        tree_of(method, seen[:size], law, 99, shape)
    one = tree_of(method, seen, law, 99, shape)
    assert paths_of(one) == paths_of(tree_of(method, seen, law, 99))


def test_a_limit_takes_the_best_paths_first():
    seen, law, method = text(2), laws(2), BpdRescore(width=4, paths=8)
    best = [path for path, _ in all_paths(seen, law, 0.5, 2, 4)[:8]]
    for limit in range(1, 12):
        tree = tree_of(method, seen, law, limit)
        assert len(tree) <= limit
        if limit >= COLUMNS:
            assert best[0] in paths_of(tree)
        assert not len(tree) or tree.parents[0] == ROOT
    assert len(tree_of(method, seen, law, 0)) == len(NONE)


def test_more_than_it_takes_is_refused():
    for wrong in ({"order": 5}, {"width": 0}, {"paths": 0}, {"alpha": -0.1}):
        with pytest.raises(RecipeError, match="bpd-rescore: "):
            BpdRescore(**wrong)
