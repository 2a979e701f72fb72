"""Patterns and rules by themselves: what matches, in which order, and what is left."""

import pytest
import torch

from accel.ir.parser.read import parse
from accel.ir.program import Program
from accel.ir.spec import verify
from accel.passes import Report
from accel.passes.recognise.rewrite import Rule, Setting, Site, Value, call, rewrite

aten = torch.ops.aten
HEAD = """step(tokens: i64[B,T], positions: i64[B,T]):
  embed: f32[11,8]
  %0: f32[B,T,8] = embedding(embed, tokens)
"""
TAIL = "  %9: f32[B,T,11] = linear(%8, embed)\n  return logits=%9\n"
X, Y, N = Value("x"), Value("y"), Setting("n", (int,))
TANH, SIN, EXP = aten.tanh.default, aten.sin.default, aten.exp.default
POW, MUL, SUB = aten.pow.Tensor_Scalar, aten.mul.Tensor, aten.sub.Tensor


def program(*lines: str) -> Program:
    return parse(HEAD + "".join(f"  {line}\n" for line in lines) + TAIL)


def found(given: Program, *rules: Rule) -> tuple[Report, list[str]]:
    """What rules report, and the operators after the embedding."""
    report = Report()
    rewrite(given, given.step.graph, rules, report)
    verify(given, "rules")
    calls = [n for n in given.step.graph.nodes if n.op == "call_function"]
    return report, [str(n.target).removeprefix("aten.").split(".")[0] for n in calls[1:-1]]


def as_neg(at: Site, x, **_):
    return at.call(aten.neg.default, x)


FIRST = "%1: f32[B,T,8] = tanh(%0)"


@pytest.mark.parametrize(
    ("lines", "pattern", "left"),
    [
        # both orders of a product, and its place among alternatives
        (["%8: f32[B,T,8] = mul.Tensor(%1, %0)"], call(MUL, X, call(TANH, X)), ["neg"]),
        (["%8: f32[B,T,8] = sub.Tensor(%1, %0)"], call(SUB, X, call(TANH, X)), ["tanh", "sub"]),
        (["%8: f32[B,T,8] = sub.Tensor(%0, %1)"], call(SUB, X, call(TANH, X)), ["neg"]),
        (["%8: f32[B,T,8] = mul.Tensor(%1, %1)"], call(MUL, call(TANH, X), Y), ["neg"]),
        (["%8: f32[B,T,8] = mul.Tensor(%1, %0)"], call(MUL, X, X), ["tanh", "mul"]),
        (["%8: f32[B,T,8] = exp(%1)"], call(EXP, call(SIN, X) | call(TANH, X)), ["neg"]),
        # what another value reads, too, is no part of a pattern unless it says so
        (
            ["%2: f32[B,T,8] = exp(%1)", "%8: f32[B,T,8] = mul.Tensor(%2, %1)"],
            call(EXP, call(TANH, X)), ["tanh", "exp", "mul"],
        ),
        (
            ["%2: f32[B,T,8] = exp(%1)", "%8: f32[B,T,8] = mul.Tensor(%2, %1)"],
            call(EXP, call(TANH, X, shared=True)), ["tanh", "neg", "mul"],
        ),
        # settings by value, by name, and further ones
        (["%8: f32[B,T,8] = pow.Tensor_Scalar(%1, 2)"], call(POW, X, 2), ["tanh", "neg"]),
        (["%8: f32[B,T,8] = pow.Tensor_Scalar(%1, 3)"], call(POW, X, 2), ["tanh", "pow"]),
        (["%8: f32[B,T,8] = pow.Tensor_Scalar(%1, 3)"], call(POW, X, N), ["tanh", "neg"]),
        (["%8: f32[B,T,8] = pow.Tensor_Scalar(%1, 0.5)"], call(POW, X, N), ["tanh", "pow"]),
        (["%8: f32[B,T,8] = pow.Tensor_Scalar(%1, 3)"], call(POW, X, ...), ["tanh", "neg"]),
        (["%8: f32[B,T,8] = pow.Tensor_Scalar(%1, 3)"], call(POW, X), ["tanh", "pow"]),
    ],
)  # fmt: skip
def test_what_a_pattern_matches(lines, pattern, left):
    report, calls = found(program(FIRST, *lines), Rule(pattern, as_neg))
    assert calls == left
    assert report.changed == ("neg" in left)


def test_the_largest_match_wins():
    """exp(tanh(x)) is one match, though tanh(x) is one by itself; its parts are gone."""
    small, large = call(TANH, X), call(EXP, call(TANH, X))
    report, calls = found(
        program(FIRST, "%8: f32[B,T,8] = exp(%1)"), Rule(small, as_neg), Rule(large, as_neg)
    )
    assert (report.changed, calls) == (1, ["neg"])


def test_a_replacement_may_pass_and_may_say_why_not():
    lines = FIRST, "%8: f32[B,T,8] = mul.Tensor(%1, %0)"
    seen = []

    def only_y_tanh(at, x, y):
        seen.append(y.target)
        return as_neg(at, x) if y.target is TANH else None

    report, calls = found(program(*lines), Rule(call(MUL, X, Y), only_y_tanh))
    assert calls == ["neg"] and len(seen) == 2  # the second order
    refused, calls = found(program(*lines), Rule(call(MUL, X, Y), lambda at, x, y: "is odd"))
    assert calls == ["tanh", "mul"] and refused.refused == ["mul_tensor: is odd"]
