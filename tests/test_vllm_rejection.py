"""vLLM's batched rejection sampler (V1): `spec-chain`, row by row, takes what it does with the same noise."""

import numpy as np

from accel.runtime.tree import Tree
from accel.runtime.verify import Chance, Target, Verdict
from accel.runtime.verify.spec_chain import SpecChain

from .verify_case import sampled

SIZE, SAMPLER = 7, sampled(temperature=0.8, top_p=0.9)
COUNTS = [3, 0, 5, 1, 4]  # tokens drafted for each request


class Noise(Chance):
    """A uniform number for each drafted token, and exponential ones [V] for the token that follows, once a round."""

    def __init__(self, uniform, exponential):
        self.uniform, self.exponential = list(uniform), exponential

    def accept(self, probability):
        return self.uniform.pop(0) < probability

    def draw(self, law):
        return int(law.tokens[(law.probabilities / self.exponential[law.tokens]).argmax()])


def requests(seed):
    """Of each request: tokens [T], q [T,V] (None: chosen), logits [T+1,V], and noise [T], [V]."""
    rng = np.random.default_rng(seed)
    found = []
    for row, count in enumerate(COUNTS):
        q = rng.dirichlet(np.full(SIZE, 0.5), count)
        tokens = np.array([rng.choice(SIZE, p=one) for one in q], np.int64)
        logits = 1.5 * rng.standard_normal((count + 1, SIZE)).astype(np.float32)
        noise = rng.random(count), rng.exponential(size=SIZE)
        found.append((tokens, None if row == 3 else q, logits, *noise))
    return found


def batched(rows):
    """The layout of V1: flat rows of all requests, the end of each, and tokens [B,most+1] with -1 behind the last."""
    ends = np.cumsum([len(tokens) for tokens, *_ in rows])
    nothing = np.zeros(0, np.int64)
    p = [
        [SAMPLER.distribution(line, nothing).dense(SIZE) for line in logits]
        for _, _, logits, *_ in rows
    ]
    flat = np.concatenate([np.reshape(one[:-1], (-1, SIZE)) for one in p])
    drawn = np.concatenate([np.eye(SIZE)[tokens] if q is None else q for tokens, q, *_ in rows])
    tokens = np.concatenate([one for one, *_ in rows])
    uniform = np.concatenate([u for *_, u, _ in rows])
    out = np.full((len(rows), max(COUNTS) + 1), -1)
    for row, end in enumerate(ends):
        start, exponential = end - len(rows[row][0]), rows[row][4]
        for place, at in enumerate(range(start, end)):
            token = tokens[at]
            if drawn[at, token] > 0 and flat[at, token] > uniform[at] * drawn[at, token]:
                out[row, place] = token
                continue
            owed = np.maximum(flat[at] - drawn[at], 0)
            out[row, place] = (owed / exponential).argmax()
            break
        else:
            out[row, end - start] = (p[row][-1] / exponential).argmax()
    return out


def by_rule(tokens, q, logits, uniform, exponential, rule=SpecChain()):  # noqa: B008  (frozen)
    target = Target(Tree.chain(tokens, q), logits, np.zeros(0, np.int64), SAMPLER)
    verdict = rule(target, Noise(uniform, exponential))
    return [*tokens[list(verdict.path)].tolist(), verdict.token]


def test_rows_take_what_the_ragged_batch_gives():
    lengths = set()
    for seed in range(60):
        rows = requests(seed)
        out = batched(rows)
        for row, want in zip(rows, out, strict=True):
            got = by_rule(*row)
            assert got == want[: len(got)].tolist() and (want[len(got) :] == -1).all()
            lengths.add(len(got))
        order = [4, 2, 0, 3, 1]
        assert (batched([rows[i] for i in order]) == out[order]).all(), "alone or in any batch"
        assert batched(rows[2:3])[0].tolist() == out[2].tolist()
    assert lengths == set(range(1, 7))


class Whole(SpecChain):
    """The next token is drawn from all of p after a rejection, too."""

    def judge(self, target, chance):
        node = -1
        for child, token in enumerate(target.tree.tokens.tolist()):
            law = target.law(node)
            if not chance.accept(law.of(token) / target.tree.law(child).of(token)):
                break
            node = child
        return Verdict(tuple(range(node + 1)), chance.draw(target.law(node)))


def test_another_residual_would_be_seen():
    rows = [row for seed in range(20) for row in requests(seed)]
    assert any(by_rule(*row) != by_rule(*row, rule=Whole()) for row in rows)
