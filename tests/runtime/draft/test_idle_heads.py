"""A head that is not asked: steps of its target cost the host what plain ones do, and it drafts later as one that was
asked all along. Counts, not times.
"""

import sys

import models
import numpy as np
import pytest
import torch

import accel
from accel.runtime.backends.onnx import session as onnx_session
from accel.runtime.speculation.features import FeatureFollower, Taps

from ...draft_case import rows_of
from ...heads_case import asked, eagle3_folder, eagle3_tensors, opened, texts_of

pytestmark = pytest.mark.long  # one build for ONNX
LAYERS, BEGIN = 3, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with an EAGLE-3 head, for ONNX."""
    torch.manual_seed(3)
    module, folder = models.make("llama", LAYERS).eval(), tmp_path_factory.mktemp("idle")
    width, vocabulary = module.config.hidden_size, module.config.vocab_size
    tensors = eagle3_tensors(width, 32, vocabulary, 40, own=True)
    head = eagle3_folder(
        folder / "head", tensors, width, vocabulary, eagle_aux_hidden_state_layer_ids=[0, 1, 2]
    )
    more = {"max_context": 64, "max_batch": 2, "draft": head, "out": folder / "out"}
    with accel.optimize(module, **more) as found:
        yield found


def calls_of(session, steps):
    """Python's calls of so many steps of one token, and the values that they make for ONNX Runtime."""
    count, made, before = 0, 0, onnx_session.ort_value

    def hear(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    def ort_value(array):
        nonlocal made
        made += 1
        return before(array)

    onnx_session.ort_value = ort_value
    try:
        for step in range(steps + 2):
            if step == 2:  # buffers are bound
                made = 0
                sys.setprofile(hear)
            session.run(np.full((session.batch, 1), 7))
    finally:
        sys.setprofile(None)
        onnx_session.ort_value = before
    return count / steps, made


def test_a_step_that_keeps_features_costs_the_host_what_a_plain_one_does(model):
    prompt = np.array(texts_of(BEGIN))
    with model.session(2) as session:
        session.prompt(prompt)
        plain, _ = calls_of(session, 10)
    with model.session(2) as session:
        taps = Taps(model.draft_model.facts.draft_head.taps, 2)
        session.listen(taps)
        session.prompt(prompt)
        kept, made = calls_of(session, 10)
        assert taps.of(1, BEGIN, BEGIN + 12).shape[0] == 12
        session.unlisten(taps)
    assert not made, "each step would bind its buffers anew"
    assert kept < plain + 30


def test_a_head_that_was_idle_drafts_as_one_that_was_not(model, monkeypatch):
    """One token at a time, in buffers that each step writes over. The control: what the step before gave."""
    runs = list[int]()
    run = FeatureFollower.run

    def counted(follower, rows, **more):
        runs.append(sum(ids.size for ids in rows.values()))
        return run(follower, rows, **more)

    monkeypatch.setattr(FeatureFollower, "run", counted)

    def drafted(each, end=22):
        texts = texts_of(end)
        rows, found = rows_of([text[:BEGIN] for text in texts]), []
        with model.session(2) as session:
            drafters = opened(model, session, rows)
            session.prompt(np.array([row.prompt for row in rows]))
            for place in range(BEGIN, end):
                for row, text in zip(rows, texts, strict=True):
                    row.accept(text[place], None)
                if each or place == end - 1:
                    found = [tree.tokens.tolist() for tree in asked(drafters, rows, 0, 1, limit=4)]
                if place < end - 1:
                    session.run(np.array([[text[place]] for text in texts]))
            drafters.close()
        return found

    fed, often = drafted(True), len(runs)
    runs.clear()
    assert drafted(False) == fed
    assert len(runs) < often / 4 and runs[0] == 2 * 21, "one call for all that it had not read"
    after = Taps.after
    last = {}

    def late(taps, tokens, positions, extra):
        now, given = dict(extra), last.get("extra")
        last["extra"] = now
        same = given and all(given[n].shape == now[n].shape for n in now)
        after(taps, tokens, positions, given if same else now)

    monkeypatch.setattr(Taps, "after", late)
    assert drafted(False) != fed
