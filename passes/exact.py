"""A program without what weights in fewer bits round: for checks, which so find a mistake whatever the bits."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.ops.experts import expert_linear
from accel.ir.ops.op import operand_of
from accel.ir.ops.quantized import (
    EXACT,
    PRODUCTS,
    dequantize,
    quantized_embedding,
    quantized_expert_linear,
    quantized_linear,
)
from accel.ir.program import Program

aten = torch.ops.aten
_CODED = (*PRODUCTS, quantized_embedding.default)
_ROWS = 1 << 22  # elements of a weight that are compared at a time
# How far codes may be from the weight that they were rounded from. Measured on a real model of 135M weights with rows
# of 576 and 1536 columns in 4 and 8 bits, to nearest, with feedback (GPTQ) and cut off (AWQ): rows were 0.93 to 1.03
# times as long, and whole weights 0.99 to 1; by the feedback of random tokens, of which one has a massive activation, a
# row was 0.71 times.
_SCALE = 0.4  # what a row of codes may be longer or shorter along its weight, as a share
_WHOLE = 0.05  # the same of all rows together
# What codes of few bits are shorter by besides, where their steps err least: the error's share. Of normal numbers it is
# 0.12 and 0.04 (Max, Quantizing for Minimum Distortion, 1960); by feedback 0.18 and 0.05 were measured.
_SHORTER = {2: 0.2, 3: 0.05}


def exact(program: Program) -> Program:
    """The program with products of few bits over inputs that are not rounded; itself where it has none."""
    if not program.nodes(*PRODUCTS):
        return program
    same = program.copy()
    same.params = program.params
    for node in same.nodes(*PRODUCTS):
        node.target = EXACT[node.target]
    return same


def restored(program: Program, names: Collection[str]) -> Program:
    """The program over the numbers that these weights were rounded from (`Weights.origins`); itself where there
    are none.
    """
    if not names:
        return program
    same = program.copy()
    for name in names:
        if name in same.params:
            same.params[name] = program.params.origins[name].stored
    for node in same.nodes(*_CODED):
        codes = operand_of(node, "q")
        if isinstance(codes, fx.Node) and codes.target in names:
            _restore(node, codes)
    return same


def _restore(node: fx.Node, weight: fx.Node) -> None:
    """Let a node of few bits read the whole weight, and bear no mark of its codes."""
    if node.target is quantized_linear.default:
        args: tuple[Any, ...] = (operand_of(node, "x"), weight, operand_of(node, "bias"))
        node.target = aten.linear.default
    elif node.target is quantized_expert_linear.default:
        args = (operand_of(node, "x"), operand_of(node, "ids"), weight, False)
        node.target = expert_linear.default
    else:
        args = (weight, operand_of(node, "ids"))
        node.target = aten.embedding.default
    node.args, node.kwargs = args, {}


def stray(program: Program, names: Collection[str]) -> str | None:
    """What is wrong with codes that are not of the numbers that they were rounded from, within what rounding may do;
    none where those of all these names are.
    """
    for name in names:
        along = own = 0.0
        row, most, shorter = 0, program.params.origins[name].steps, 0.0
        for codes, weight, step, bits in _parts(program, name):
            shorter = _SHORTER.get(bits, 0.0)
            length = (weight * weight).sum(1)
            share = (codes * weight).sum(1)
            along, own = along + float(share.sum()), own + float(length.sum())
            scale = torch.where(length > 0, share / length.clamp(min=1e-30), 1.0)
            apart = ((codes - weight) ** 2).mean(1).sqrt()
            off = torch.where(apart == 0, 0.0, apart / step)  # a row of zeros has no step
            least, longest = 1 - _SCALE - shorter, 1 + _SCALE
            wrong = ~((scale >= least) & (scale <= longest) & (off <= most))
            if bool(wrong.any()):
                worst = int(torch.where(wrong, off.nan_to_num(torch.inf), -1.0).argmax())
                return (
                    f"row {row + worst} of {name} is {float(scale[worst]):.3g} times what it was rounded from, and "
                    f"{float(off[worst]):.2g} steps of its codes off"
                )
            row += len(weight)
        if own and not 1 - _WHOLE - shorter <= along / own <= 1 + _WHOLE:
            return f"{name} is {along / own:.3g} times what it was rounded from"
    return None


def _parts(program: Program, name: str) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    """Of a weight that was rounded, a few rows at a time: what it stands for and was rounded from [n,K], the step
    [n] between two neighbouring numbers that a row may hold, and the bits of a number.
    """
    params = program.params
    if name not in params:  # nothing reads it
        return
    for node in program.nodes(*_CODED):
        codes = operand_of(node, "q")
        if isinstance(codes, fx.Node) and codes.target == name:
            operands = (codes, operand_of(node, "scales"), operand_of(node, "zeros"))
            parts = [None if n is None else params[str(n.target)] for n in operands]
            sizes = operand_of(node, "bits"), operand_of(node, "block")
            yield from _coded(parts, params.origins[name].stored.read(), *sizes)
            return
    weight, half = (
        t.float().reshape(-1, t.shape[-1])
        for t in (params.origins[name].stored.read(), params[name])
    )
    # of 11 bits, or of the numbers next to 0
    yield half, weight, (weight * 2.0**-10).square().mean(1).sqrt() + 2.0**-24, 16


def _coded(
    parts: list[Tensor | None], origin: Tensor, bits: int, block: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    """The same of a matrix [N,K], or of experts [X,N,K], in codes."""
    if origin.dim() == 2:
        parts, origin = [None if p is None else p[None] for p in parts], origin[None]
    many = max(1, _ROWS // origin.shape[-1])
    for expert, weight in enumerate(origin):
        own = [None if p is None else p[expert] for p in parts]
        for start in range(0, len(weight), many):
            q, scales, zeros = (None if p is None else p[start : start + many] for p in own)
            assert q is not None and scales is not None
            codes = dequantize(q, scales, zeros, bits, block)[:, : weight.shape[1]]
            yield codes, weight[start : start + many], scales.square().mean(1).sqrt(), bits
