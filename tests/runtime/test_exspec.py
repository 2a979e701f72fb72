"""exspec: of a pool of requests those of equal length run together, and each gets what it gets alone."""

import numpy as np
import pytest

from accel.runtime.artifact.artifact import open_artifact
from accel.runtime.backends.onnx.backend import OrtBackend
from accel.runtime.decode.pool import groups
from accel.runtime.model import compiled
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.session.session import Session


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
