"""exspec: of a pool of requests those of equal length run together, and each gets what it gets alone. Rows of a batch
that have come to different lengths stay in one call, without padding, and none of their tokens moves.
"""

from functools import partial

import numpy as np
import pytest

from accel.ir.entries.flat import OWNER
from accel.runtime.artifact.artifact import open_artifact
from accel.runtime.backends.eager import EagerSession
from accel.runtime.backends.onnx.backend import OrtBackend
from accel.runtime.decode.pool import groups
from accel.runtime.draft.prompt_lookup import PromptLookup
from accel.runtime.model import compiled
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.session import flat
from accel.runtime.session.session import Session

from ..batch_case import generated, tables
from ..prefill_case import built


def by_definition(lengths, most):
    """The paper's step, again and again: the first length that `most` of those left have; else the shortest."""
    left = list(range(len(lengths)))
    while left:
        for end in range(len(left) + 1):
            alike = [i for i in left[:end] if end and lengths[i] == lengths[left[end - 1]]]
            if len(alike) == most:
                break
        else:
            alike = sorted(sorted(left, key=lambda i: (lengths[i], i))[:most])
        yield alike
        left = [i for i in left if i not in alike]


def test_equal_lengths_come_together_and_nobody_waits_for_good():
    rng, full = np.random.default_rng(0), 0
    for case in range(200):
        count, most = int(rng.integers(0, 40)), int(rng.integers(1, 9))
        lengths = rng.integers(1, 2 + case % 12, count).tolist()
        found = list(groups(lengths, most))
        assert found == list(by_definition(lengths, most))
        assert sorted(i for group in found for i in group) == list(range(count))
        assert all(group == sorted(group) for group in found)
        assert all(len(group) == most for group in found[:-1])
        full += sum(len({lengths[i] for i in group}) == 1 < len(group) for group in found)
    assert full > 200


@pytest.fixture(scope="module")
def model(toy):
    artifact = open_artifact(toy.path)
    tables = {"draft": {"use": "prompt-lookup"}, "verify": {"use": "sample-match"},
              "length": {"use": "fixed"}, "loop": {"use": "speculative"}}  # fmt: skip
    with CompiledModel(
        OrtBackend(artifact), artifact.facts, artifact=artifact, recipe={"tables": tables}
    ) as made:
        yield made


def prompts(most):
    """Three batches of three lengths, mixed, and one request more."""
    rng = np.random.default_rng(1)
    sizes = [(5, 11, 17)[i % 3] for i in range(3 * most)] + [8]
    return [np.tile(rng.integers(3, 300, 4), 5)[:size].tolist() for size in sizes]


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"]
)
def test_requests_of_a_pool_get_what_they_get_alone(model, monkeypatch, sampling):
    """Drafted or not, in the order in which they were given; with no padding in prompts, which the control has."""
    given, padding, prompt = prompts(model.facts.max_batch), [], Session.prompt

    def counted(self, tokens, lengths=None):
        width = np.shape(tokens)[1]
        padding.append(0 if lengths is None else int((width - np.asarray(lengths)).sum()))
        return prompt(self, tokens, lengths)

    alone = [model.generate(p, 8, eos=[], **sampling).tokens[0] for p in given]
    monkeypatch.setattr(Session, "prompt", counted)
    assert model.generate(given, 8, eos=[], **sampling).tokens == alone
    assert len(padding) == 4 and not any(padding)
    if sampling:
        two = model.generate(given[:5], 8, eos=[], n=2, **sampling).tokens
        assert two[::2] == alone[:5]

    def as_they_come(lengths, most):
        yield from (
            range(len(lengths))[start : start + most] for start in range(0, len(lengths), most)
        )

    padding.clear()
    monkeypatch.setattr(compiled, "groups", as_they_come)
    assert model.generate(given, 8, eos=[], **sampling).tokens == alone
    assert sum(padding) > 3 * model.facts.max_batch


def driven(patch, share, moves=False):
    """(tokens that calls computed, real ones of them, lengths of rows before each call) of eight ragged rows, drafted
    in one batch; flat where at most `share` of a padded call is real. Every call finds the keys and values of a row's
    tokens where those before it left them. moves: a row is shifted between calls, as where padding is realigned.
    """
    computed, real, lengths, last = [], [], [], {}
    plain_step, plain_part = EagerSession.step, EagerSession.part

    def called(self, width, owned, slots, run):
        buffers = {n: a.copy() for n, a in self.buffers().items() if a.ndim == 4}
        for name, before in last.items():
            for row, length in enumerate(slots):
                np.testing.assert_array_equal(
                    buffers[name][row, :, :length], before[row, :, :length]
                )
        computed.append(width)
        real.append(owned)
        lengths.append(slots.tolist())
        found = run()
        last.update({n: a.copy() for n, a in self.buffers().items() if a.ndim == 4})
        if moves:
            name = next(iter(last))
            last[name][3] = np.roll(last[name][3], 1, axis=1)
        return found

    def step(self, tokens, positions, slots, *rest, **more):
        owned = int((positions >= 0).sum())
        run = partial(plain_step, self, tokens, positions, slots, *rest, **more)
        return called(self, tokens.size, owned, slots, run)

    def part(self, entry, given):
        width, owned = given["tokens"].size, len(given[OWNER])
        return called(self, width, owned, given["slots"], partial(plain_part, self, entry, given))

    with patch.context() as now:
        now.setattr(flat, "SHARE", share)
        now.setattr(EagerSession, "step", step)
        now.setattr(EagerSession, "part", part)
        rows = generated(
            built("llama", tables=tables("flat")), range(8), (), drafter=PromptLookup()
        )
    return [row.tokens for row in rows], sum(computed), sum(real), lengths


def test_eight_ragged_rows_share_calls_without_padding_and_nothing_moves(monkeypatch):
    """Groups of equal length would have made several calls of nearly every one."""
    padded, computed, real, lengths = driven(monkeypatch, 0.0)
    assert computed > 1.2 * real
    tokens, filled, needed, _ = driven(monkeypatch, 0.999)
    assert tokens == padded and filled == needed == real
    rounds = [len(set(each)) for each in lengths[1:]]
    assert sum(rounds) > 4 * len(rounds)


def test_rows_that_are_realigned_are_caught(monkeypatch):
    with pytest.raises(AssertionError):
        driven(monkeypatch, 0.999, moves=True)
