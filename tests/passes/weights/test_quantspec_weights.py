"""quantspec-weights: one copy of codes, of which drafts read half and verification all."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from accel.ir.codes import Coded
from accel.ir.facts import Facts
from accel.ir.fields import Fields
from accel.ir.ops.quantized import unpack
from accel.ir.weights import Pages, Weights
from accel.passes.weights._kept import Kept, keeping
from accel.passes.weights.quantspec_weights import QuantspecWeights
from accel.runtime.draft.quantspec import Quantspec, cost_of
from accel.runtime.session.session import Session

from ...draft_case import plain, rows_of, speculated
from ...prefill_case import TOKENS, built

SMALL = {"use": "quantspec-weights", "block": 16, "smallest": 256}
CODEC = {"kv.codec": {"use": "quantspec-kv", "group": 8}}
TABLES = {"weights": SMALL} | CODEC


def numbers(program, name):
    """A weight by its upper half and by both, in NumPy: codes of 4 bits, the middle of which is 0."""

    def half(part):
        q, scales = program.params[name + part], program.params[f"{name}{part}.scales"]
        codes = unpack(q, 4).numpy().astype(np.float64) - 8
        return (codes * scales.float().numpy()[..., None]).reshape(len(q), -1)

    return half(".upper"), half(".upper") + half(".lower")


def test_halves_are_codes_of_the_weight():
    """The upper one is within half a step, both within a 32nd, or a 16th where 8 of them were to be added."""
    program = built("llama", tables={"weights": SMALL}).program
    uppers = [n for n in program.params if n.endswith(".upper")]
    assert len(uppers) > 8
    whole = np.zeros(2)
    for name in (one.removesuffix(".upper") for one in uppers):
        origins = [
            program.params.origins[name + part].stored.read() for part in (".upper", ".lower")
        ]
        weight = sum(origins).double().numpy()
        upper, both = (one[:, : weight.shape[1]] for one in numbers(program, name))
        scales = program.params[f"{name}.upper.scales"].float().numpy()
        step = np.repeat(scales, 16, 1)[:, : weight.shape[1]]  # of which the largest number is -8
        codes, off = weight / step, np.abs(upper - weight) / np.abs(step)
        assert (off[codes < 7.4] <= 0.51).all() and (off <= 0.6).all()
        rest = np.abs(both - weight) / np.abs(step)
        assert (rest <= 1.6 / 16).all(), "nothing is cut at the ends of a block"
        whole += [np.square(upper - weight).mean(), np.square(both - weight).mean()]
        assert program.params[f"{name}.lower"].nbytes == program.params[f"{name}.upper"].nbytes
    assert whole[1] < whole[0] / 50


def test_a_coarse_call_reads_no_lower_half():
    """What lies there is turned to noise; the control, that others read it. The cache is exact: it holds less than a
    block.
    """
    model = built("llama", tables=TABLES)
    params = model.program.params
    lower = {n: params[n] for n in params if n.endswith(".lower") and "embed" not in n}
    with model.session() as session:
        session.prompt(TOKENS[:1, :6])

        def logits(coarse):
            found = session.run(TOKENS[:1, [6]], coarse=coarse)
            session.rewind(6)
            return found

        few, whole = logits(True), logits(False)
        try:
            for name, codes in lower.items():
                params[name] = torch.randint_like(codes, 256)
            assert np.array_equal(logits(True), few)
            assert np.abs(logits(False) - whole).max() > 1e-3
        finally:
            for name, codes in lower.items():
                params[name] = codes
    assert len(lower) > 8 and np.abs(few - whole).max() > 1e-3


def test_a_draft_costs_what_it_reads_of_the_weights():
    """Their upper halves, or all of them, in two bytes or four; the control: facts that say nothing of it."""
    model = built("llama", tables=TABLES)
    params, facts = model.program.params, model.facts
    lower = sum(params.stored(n).nbytes for n in params if ".lower" in n)
    assert facts.finer_bytes == lower > 0.3 * facts.weight_bytes
    assert cost_of(facts, 0) == 1 - lower / facts.weight_bytes
    assert cost_of(replace(facts, weight_bytes=0, finer_bytes=0), 0) == 1
    floats = built("llama", tables=CODEC).facts
    halves = built("llama", tables=CODEC | {"weights": {"use": "float16"}}).facts
    assert floats.finer_bytes == halves.finer_bytes == 0
    assert halves.weight_bytes < 0.8 * floats.weight_bytes
    assert cost_of(halves, 0) == 1 > cost_of(floats, 300) > cost_of(halves, 300)
    told = Fields(json.loads(json.dumps(facts.to_json())))
    assert Facts.from_json(told).finer_bytes == facts.finer_bytes


def test_tokens_are_those_of_plain_decoding_over_eight_bits(monkeypatch):
    """The control: verification that reads coarsely too."""
    model = built("llama", tables=TABLES)

    def rows():
        return rows_of([TOKENS[0, : 30 - 9 * i] for i in range(3)], limit=30)

    want, run = plain(model.session(3), rows()), Session.run

    def drafted(**verified):
        monkeypatch.setattr(Session, "run", lambda *a, **more: run(*a, **more | verified))
        own, session = rows(), model.session(3)
        with session:
            for _ in speculated(session, own, Quantspec(), tokens=4):
                pass
        return [row.tokens for row in own]

    assert drafted() == want
    assert drafted(coarse=True) != want


def test_codes_of_a_checkpoint_stay_unless_they_are_rounded_anew():
    """Drafts read the codes that lie there."""
    lies = Coded.of_shape((4, 16), lambda: None, "4 bits", Pages())
    program = SimpleNamespace(params=Weights({"weight": lies}))
    plain = QuantspecWeights()
    assert keeping(program, [plain]) == [Kept(), plain]
    anew = QuantspecWeights(recode=True)
    assert keeping(program, [anew]) == [anew]
