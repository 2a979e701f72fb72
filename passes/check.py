"""The numeric check: after the passes the program still computes the captured model's logits.

Storing weights in fewer bits moves the logits by more than a mistake may, so what a pass wired and what it rounded are
checked apart: the program over the numbers that its weights were rounded from is held to the logits of before, and the
codes to these numbers. From there on the program with exact inputs of its products is the measure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from accel.ir.capture.examples import example
from accel.ir.entries.genai import GENAI
from accel.ir.errors import Miscompiled, PassError
from accel.ir.invariants import Invariant
from accel.ir.ops.codec import encode_rows
from accel.ir.ops.groups import group_quantize
from accel.ir.ops.quantized import PRODUCTS
from accel.ir.program import Program
from accel.ir.state import Part
from accel.ir.ties import TOPK
from accel.passes import Pass, named
from accel.passes.drive import (
    in_blocks,
    run_both_ways,
    run_concatenated,
    run_in_blocks,
    run_whole,
)
from accel.passes.exact import exact, restored, stray

BATCH, LENGTH = 2, 13  # unequal, and long enough to show a window or a wrong broadcast
STEP_OF_CODES = (
    0.02  # of the largest logit: where a cache rounds, a value may go to the next step of its codes
)
NOISE = 2.0  # how many times as noisy as the reference's rounding another one may be
_CODES = {"uint8", "int8", "float16", "bfloat16"}  # what a cache rounds to
_LAST = 1e-6  # of a number: what another order of additions may change
_FLOOR = 1e-3  # of the largest logit: noise that is always allowed


@dataclass
class NumericCheck:
    """Compares the step entry with the captured program's logits: on `text` [2,13] where it is given, else on random
    tokens.

    A stateful program is driven as a session drives it: in one call, and split into a prefill, a
    single token and the rest, padded, with slots to spare.

    cases: tokens [B,T] and the logits [B,T,V] that later passes are held to, with nothing rounded on the way.
    rounded: the logits of each case as the reference rounds inputs of products; empty where none does.
    """

    program: Program
    text: Tensor | None = None
    cases: list[tuple[Tensor, Tensor]] = field(init=False)
    rounded: list[Tensor] = field(default_factory=list)
    apart: list[list[Tensor]] = field(default_factory=list)  # of each case, where its ways differ
    known: set[str] = field(default_factory=set)  # weights in fewer bits that were checked
    by_width: bool = (
        False  # whether a pass lets calls of a few tokens compute otherwise than longer ones
    )

    def __post_init__(self) -> None:
        self.begin(self.program)

    def begin(self, program: Program) -> None:
        """Hold later passes to what the program computes now."""
        length = min(LENGTH, program.facts.max_context)
        tokens, _ = example(BATCH, length, program.facts.vocab_size, 7)
        if self.text is not None:
            tokens = self.text[:BATCH, :length].contiguous()
        self.cases, self.known = [(tokens, torch.empty(0))], set(program.params.origins)
        self._rebase(program, None)

    def __call__(self, program: Program, step: Pass) -> float:
        """The error, relative to the largest logit (at least 1): the largest of all tokens.

        After a pass that declares what it loses, and where a cache rounds, it is that of nine tokens in ten, for one
        token of a few may carry an activation that is hundreds of times as large as others. Where the model
        chooses (experts, keys), rounding may turn a close choice, and that token's logits are others (in 8 bits so
        did 10 of 25 small random mixtures): half of the tokens count there.

        Raises:
            Miscompiled: it computes something else, or codes are not of the weights that they stand for.
            PassError: a pass loses more than it declares.
        """
        fresh = program.params.origins.keys() - self.known
        plain = exact(restored(program, fresh))
        with plain.params.read_once():
            errors, logits = self._errors(plain, step.entry)
        lossy = step.error > Pass.error and not fresh
        slack = codes_slack(program)
        share = 0.9 if lossy or slack else 1.0
        worst = quantile(errors, 0.5 if share < 1 and program.nodes(TOPK) else share)
        bound = max(Pass.error if fresh else step.error, slack)
        if worst > bound and codes_turn(program):
            bound = max(bound, NOISE * quantile(self._moved(plain, step.entry, logits), share))
        if worst > bound:
            said = f"the logits differ by {worst:.2e} of the largest, more than {bound:g}"
            if lossy:
                raise PassError(
                    f"{named(step)} changed what the program computes by more than it declares: {said}; choose "
                    f"another method, or {UNCHECKED}"
                )
            raise differs(f"{step.name} changed what the program computes: {said}", program)
        if fresh and (wrong := stray(program, fresh)):
            raise differs(f"{step.name} changed what the program computes: {wrong}", program)
        if fresh or lossy:
            self.known |= fresh
            self.by_width |= Invariant.DECODE_WIDTH in getattr(step, "breaks", ())
            self._rebase(program, logits if lossy else None)
        return worst

    def _errors(self, program: Program, entry: str) -> tuple[Tensor, list[list[Tensor]]]:
        """Of each token [n] of every way the error, and of each case the logits of every way."""
        errors, found = [torch.zeros(0)], []
        for case, (tokens, want) in enumerate(self.cases):
            run = run_concatenated if entry == GENAI.name else run_both_ways
            ways = run(program, tokens)
            found.append([got for got, _ in ways])
            for way, (got, rows) in enumerate(ways):
                part = self.apart[case][way] if self.apart else want[:, rows]
                errors.append(token_errors(got, part))
            if entry == "step" and (pair := run_in_blocks(program, tokens)):
                errors.append(token_errors(*pair))
        return torch.cat(errors), found

    def _moved(self, program: Program, entry: str, logits: list[list[Tensor]]) -> Tensor:
        """Of each token [n] of every way, what is left of the last places of the model's vectors: where a cache keeps a
        few bits, and later layers go by what was kept, that may be more than `STEP_OF_CODES`. `logits`: the program's.
        """
        other = nudged(program)
        with other.params.read_once():
            moved = self._errors(other, entry)[1]
        pairs = zip(sum(moved, []), sum(logits, []), strict=True)
        return torch.cat([token_errors(got, want) for got, want in pairs])

    def _rebase(self, program: Program, logits: list[list[Tensor]] | None) -> None:
        """After a pass that may move the logits, later ones are held to what it left: where tokens are
        encoded in blocks, way by way, for what a call itself brings is exact; and where the length of a call
        decides what it computes. `logits`: those of every way
        with nothing rounded, where they are known.
        """
        blocks = in_blocks(program) or self.by_width
        with program.params.read_once():
            if logits is None:
                plain, logits = exact(program), []
                for tokens, _ in self.cases:
                    ways = run_both_ways(plain, tokens) if blocks else [(run_whole(plain, tokens),)]
                    logits.append([way[0] for way in ways])
            self.cases = [(case[0], ways[0]) for case, ways in zip(self.cases, logits, strict=True)]
            self.apart = logits if blocks else []
            rounds = bool(program.nodes(*PRODUCTS))
            self.rounded = [run_whole(program, t) for t, _ in self.cases] if rounds else []


def nudged(program: Program) -> Program:
    """The program with vectors, such as the weights of norms, off by a few units of their last place."""
    same = program.copy()
    for name in same.params:
        if same.params.blank(name).dim() <= 1 and same.params.blank(name).is_floating_point():
            same.params[name] = same.params.stored(name).changed(nudge)
    return same


def nudge(value: Tensor) -> Tensor:
    """The same numbers, each off by a few units of its last place."""
    if value.is_meta:
        return value
    by = torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
    return value * (1 + _LAST * by).to(value.dtype)


UNCHECKED = "give verify=False to build without the check"


def differs(said: str, program: Program) -> PassError:
    """The error of a program that computes something else: accel's fault, unless the model leaves a choice open."""
    if program.facts.tied:
        return PassError(
            f"{said}; but some of its experts are equally good (a router of zeros or of equal rows), so rounding "
            f"decides which of them run: load trained weights, or {UNCHECKED}"
        )
    return Miscompiled(f"{said}. Please report it with the model's configuration, or {UNCHECKED}")


def token_errors(got: Tensor, want: Tensor) -> Tensor:
    """Of each token the largest difference of its logits [B,T,V], relative to the largest logit (at least 1)."""
    scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    return ((got - want).abs().amax(-1) / scale).flatten()


def quantile(errors: Tensor, share: float) -> float:
    """The error that so many of them do not exceed; no number is as infinity is."""
    if not errors.numel():
        return 0.0
    found = float(errors.float().quantile(share))
    return found if found == found else float("inf")


def noise(got: Tensor, rounded: Tensor, chooses: bool) -> tuple[float, float] | None:
    """Of the errors of another rounding, and of the reference's own, both against nothing rounded, a quantile and what
    it may be, where it is more: half of the tokens, or nine in ten, which is not asked where rounding turns choices.
    """
    for share in (0.5,) if chooses else (0.5, 0.9):
        found, bound = quantile(got, share), NOISE * quantile(rounded, share) + _FLOOR
        if found > bound:
            return found, bound
    return None


def codes_slack(program: Program) -> float:
    """How far the logits may move between two orders of the same additions, relative to the largest, where the
    cache rounds: a difference in the last place may take a value to the next step of its codes.
    """
    return STEP_OF_CODES if program.nodes(encode_rows.default, group_quantize.default) else 0.0


def codes_turn(program: Program) -> bool:
    """Whether keys or values are kept in codes, by whatever operators: what these may move is measured, by `nudge`."""
    kept = [state for state in program.state if state.part in (Part.KEYS, Part.VALUES)]
    return any(state.dtype in _CODES for state in kept)
