"""Every loop, drafter, tree, length and rule with every method that changes the graph, on tiny models: refused with a
reason, or the tokens of plain decoding over the same artifact.

    python tools/matrix/matrix_loops.py [--sample N] [--seed S] [--having METHOD] [--part K/N] [--results FILE]

A loop that searches, or runs tokens again, has other tokens than plain decoding: those of the eager target count there.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))
import matrix
import models
import numpy as np
import tokenizers
from matrix import ARCHITECTURES, AXES, EXACT, ROUNDED, VOCABULARY, Case, Matrix, covered

import accel
from accel.compiler import draft_build
from accel.compiler.artifact_build import write_artifact
from accel.compiler.assemble import assemble
from accel.compiler.build_options import BuildOptions
from accel.compiler.in_process import in_process_model
from accel.compiler.job import Job
from accel.compiler.optimize import build
from accel.compiler.pipeline import pipeline
from accel.compiler.quality.calibration import make_calibration
from accel.ir.axis import find_axes
from accel.ir.invariants import Invariant
from accel.ir.program import Program
from accel.ir.recipe import Recipe
from accel.passes import run
from accel.passes.weights._calibrated import Calibrated
from accel.passes.weights._kept import keeping
from accel.runtime.artifact.artifact import copy_artifact, open_artifact
from accel.runtime.decode.costs import Costs
from accel.runtime.decode.trained_part import TrainedPart
from accel.runtime.draft import Base as Drafts
from accel.runtime.inputs.infill import FORMS
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import HOST
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.model.load import from_artifact
from accel.runtime.model.output import Output
from accel.runtime.speculation.guard import MOST, Guard

NEW, LONGER = 18, 64  # tokens of each row
_RNG = np.random.default_rng(1)
PROMPTS = [
    np.tile(_RNG.permutation(VOCABULARY)[:9], 3)[:23],
    _RNG.permutation(VOCABULARY)[:40],
]  # again; or each once
DISTINCT = [
    _RNG.permutation(VOCABULARY)[:n] for n in (23, 14)
]  # no token twice: equal keys are equally worth keeping
FREE = Costs((1, 32), (1.0, 1.0))  # what calls cost, for all that the guard knows
CLOSE = 1e-3  # between the best two logits, of the largest: a token that rounding may turn


def is_tried(axis: str, name: str) -> bool:
    """Whether a method is to give what plain decoding does: none for models that fill masks, and no rule that verifies
    nothing.
    """
    method = find_axes()[axis].method(name)
    return not getattr(method, "masked_diffusion", False) and getattr(method, "verifies", True)


def cases() -> list[Case]:
    """Each method between calls, the rest of a recipe by default: with none of the graph, on every architecture; with
    each of the graph on the first; on each other one with one of each axis of the graph. What is not to give the tokens
    of plain decoding is left out.
    """
    axes = {name: axis.names() for name, axis in find_axes().items()}
    left = {"loop": {"autoregressive", "speculative"}}
    hosts = {
        a: some
        for a in HOST
        if (some := [m for m in axes[a] if m not in left.get(a, ()) and is_tried(a, m)])
    }
    graph = {a: names for a, names in sorted(axes.items()) if a.partition(".")[0] in AXES}
    found = []
    for turn, architecture in enumerate(ARCHITECTURES):
        for host, names in hosts.items():
            found += [Case(architecture, ((host, name),)) for name in names]
            for axis, uses in graph.items():
                pairs = {axis: uses, host: names}
                some = (
                    covered((host, axis), pairs, turn)
                    if turn
                    else itertools.product(*([(a, use) for use in pairs[a]] for a in (host, axis)))
                )
                found += [Case(architecture, tuple(tables)) for tables in some]
    return found


@dataclasses.dataclass
class Loops(Matrix):
    """Runs cases. Where a method of trees, lengths or rules needs a drafter, one that fits it drafts. A trained head is
    the bundled one, which says of other models where a draft ends, too.
    """

    _drafts: dict[Hashable, Path] = dataclasses.field(default_factory=dict)

    def _recipe(self, case: Case) -> Recipe:
        axis, name = case.tables[0]
        graph = super()._recipe(Case(case.architecture, case.tables[1:]))
        tables = {axis: {"use": name, **find_axes()[axis].small(name)}, **reaching(axis, name)}
        if drafts := tables.get("draft", {}).get("use"):
            kind = find_axes()["draft"].method(drafts)
            if kind.fills:
                tables["draft"]["path"] = str(self._filling(case.architecture))
            elif kind.draft_folder is not Drafts.draft_folder:
                tables["draft"]["path"] = str(
                    self._drafting(case.architecture, matrix.LAYERS if axis == "loop" else 1)
                )
        return Recipe(name=str(case), tables={**graph.tables, **tables})

    def _drafting(self, architecture: str, size: int) -> Path:
        """A model of so many layers that drafts for those of an architecture: one that knows little, or, for a loop of
        which no draft would come then, the same model.
        """
        folder = Path(self.folder.name) / f"{size}.{architecture}"
        if not folder.exists():
            module = models.make(architecture, size)
            if hasattr(module, "save_pretrained"):  # built along
                module.save_pretrained(folder)
                return folder
            accel.optimize(
                module, draft_build.TREES, out=folder, max_context=128, max_batch=8, verify=False
            ).close()
        return folder

    def _filling(self, architecture: str) -> Path:
        """A model that fills masks, with the tokens of an architecture."""
        folder = Path(self.folder.name) / f"fills.{architecture}"
        if not folder.exists():
            module, size = models.llada(), self._program(architecture).facts.vocab_size
            module.resize_token_embeddings(size)
            module.config.mask_token_id = size - 1
            module.save_pretrained(folder)
        return folder

    def _built(
        self, path: Path, recipe: Recipe, options: BuildOptions, folder: Path | None
    ) -> CompiledModel:
        """A model that drafts, as `build` gives it; each is built once, and copied."""
        key = (path, repr(recipe.tables), options.max_context, options.max_batch)
        if key not in self._drafts:
            out = Path(self.folder.name) / f"built.{len(self._drafts)}"
            build(path, recipe, options, out).close()
            self._drafts[key] = out
        found = open_artifact(self._drafts[key])
        if folder is not None:
            copy_artifact(found, folder)
        return accel.load(folder or found.path)

    def strict(self, tables: Collection[tuple[str, str]]) -> Hashable:
        """Tokens are compared, whatever is beside them; what a search finds, up to rounding."""
        return max((ROUNDED.get(axis, EXACT) for axis, _ in tables), default=EXACT)

    def _rewritten(self, case: Case) -> tuple[Any, Program, Program | None]:
        """The job of a case, its program, and that of a model which drafts for itself."""
        job = Job(assemble(self._recipe(case)), BuildOptions(), lambda *_: None)
        job.build_draft = draft_build.builder(job.plan, self._built, BuildOptions(verify=False))
        program = self._program(case.architecture)
        program.facts.max_batch = 8
        program.calibration = make_calibration(None, None, program.facts, lambda *_: None)
        passes = job.passes()
        own = matrix.shared(passes)
        plan = draft_build.own_plan(job.plan, program.facts.max_context)
        beside = None if plan is None else program.copy()
        run(program, passes[own:], done=passes[:own])
        program.calibration = None
        if plan is not None and beside is not None:
            job.self_draft = Job(plan, BuildOptions(verify=False), lambda *_: None)
            _own(job.self_draft, beside, program)
        return job, program, beside

    def _compare(self, case: Case) -> tuple[str, str]:
        job, program, beside = self._rewritten(case)
        with write_artifact(job, program, None, None, None, beside) as built:
            loop = job.plan.methods.get("loop")
            if loop is not None and (loop.searches or Invariant.LATER_READS in loop.relies):
                oracle = in_process_model(job, program, None, None)
                assert built.artifact is not None
                with from_artifact(built.artifact, threads=1) as model:
                    model.tokenizer = oracle.tokenizer = _words(model.facts.vocab_size)
                    return _like_oracle(
                        oracle,
                        model,
                        max((ROUNDED.get(a, EXACT) for a, _ in case.tables), default=EXACT),
                    )
            return self._like_plain(built)

    def _like_plain(self, built: CompiledModel) -> tuple[str, str]:
        """What the artifact gives, and what it gives without guesses."""
        with opened(built) as (plain, model):
            for new in (NEW, LONGER):  # a text without repetitions gives some drafters nothing yet
                got = _generated(model, PROMPTS, new)
                told = got.stats["speculation"]
                if not told or told["drafted"]:
                    return alike(_generated(plain, PROMPTS, new), got, PROMPTS, plain)
            return "wrong", "nothing was drafted, so that nothing is compared"


def _own(job: Any, beside: Program, program: Program) -> None:
    """Make of a program that was captured that by which the model drafts for itself, as a build does."""
    job.plan.passes = keeping(beside, job.plan.passes)
    passes = pipeline(recipe_passes=job.plan.every)
    done = matrix.shared(passes)
    run(beside, passes[done:], done=passes[:done])
    beside.calibration = None
    rounded = any(isinstance(step, Calibrated) for step in job.plan.passes)
    draft_build.share(beside, program, rounded)


def reaching(axis: str, name: str) -> dict[str, Any]:
    """The drafts by which a method between calls is reached, as the tables of other axes."""
    axes, model = find_axes(), {"draft": {"use": "model"}}
    if axis == "verify":
        return _judged(name)
    if axis == "length":  # a head says which drafts it learnt of
        return dict(getattr(axes["length"].method(name), "drafts", model))
    if axis == "tree":
        odds = Invariant.PROBABILITIES in axes["tree"].build(name).relies
        return model if odds else {"draft": {"use": "token-recycling"}}
    return model if axis == "loop" and axes["loop"].method(name).asks.get("draft") == "" else {}


def _judged(name: str) -> dict[str, Any]:
    """Drafts that a rule takes: chains, the trees that their drafter's own shape gives, or another's."""
    axes = find_axes()
    rule = axes["verify"].build(name)
    if not rule.branches:
        return {"draft": {"use": "prompt-lookup"}}
    own = axes["tree"].build(axes["draft"].build("token-recycling").asks["tree"])
    if not own.breaks & rule.relies:
        return {"draft": {"use": "token-recycling"}}
    shapes = {use: axes["tree"].build(use) for use in axes["tree"].names()}
    fit = (u for u, s in shapes.items() if s.branches and not s.breaks & rule.relies)
    return {"draft": {"use": "model"}, "tree": {"use": next(fit)}}


@contextmanager
def opened(built: CompiledModel) -> Iterator[tuple[CompiledModel, CompiledModel]]:
    """An artifact as it decodes plainly, and as its recipe says: it never rests from guessing."""
    assert built.artifact is not None
    with (
        from_artifact(built.artifact, threads=1, plain=True) as plain,
        from_artifact(built.artifact, threads=1) as model,
    ):
        model._costs = FREE
        model.tokenizer = _words(model.facts.vocab_size)
        with patch.object(Guard, "limit", MOST), patch.object(TrainedPart, "fit", lambda *_: None):
            yield plain, model


@cache
def _words(size: int) -> Tokenizer:
    """A tokenizer of so many words, the last of which are sentinels: loops that read text find what they need."""
    names = FORMS[1].marks
    vocabulary = {f"w{i}": i for i in range(size - len(names))}
    vocabulary |= {name: len(vocabulary) + i for i, name in enumerate(names)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return Tokenizer(made.to_str().encode())


def _generated(model: CompiledModel, prompts: list[Any], new: int = NEW) -> Output:
    return model.generate(prompts, new, eos=[])


def alike(
    want: Output, got: Output, prompts: list[Any], plain: CompiledModel | None
) -> tuple[str, str]:
    """Whether the tokens are the same, up to one whose logits were as good as those of another."""
    for row, (a, b) in enumerate(zip(want.tokens, got.tokens, strict=True)):
        if a == b:
            continue
        at = next(
            (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
        )
        if (
            plain is None
            or at >= min(len(a), len(b))
            or not _close(plain, prompts[row], a, b[at], at)
        ):
            return "wrong", f"row {row}: token {at} of {a} is other in {b}"
    return "equal", ""


def _like_oracle(oracle: CompiledModel, model: CompiledModel, bound: float) -> tuple[str, str]:
    """Whether a loop that does not decode plainly finds the same texts; where rounded numbers may have turned it,
    whether both models find each of the two texts as likely.
    """
    want, got = (_generated(m, DISTINCT) for m in (oracle, model))
    for row, (a, b) in enumerate(zip(want.tokens, got.tokens, strict=True)):
        if a == b:
            continue
        if bound <= EXACT:
            return "wrong", f"row {row}: {a} and {b}"
        for text in (a, b):
            likely = [_likelihood(m, DISTINCT[row], text) for m in (oracle, model)]
            if not abs(likely[0] - likely[1]) <= bound * len(text):
                return "wrong", f"row {row}: {a} and {b}; the log-probability of {text} is {likely}"
    return "equal", ""


def _likelihood(model: CompiledModel, prompt: Any, tokens: list[int]) -> float:
    """The sum of the log-probabilities of tokens after a prompt."""
    total = 0.0
    with model.session() as session:
        logits = session.prompt(prompt[None])[0, 0]
        for token in tokens:
            row = logits.astype(np.float64) - logits.max()
            total += float(row[token] - np.log(np.exp(row).sum()))
            logits = session.run([[token]])[0, 0]
    return total


def _close(plain: CompiledModel, prompt: Any, tokens: list[int], other: int, at: int) -> bool:
    """Whether rounding may have chosen the other token at this place."""
    with plain.session() as session:
        logits = session.prompt(prompt[None])[0, 0]
        for token in tokens[:at]:
            logits = session.run([[token]])[0, 0]
    return bool(logits.max() - logits[other] <= CLOSE * np.abs(logits).max())


def main() -> int:
    return matrix.main(cases(), Loops(), Path("build/matrix-loops.jsonl"), __doc__)


if __name__ == "__main__":
    sys.exit(main())
