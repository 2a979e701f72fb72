"""What a pass does, as two programs that people read: texts/NAME.before.txt becomes NAME.after.txt.

NAME.other.txt is a near case that the pass must leave as it is, and the reason that it gives, where it gives
one. A comment of the first file says which pass it is. `GOLDEN=write pytest` writes what comes after.
"""

from importlib import import_module
from pathlib import Path

import pytest

from accel.ir.capture.examples import example
from accel.ir.errors import PassError
from accel.ir.facts import Facts, LayerFacts
from accel.ir.parser.read import parse
from accel.ir.program import Program
from accel.ir.spec import verify
from accel.passes import Pass
from accel.passes.drive import run_both_ways

TEXTS = Path(__file__).parent / "texts"
NAMES = sorted({path.name.partition(".")[0] for path in TEXTS.iterdir()})
LAYER = LayerFacts("causal", 0, 1, 1, 8)


def text_of(name: str, kind: str) -> str:
    return (TEXTS / f"{name}.{kind}.txt").read_text(encoding="utf-8")


def told(text: str, key: str) -> str:
    """What a comment of a text says: `# pass: …`."""
    found = [line for line in text.splitlines() if line.startswith(f"# {key}: ")]
    return found[0].partition(": ")[2] if found else ""


def step_of(name: str) -> Pass:
    module, _, kind = told(text_of(name, "before"), "pass").rpartition(".")
    (step,) = getattr(import_module(module), kind)().steps()
    return step


def read(name: str, kind: str) -> Program:
    """A program, and as many layers as its state is of."""
    program = parse(text_of(name, kind))
    count = 1 + max((s.layer for s in program.state if s.layer is not None), default=-1)
    program.facts = Facts("text", program.facts.vocab_size, max_context=32, layers=[LAYER] * count)
    return program


def test_every_pass_has_three_programs():
    kinds = ("after", "before", "other")
    assert sorted(p.name for p in TEXTS.iterdir()) == [f"{n}.{k}.txt" for n in NAMES for k in kinds]


@pytest.mark.few(15)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["before", "other"])
def test_a_program_by_hand_says_what_it_is_and_is_written_as_programs_are(name, kind):
    """So that what a pass leaves as it is is the same text afterwards."""
    lines = text_of(name, kind).splitlines(keepends=True)
    assert lines[0].startswith("# ")
    assert read(name, kind).text() == "".join(x for x in lines if not x.startswith("#"))


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_names_its_programs(name):
    assert f"`tests/passes/texts/{name}.before.txt`" in (type(step_of(name).method).__doc__ or "")


@pytest.mark.few(9)
@pytest.mark.parametrize("name", NAMES)
def test_before_and_after(name, golden):
    step, program = step_of(name), read(name, "before")
    tokens, _ = example(2, 9, program.facts.vocab_size)
    (want, _), *_ = run_both_ways(program, tokens)
    assert step.run(program).changed
    verify(program, name)
    golden.folder = TEXTS
    golden.check(f"{name}.after", program.text())
    assert parse(program.text()).text() == program.text()
    largest, bound = want.abs().max(), step.error if step.error > Pass.error else 1e-5
    assert largest > 0.1
    for got, rows in run_both_ways(program, tokens):
        assert (got - want[:, rows]).abs().max() <= bound * max(1.0, largest)


@pytest.mark.parametrize("name", NAMES)
def test_what_it_must_leave(name):
    says, step, program = told(text_of(name, "other"), "says"), step_of(name), read(name, "other")
    before = program.text()
    try:
        report = step.run(program)
    except PassError as error:
        assert says and says in str(error)
        return
    assert not report.changed and program.text() == before
    assert not says or any(says in line for line in report.refused)
