"""ADED: the table against counting trigrams, that weights only rise, and the tree that its search gives."""

from collections import Counter
from pathlib import Path
from random import Random
from types import SimpleNamespace

import datastore as tool
import numpy as np
import pytest

from accel.ir.errors import RecipeError
from accel.reference import kinds
from accel.runtime.draft.aded import HORIZON, Aded, drafted, searched
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.speculation.data_folder import TOLD
from accel.runtime.speculation.texts import GAP
from accel.runtime.speculation.trigrams import FEW, Adaptive, Trigrams

from .test_rest import texts

REFERENCE = Path(kinds.__file__).parent
FACTS = SimpleNamespace(vocab_size=4096, max_context=64)


def test_a_table_is_the_relative_frequencies():
    """By counting in a dict; of many successors the most frequent stay."""
    line = np.concatenate([texts(1, 200), [GAP, *np.tile([5, 6], 40)], [GAP, 1]])
    for n in range(FEW + 5):
        line = np.concatenate([line, [GAP, 50, 51, n] * (1 + n % 3)])
    counts = Counter(zip(line.tolist(), line[1:].tolist(), line[2:].tolist(), strict=False))
    told = {}
    for (a, b, c), times in counts.items():
        if GAP not in (a, b, c):
            told.setdefault((a, b), {})[c] = times
    table = Trigrams.of(line)
    assert any(len(after) > FEW for after in told.values())
    for (a, b), after in told.items():
        found, whole = table.find(a, b), sum(after.values())
        want = sorted(after, key=lambda c: (-after[c], c))[:FEW]
        assert [c for c, _ in found] == want
        assert np.allclose([w for _, w in found], [after[c] / whole for c in want])
    assert table.find(50, 52) == [] and Trigrams.of([GAP, 1, 2]).find(1, 2) == []


def law(table):
    """What is seen weighs a step more, up to the cap, and nothing that weighs anything ever weighs less."""
    rng, seen, before = np.random.default_rng(0), Counter(), {}
    base = {(a, b): dict(BASE.find(a, b)) for a in range(3) for b in range(3)}
    for _ in range(400):
        a, b, c = rng.integers(0, 3, 3).tolist()
        table.add(a, b, c, 0.1, 1.5)
        seen[a, b, c] += 1
        for first, second in base:
            for after, weight in table.find(first, second):
                start = base[first, second].get(after, 0.0)
                times = seen[first, second, after]
                assert weight >= before.get((first, second, after), 0.0), "it fell"
                assert weight == pytest.approx(min(1.5, start + 0.1 * times) if times else start)
                before[first, second, after] = weight
    assert max(before.values()) == 1.5


BASE = Trigrams.of(texts(4, 40))


class Fades(Adaptive):
    def add(self, first, second, after, more, most):
        super().add(first, second, after, more, most)
        for weights in self._after.values():
            for token in weights:
                weights[token] *= 0.99


def test_weights_rise():
    law(Adaptive(1 << 20, BASE))
    with pytest.raises(AssertionError):
        law(Fades(1 << 20, BASE))


def test_a_search_tells_its_path():
    """Every walk is counted once at each node of its path, and its reward is 1 and the sum of the path's weights."""
    table = Adaptive(1 << 20, BASE)
    root = searched(table, 1, 2, 200, Random(0))
    open_, deepest = [(root, 1)], 0
    assert root.visits == 200
    while open_:
        node, depth = open_.pop()
        below = node.below or []
        deepest = max(deepest, depth)
        assert depth <= HORIZON and sum(child.visits for child in below) <= node.visits
        assert sum(child.rewards for child in below) <= node.rewards + 1e-9
        assert node.visits <= node.rewards <= node.visits * (1 + 3 * (HORIZON - 1))
        open_ += [(child, depth + 1) for child in below]
    assert deepest == HORIZON
    only = Adaptive(1 << 20)
    for a, b, c in ((1, 2, 3), (2, 3, 4), (3, 4, 5), (4, 5, 6)):
        only.suppose(a, b, c, 0.5)
    root = searched(only, 1, 2, 10, Random(0))
    assert root.rewards == 10 * (1 + 3 * 0.5), "three states follow the root's"


def test_without_exploring_the_heaviest_expansion_is_drafted():
    """Of texts where one successor is far heavier, the most visited path is that of the heaviest."""
    for explore in (True, False):
        table, rng = Adaptive(1 << 20), np.random.default_rng(5)
        for a in range(6):
            for b in range(6):
                tokens = rng.permutation(6)[:3].tolist()
                for token, weight in zip(tokens, (0.9, 0.05, 0.05), strict=True):
                    table.suppose(a, b, token, weight)
        root = searched(table, 1, 2, 300, Random(0), explore)
        chain, pair = [], (1, 2)
        for _ in range(HORIZON):
            chain.append(table.find(*pair)[0][0])
            pair = (pair[1], chain[-1])
        tree = drafted(table, [1, 2], root, 3, 64)
        assert {tuple(tree.tokens[list(tree.path(n))]) for n in range(len(tree))} >= {
            tuple(chain[:size]) for size in range(1, HORIZON + 1)
        }


def test_a_tree_is_no_larger_than_it_may_be():
    table = Adaptive(1 << 20, BASE)
    root, whole = searched(table, 1, 2, 150, Random(0)), None
    for nodes in (64, 9, 1):
        tree = drafted(table, [1, 2], root, 24, nodes)
        assert len(tree) <= nodes
        paths = {tuple(tree.tokens[list(tree.path(n))].tolist()) for n in range(len(tree))}
        assert len(paths) == len(tree) and (whole is None or paths <= whole)
        whole = paths
    of, seen = Aded(), np.array([1, 2, 3, 1, 2])
    assert of.begin(seen[:3]).draft(seen, 9).tokens[0] == 3
    assert not len(of.begin(seen[:1]).draft(seen[:1], 9))
    assert not len(of.begin(seen[:1]).draft(np.array([8, 9]), 9))


def test_a_corpus_is_where_it_begins(tmp_path):
    """Made by the command; of another vocabulary, damaged or moved it is refused."""
    (tmp_path / "text.txt").write_text(" ".join(kinds.prompts("code", 2)), encoding="utf-8")
    out, tokenizer = tmp_path / "table", Tokenizer(REFERENCE / "tokenizer.json")
    tool.main(
        [str(REFERENCE), "--text", str(tmp_path / "text.txt"), "--out", str(out), "--trigrams"]
    )
    of = Aded(str(out))
    base = of.store(FACTS, tokenizer)
    assert isinstance(base.keys, np.memmap)
    ids = np.array(tokenizer.encode(kinds.prompts("code", 1)[0], special=False))
    row = of.begin(ids[:2], base)
    assert ids[2] in row.draft(ids[:2], 30).tokens
    shared = Aded(str(out), shared=True).store(FACTS, tokenizer)
    assert isinstance(shared, Adaptive) and ids[2] in [c for c, _ in shared.find(*ids[:2].tolist())]
    for how, words in [
        (lambda: np.save(out / "after.npy", np.load(out / "after.npy") + 9999), "is damaged"),
        (lambda: (out / "weights.npy").write_bytes(b"no"), "is damaged"),
        (lambda: (out / TOLD).unlink(), "holds no trigrams, or was moved"),
    ]:
        how()
        with pytest.raises(RecipeError, match=f"draft.aded: corpus: .*{words}.*--trigrams"):
            of.store(FACTS, tokenizer)


def test_bad_options():
    for options, words in [
        ({"cap": 0.0}, "cap is 0.0; give more than 0"),
        ({"step": -1.0}, "step is -1.0; give at least 0"),
        ({"step": float("inf"), "cap": float("inf")}, "step is inf"),
        ({"cap": float("inf")}, "cap is inf"),
        ({"choices": 0}, "choices is 0; give 1 to 512"),
    ]:
        with pytest.raises(RecipeError, match=f"draft.aded: {words}"):
            Aded(**options)
