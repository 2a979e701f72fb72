"""What each central pass does, as two programs that people read: texts/NAME.before.txt becomes NAME.after.txt.

NAME.other.txt is a near case that the pass must leave as it is. `GOLDEN=write pytest` writes what comes after.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from accel.ir.capture.examples import example
from accel.ir.errors import PassError
from accel.ir.facts import Facts, LayerFacts
from accel.ir.program import Program
from accel.ir.spec import verify
from accel.ir.text.read import parse
from accel.passes import Pass
from accel.passes.check import run_both_ways
from accel.passes.clean.clean import Clean
from accel.passes.clean.fold import Fold
from accel.passes.clean.linear import Linears
from accel.passes.depth.by_call import ByCall
from accel.passes.fuse.heads import Heads
from accel.passes.fuse.pack import Pack
from accel.passes.fuse.residual import Residual
from accel.passes.kv.codec.kv_int8 import KvInt8
from accel.passes.recognise.attention import Attention
from accel.passes.recognise.gate import Gates
from accel.passes.recognise.norm import Norms
from accel.passes.recognise.positions import Positions
from accel.passes.recognise.rope import Rope
from accel.passes.state.cache import Cache
from accel.passes.state.layers import Layers
from accel.passes.weights.int8 import Int8

TEXTS = Path(__file__).parent / "texts"
LAYER = LayerFacts("causal", 0, 1, 1, 8)


@dataclass(frozen=True)
class Case:
    """A pass; what it says of the other program: why it leaves it, or the error that it raises."""

    step: Pass
    says: str = ""
    layers: int = 0  # that passes before it found
    close: float = 1e-5  # how far the logits may move


CASES = {
    "clean": Case(Clean()),
    "fold": Case(Fold()),
    "linears": Case(Linears()),
    "positions": Case(Positions()),
    "norms": Case(Norms(), "the root does not scale the same value"),
    "attention": Case(Attention(), "its scores depend on tokens beside"),
    "rope": Case(Rope()),
    "gates": Case(Gates(), "its other factor is no projection of that size"),
    "cache": Case(Cache(), "this mixes tokens outside attention"),
    "kv_int8": Case(KvInt8(), "has no cache of keys and values to store otherwise", 1, 0.05),
    "pack": Case(Pack(), "mlp.gate.weight is used elsewhere too"),
    "heads": Case(Heads()),
    "layers": Case(Layers(), "the residual stream does not go on after it", 2),
    "residual": Case(Residual(), "adds no two values [B,T,E]"),
    "by_call": Case(ByCall(), "0 of 2 layers were found in the graph", 2),
    "int8": Case(Int8(), "", 0, 0.05),
}


def read(name: str, kind: str) -> Program:
    program = parse((TEXTS / f"{name}.{kind}.txt").read_text(encoding="utf-8"))
    facts = Facts("text", vocab_size=program.facts.vocab_size, max_context=32)
    facts.layers = [LAYER] * CASES[name].layers
    program.facts = facts
    return program


def test_every_text_has_its_case_and_every_case_its_texts():
    kinds = ("after", "before", "other")
    assert sorted(p.name for p in TEXTS.iterdir()) == [
        f"{name}.{kind}.txt" for name in sorted(CASES) for kind in kinds
    ]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["before", "other"])
def test_a_program_is_written_as_programs_are(name, kind):
    """So that what a pass leaves as it is is the same text afterwards."""
    comment, _, text = (TEXTS / f"{name}.{kind}.txt").read_text(encoding="utf-8").partition("\n")
    assert comment.startswith("# ") and read(name, kind).text() == text


@pytest.mark.parametrize("name", CASES)
def test_before_and_after(name, golden):
    case, program = CASES[name], read(name, "before")
    tokens, _ = example(2, 9, program.facts.vocab_size)
    ((want, _), *_) = run_both_ways(program, tokens)
    assert case.step.run(program).changed
    verify(program, name)
    golden.folder = TEXTS
    golden.check(f"{name}.after", program.text())
    for got, rows in run_both_ways(program, tokens):
        error = (got - want[:, rows]).abs().max() / want.abs().max().clamp(min=1)
        assert want.abs().max() > 0.1 and error <= case.close
    assert parse(program.text()).text() == program.text()


@pytest.mark.parametrize("name", CASES)
def test_what_it_must_leave(name):
    case, program = CASES[name], read(name, "other")
    before = program.text()
    try:
        report = case.step.run(program)
    except PassError as error:
        assert case.says and case.says in str(error)
        return
    assert not report.changed and program.text() == before
    assert any(case.says in line for line in report.refused) or not case.says
