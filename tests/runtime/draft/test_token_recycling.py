"""Token recycling: the matrix, what is drafted from it, and that tokens are those of plain decoding."""

from types import SimpleNamespace

import numpy as np
import pytest

from accel.compiler.assemble import assemble
from accel.ir.axis import Axis
from accel.ir.errors import RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.decode.context import DecodeContext
from accel.runtime.draft.token_recycling import TokenRecycling, follow, recycle
from accel.runtime.sample.standard import Standard
from accel.runtime.verify import Chance, Target

from ...draft_case import rows_of

SIZE = 12


@pytest.mark.parametrize("length", [0, 1, 2, 9, 60])
def test_it_begins_with_what_follows_in_the_prompt(length):
    prompt = np.random.default_rng(length).integers(0, 5, length)
    matrix = follow(prompt, 6, 3)
    for token in range(6):
        want = []
        for place in range(length - 2, -1, -1):
            if prompt[place] == token and prompt[place + 1] not in want:
                want.append(int(prompt[place + 1]))
        assert matrix[token].tolist() == (want + [-1] * 3)[:3], "the newest first"


def test_what_is_likely_after_a_token_is_kept():
    rng = np.random.default_rng(0)
    for _ in range(20):
        matrix, before = np.full((SIZE, 4), -1, np.int32), None
        tokens, logits = rng.integers(0, SIZE, 9), rng.standard_normal((9, SIZE)).astype(np.float32)
        path = [0, 3, 5]
        before = matrix.copy()
        recycle(matrix, tokens, logits, path)
        for token in range(SIZE):
            rows = [i for i in path if tokens[i] == token] or [
                i for i in range(9) if tokens[i] == token
            ]
            want = before[token] if not rows else np.argsort(-logits[rows[-1]], kind="stable")[:4]
            assert matrix[token].tolist() == want.tolist(), "the path's, or the deepest"


def test_a_vocabulary_smaller_than_the_followers():
    matrix = np.full((3, 8), -1, np.int32)
    recycle(matrix, np.array([1]), np.array([[0.0, 2.0, 1.0]], np.float32), [0])
    assert matrix.tolist() == [[-1] * 8, [1, 2, 0] + [-1] * 5, [-1] * 8]


def opened(rows, tree="static", followers=8, **options):
    method = Axis("tree", "accel.runtime.tree").build(tree, **options)
    session = SimpleNamespace(vocab_size=SIZE, batch=len(rows))
    return TokenRecycling(followers).open(session, rows, DecodeContext({"tree": method}))


def test_a_tree_is_read_from_the_matrix():
    rows = rows_of([[1, 2, 1, 3, 1, 2, 4]])
    rows[0].accept(1, None)
    drafters = opened(rows, paths=[[0], [1], [2], [0, 0], [1, 0], [0, 0, 0]])
    tree = drafters.draft({0: 9}, None)[0]
    assert tree.tokens.tolist() == [2, 3, 4, 1], (
        "4 follows 2, 1 follows 3; what follows 4 is not known"
    )
    assert tree.parents.tolist() == [-1, -1, 0, 1]


@pytest.mark.parametrize("tree", ["chain", "static", "sequoia"])
@pytest.mark.parametrize(
    "sampler", [Standard(), Standard(temperature=0.9)], ids=["greedy", "sampled"]
)
def test_tokens_are_those_of_plain_decoding(tree, sampler):
    """Rows over a table that take turns in one group: the same tokens, and most of the drafts that they get alone."""
    table = np.random.default_rng(3).standard_normal((SIZE, SIZE, SIZE)).astype(np.float32) * 3

    def logits_of(seen):
        return table[seen[-2], seen[-1]]

    def plain(row):
        while not row.finish:
            row.accept(row.pick(logits_of(row.seen)), None)
        return row.tokens

    def decode(rows):
        drafters, calls, trees = opened(rows, tree), 0, []
        rule = Axis("verify", "accel.runtime.verify").build("sample-match")
        while live := [i for i, row in enumerate(rows) if not row.finish]:
            drafts = drafters.draft({i: 6 for i in live}, None)
            calls += 1
            for i in live:
                row, draft = rows[i], drafts[i]
                assert len(draft) <= 6
                trees.append((i, draft.tokens.tolist()))
                paths = [(), *(draft.path(n) for n in range(len(draft)))]
                logits = np.stack(
                    [logits_of([*row.seen[-2:], *draft.tokens[list(p)]]) for p in paths]
                )
                verdict = rule(Target(draft, logits, row.seen, row.sampler), Chance(row.rng))
                drafters.observe(i, draft, verdict, logits)
                for token in (*draft.tokens[list(verdict.path)].tolist(), verdict.token):
                    if not row.finish:
                        row.accept(token, None)
        return [row.tokens for row in rows], calls, trees

    prompts = [[1, 2, 3, 1, 2], [4, 4, 5, 6]]
    want = [plain(row) for row in rows_of(prompts, sampler, limit=60)]
    got, calls, trees = decode(rows_of(prompts, sampler, limit=60))
    assert got == want and calls < 58
    alone = [decode(rows_of([p], sampler, limit=60)) for p in prompts]
    assert [tokens for (tokens,), _, _ in alone] == want
    for i in range(2):
        assert [d for j, d in trees if j == i] == [d for _, d in alone[i][2]], "rows share nothing"


def test_where_nothing_is_known_nothing_is_drafted():
    rows = rows_of([[1, 2, 3]])
    rows[0].accept(7, None)
    assert not len(opened(rows).draft({0: 9}, None)[0])


def test_what_it_goes_with():
    plan = assemble(Recipe(tables={"draft": {"use": "token-recycling"}}))
    uses = {axis: table["use"] for axis, table in plan.recipe.tables.items()}
    assert (uses["tree"], uses["verify"]) == ("static", "rrs-wor"), "a rule that takes trees"
    for tables, words in [
        (
            {"tree": {"use": "dyspec"}},
            "tree = dyspec cannot be combined with draft = token-recycling: .*gives probabilities",
        ),
        (
            {"verify": {"use": "spec-chain"}},
            "verify = spec-chain cannot be combined with tree = static: .*verify rrs-wor for spec-chain",
        ),
        ({"tree": {"use": "sequioa"}}, "did you mean 'sequoia'"),
    ]:
        with pytest.raises(RecipeError, match=words):
            assemble(Recipe(tables={"draft": {"use": "token-recycling"}, **tables}))
    assert assemble(
        Recipe(tables={"draft": {"use": "token-recycling"}, "tree": {"use": "chain"}})
    ).methods["verify"]
    with pytest.raises(RecipeError, match="followers is 0"):
        TokenRecycling(0)
