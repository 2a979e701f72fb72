"""Every pair of methods across axes, and a cover of the triples, on tiny models: refused with a reason, or equal to the
oracle. `cases` says which.

    python tools/matrix/matrix.py [--sample N] [--seed S] [--sizes 2,3] [--having METHOD] [--part K/N] [--results FILE]
    python tools/matrix/matrix.py --page docs/figures [--results FILE …]

Cases run in packs (`packs.py`): a recipe of many methods that is equal settles every pair and triple in it. A method
whose pass changes nothing is wrong: nothing would be compared. Each outcome is a line of FILE as soon as it is
known; cases that are there already are not run again. A METHOD of `--having` stands for its kind. `--page` writes
docs/figures/composition.md of what the FILEs of several processes hold, and all outcomes beside its pictures, where
another machine finds them (`outcomes.jsonl.gz`) and runs what is missing; `--having` does not count them, since the
method may have changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import gzip
import itertools
import json
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.extend(
    str(Path(__file__).resolve().parents[1] / folder) for folder in ("models", "pages", "train")
)
import kinds
import matrix_page
import models
import numpy as np
import torch
from packs import Packs, packed
from rich.progress import track

import accel
from accel.compiler.artifact_build import write_artifact
from accel.compiler.assemble import EVICTION, assemble, assemble_alone
from accel.compiler.build_options import BuildOptions
from accel.compiler.in_process import in_process_model
from accel.compiler.job import Job
from accel.compiler.over_state import keys_of, over_state, shared
from accel.compiler.quality.calibration import make_calibration
from accel.compiler.train.kind import kind_of
from accel.ir.axis import find_axes
from accel.ir.capture.capture import capture
from accel.ir.errors import AccelError, InputError
from accel.ir.program import Program
from accel.ir.recipe import Recipe
from accel.ir.tables import Tables
from accel.passes import run
from accel.passes.kv._shared.tables import measured
from accel.passes.numerics import Base as Promise
from accel.passes.trained import Trained, write
from accel.passes.trained import sample as sample_of
from accel.runtime.model.compiled import CompiledModel

ARCHITECTURES = ("llama", "mistral", "gpt2", "plain_latent")
AXES = ("kv", "depth", "head", "prefill", "weights", "numerics")  # whose methods change the graph
PROMPT, SHORTER, VOCABULARY, LAYERS = 30, 21, 53, 3
ROUNDED = {"weights": 0.2, "kv.codec": 0.02}  # what may turn a number to the next step
FAULTS = (  # no reason, but a bug that was caught
    "Report it",
    "report it",
    "is not valid",
    "was edited or damaged",
    "cannot run it",
    "cannot open it",
)
COMMITTED = Path("docs/figures/composition/outcomes.jsonl.gz")  # beside the page's pictures
# the axes whose methods choose by numbers, which rounding may turn; of depth those that exit by a threshold
CHOOSES = {*EVICTION, "kv.select", "prefill.prune", "prefill.sparse", "depth"}
EXACT = 1e-3  # error relative to the largest logit


@dataclass(frozen=True)
class Case:
    """A recipe for one architecture."""

    architecture: str
    tables: tuple[tuple[str, str], ...]  # (axis, method)

    @property
    def methods(self) -> set[str]:
        return {method for _, method in self.tables}

    def __str__(self) -> str:
        return f"{self.architecture}: " + " + ".join(f"{a}={m}" for a, m in self.tables)


@dataclass
class Outcome:
    """`kind`: refused, equal, or wrong; `why`: the reason, or what differs."""

    case: Case
    kind: str
    why: str = ""
    seconds: float = 0.0
    within: str = ""  # the recipe of more methods that ran, where the case is a part of it


def cases(sizes: tuple[int, ...] = (2, 3), having: Collection[str] = ()) -> list[Case]:
    """What is run, in a fixed order: methods are found by folder.

    Every pair of methods of two axes on the first architecture; of every two axes a member of each kind (`kinds.py`)
    on one of the other architectures after another; of every three axes on one of all. A kind's member is one of
    `having` if it can. So a new method adds pairs, and a method of a new kind a few triples.
    """
    axes = {n: a.names() for n, a in find_axes().items() if n.partition(".")[0] in AXES}
    methods = [(axis, use) for axis in axes for use in axes[axis]]
    few = kinds.members(sorted(methods, key=lambda m: m[1] not in having))
    one = {axis: [use for a, use in few if a == axis] for axis in axes}
    found = []
    for size in sizes:
        for at, chosen in enumerate(itertools.combinations(sorted(axes), size)):
            if size == 2:
                every = itertools.product(*(axes[axis] for axis in chosen))
                pairs = (tuple(zip(chosen, each, strict=True)) for each in every)
                found += [Case(ARCHITECTURES[0], tables) for tables in pairs]
            others = ARCHITECTURES[1:] if size == 2 else ARCHITECTURES
            found += [
                Case(others[(at + i) % len(others)], tables)
                for i, tables in enumerate(covered(chosen, one, at))
            ]
    return found


def covered(
    chosen: Collection[str], uses: Mapping[str, list[str]], turn: int
) -> list[tuple[tuple[str, str], ...]]:
    """Each method of the chosen axes at least once, with one method of each other; which one differs by turn."""
    count = max(len(uses[axis]) for axis in chosen)
    return [
        tuple((a, uses[a][(i + turn * place) % len(uses[a])]) for place, a in enumerate(chosen))
        for i in range(count)
    ]


def sample(chosen: list[Case], count: int, seed: int) -> list[Case]:
    """So many of them, or all."""
    return random.Random(seed).sample(chosen, min(count, len(chosen)))


def stratified(chosen: list[Case], count: int, seed: int) -> list[Case]:
    """So many of them, or all: each adds methods that were not there yet, or else pairs of axes and architectures. The
    time does not grow with the number of methods, and no axis is left out.
    """
    left, found, seen = sample(chosen, len(chosen), seed), list[Case](), set[object]()

    def adds(case: Case) -> int:
        return 10 * len(set(case.tables) - seen) + len(strata(case) - seen)

    missing = {table for case in left for table in case.tables}
    while left and len(found) < count:
        new = (case for case in left if not missing or not missing.isdisjoint(case.tables))
        some = list(itertools.islice(new, 400))  # of all of them the best is hardly better
        best = max(some, key=adds)
        left.remove(best)
        found.append(best)
        seen |= strata(best)
        missing -= seen
    return found


def strata(case: Case) -> set[object]:
    """What a case stands for."""
    axes = [axis for axis, _ in case.tables]
    pairs = set(itertools.combinations(sorted(axes), 2))
    return {*case.tables, *pairs, *((case.architecture, axis) for axis in axes)}


def recipe_of(case: Case) -> Recipe:
    """The case's recipe, its options small."""
    axes = find_axes()
    tables: dict[str, dict[str, Any]] = {}
    for axis, method in case.tables:
        tables[axis] = {"use": method, **axes[axis].small(method)}
    if any(axis in EVICTION for axis in tables):  # the others say nothing without these
        tables.setdefault("kv.score", {"use": "knorm"})
        tables.setdefault("kv.budget", {"use": "uniform", **axes["kv.budget"].small("uniform")})
    return Recipe(name=str(case), tables=tables)


def random_part(program: Program, kind: Any, file: Path, seed: int = 0) -> None:
    """A trained part of random numbers, or a table measured on random tokens, for a program over state."""
    if issubclass(kind, Tables):
        method, generator = kind(), torch.Generator().manual_seed(seed)
        tokens = torch.randint(3, program.facts.vocab_size, (2, 33), generator=generator)
        parts = measured(method, program, [(tokens, torch.ones(2, 32))])
        return write(method, file, parts, sample_of(program, keys_of(program)), {})
    soft, generator = kind_of(kind).over(program, kind()), torch.Generator().manual_seed(seed)
    parts = soft.start(8, seed)
    for part in parts.values():
        for tensor in part.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    write(soft.method, file, parts, soft.names, {})


_PROGRAMS: dict[str, Program] = {}  # of each architecture, over state


@dataclass
class Matrix:
    """Runs cases. A process captures each architecture once, and takes it once through the passes of every recipe."""

    folder: Any = field(default_factory=TemporaryDirectory)  # of trained parts

    def run(self, case: Case) -> Outcome:
        start = time.perf_counter()
        try:
            kind, why = self._compare(case)
        except AccelError as error:
            kind, why = "refused", str(error)
            if any(word in why for word in FAULTS):
                kind = "wrong"
        except Exception as error:  # what a user would meet as a bare traceback
            kind, why = "wrong", f"{type(error).__name__}: {error}"
        return Outcome(case, kind, why, time.perf_counter() - start)

    def assembles(self, case: Case) -> bool:
        """Whether its methods declare nothing that keeps them apart."""
        try:
            assemble_alone(self._recipe(case))
        except AccelError:
            return False
        return True

    def refusal(self, case: Case) -> Outcome | None:
        """Its outcome if it is refused before anything is compared."""
        try:
            self._rewritten(case)
        except AccelError:
            return self.run(case)
        return None

    def strict(self, tables: Collection[tuple[str, str]]) -> Hashable:
        """What a comparison of such a recipe allows: see `_compare`."""
        axes = {axis for axis, _ in tables}
        rounded = max((ROUNDED.get(axis, EXACT) for axis in axes), default=EXACT)
        turns = rounded > EXACT and bool(axes & CHOOSES)
        return rounded, turns, turns and "kv.budget" in axes

    def eager(self, case: Case) -> CompiledModel:
        """A case on the eager target. Raises AccelError where it is refused."""
        job, program, _ = self._rewritten(case)
        return in_process_model(job, program, None, None)

    def _rewritten(self, case: Case) -> tuple[Any, Program, list[Any]]:
        """The job of a case, its program, and a report of each of its own passes."""
        job = Job(assemble(self._recipe(case)), BuildOptions(target="eager"), lambda *_: None)
        program = self._program(case.architecture)
        program.calibration = make_calibration(None, None, program.facts, lambda *_: None)
        passes = job.passes()
        own = shared(passes)
        steps = run(program, passes[own:], done=passes[:own])
        program.calibration = None
        return job, program, steps

    def _compare(self, case: Case) -> tuple[str, str]:
        job, program, steps = self._rewritten(case)
        own_names = {step.name for step in job.plan.passes if not isinstance(step, Promise)}
        if idle := [s.name for s in steps if s.name in own_names and not s.changed]:
            return "wrong", f"{', '.join(idle)} changed nothing, so that nothing is compared"
        axes = {axis for axis, _ in case.tables}
        depth = program.facts.depth
        exits = depth is not None and depth.threshold is not None
        chooses = exits or bool(axes & (CHOOSES - {"depth"}))
        turns = chooses and bool(axes & set(ROUNDED))  # another choice is another model
        bound = max((ROUNDED.get(axis, EXACT) for axis, _ in case.tables), default=EXACT)
        budget = job.plan.methods.get("kv.budget")
        shares = (
            turns and budget is not None and budget.most(2, 2) > 2
        )  # the head that keeps most says how much
        free = {"bytes", "held"} if shares else set[str]()
        oracle = in_process_model(job, program, None, None)
        job.options = BuildOptions()
        with write_artifact(job, program, None, None, None) as built:
            assert built.artifact is not None
            want = drive(oracle)
            for kernels in built.artifact.entries["step"].graphs:
                with accel.load(built.artifact.path, kernels=kernels, threads=1) as model:
                    if off := different(want, drive(model), bound, turns, free):
                        return "wrong", f"{kernels}: {off}"
        return "equal", ""

    def _recipe(self, case: Case) -> Recipe:
        """Its recipe; a method with a trained part gets one that has learnt nothing."""
        recipe, axes = recipe_of(case), find_axes()
        for axis, table in recipe.tables.items():
            kind = axes[axis].method(table["use"])
            if issubclass(kind, Trained | Tables):
                file = Path(self.folder.name) / f"{case.architecture}.{kind.key}.safetensors"
                if not file.exists():
                    random_part(self._program(case.architecture), kind, file)
                table["table" if issubclass(kind, Tables) else "trained"] = str(file)
        return recipe

    def _program(self, architecture: str) -> Program:
        if architecture not in _PROGRAMS:
            module = models.make(architecture, LAYERS)
            program = capture(module, max_context=128)
            program.facts.max_batch = 2
            _PROGRAMS[architecture] = over_state(program)
            gc.freeze()  # a build collects garbage: none of this is
        return _PROGRAMS[architecture].copy()


def drive(model: Any) -> dict[str, Any]:
    """What a session gives: prompts of two lengths, single tokens, several at once, a rewind, a fork."""
    rng = np.random.default_rng(0)  # no token twice: equal keys would be equally worth keeping
    tokens = np.stack([rng.permutation(VOCABULARY)[: PROMPT + 20] for _ in range(2)])
    seen: dict[str, Any] = {}
    with model.session(2) as session:
        at = PROMPT
        seen["prompt"] = session.run(tokens[:, :at], np.array([PROMPT, SHORTER]))
        session.end_prompt()
        seen["bytes"] = session.stats["kv_bytes"]
        for i in range(2):
            seen[f"token {i}"] = session.run(tokens[:, at + i : at + i + 1])
        seen["several"] = session.run(tokens[:, at + 2 : at + 7])
        try:
            session.rewind(session.lengths - 3)
        except InputError:
            seen["rewind"] = "refused"
        seen["after"] = session.run(tokens[:, at + 7 : at + 11])
        with session.fork() as other:
            seen["fork"] = other.run(tokens[:, at + 11 : at + 12])
        seen["own"] = session.run(tokens[:, at + 12 : at + 13])
    with model.session(2) as session:
        seen["as a prompt"] = session.prompt(tokens[:, :PROMPT], np.array([PROMPT, SHORTER]))
        seen["a token after it"] = session.run(tokens[:, PROMPT : PROMPT + 1])
        seen["held"] = session.lengths.tolist(), session.stats["kv_bytes"]
    return seen


def different(
    want: dict[str, Any], got: dict[str, Any], bound: float, turns: bool, free: Collection[str] = ()
) -> str:
    """What of two drives differs, but for what is `free` to; nothing: empty. Where what is kept `turns` with the
    rounding of weights, only what comes before the first choice, and how much is kept, are compared.
    """
    for name, a in want.items():
        b = got.get(name)
        if name in free:
            continue
        if not isinstance(a, np.ndarray):
            if a != b:
                return f"{name}: {a} and {b}"
            continue
        if turns and name != "prompt":
            if not np.isfinite(b).all():
                return f"{name}: no numbers"
            continue
        each = np.abs(a - b).max(axis=-1) / max(1.0, float(np.abs(a).max()))
        # a rounded input may turn a close choice of what is kept, and then a token or two differ
        off = float(np.median(each)) if bound > EXACT else float(each.max())
        if not off <= bound:
            return f"{name}: logits differ by {off:.1e} of the largest"
    return ""


def outcomes(matrix: Matrix, chosen: list[Case], known: Iterable[Outcome]) -> Iterator[Outcome]:
    """Settle cases, those of an architecture together: first what no recipe can be, then the others in packs."""
    packs = Packs(Case, matrix.assembles, matrix.strict)
    for outcome in known:
        packs.settle(outcome.case, outcome.kind)
    for case in sorted(chosen, key=lambda c: c.architecture):
        if matrix.assembles(case):
            packs.add([case])
        else:
            yield (outcome := matrix.run(case))
            packs.settle(case, outcome.kind)
    yield from packed(
        packs,
        matrix.run,
        matrix.refusal,
        lambda case, pack: Outcome(case, "equal", within=str(pack)),
    )


def hand_on(path: Path, done: Iterable[Outcome]) -> None:
    """Outcomes for another machine: without what they took."""
    lines = [json.dumps(dataclasses.asdict(replace(o, seconds=0.0))) for o in done]
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        file.write("\n".join([*sorted(lines), ""]).encode())


def read(path: Path) -> dict[str, Outcome]:
    """Outcomes that a run before left, by case."""
    data = path.read_bytes() if path.is_file() else b""
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode().splitlines()
    found = {}
    for line in lines:
        case, *rest = json.loads(line).values()
        tables = tuple((axis, method) for axis, method in case["tables"])
        outcome = Outcome(Case(case["architecture"], tables), *rest)
        found[str(outcome.case)] = outcome
    return found


def main(
    every: list[Case] | None = None,
    runner: Matrix | None = None,
    results: Path = Path("build/matrix.jsonl"),
    about: str | None = __doc__,
) -> int:
    """Run `every` case (by default those of the graph) that `results` lacks, and tell the counts."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--sample", type=int, help="so many cases, chosen by the seed; default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--part", default="1/1", help="K/N: every Nth of them from the Kth on, for N processes"
    )
    parser.add_argument(
        "--having",
        action="append",
        metavar="METHOD",
        help="only cases that have it; may be repeated",
    )
    if every is None:
        parser.add_argument("--sizes", default="2,3", help="methods of a recipe")
        parser.add_argument("--page", type=Path, help="the folder of the page; nothing is run")
    parser.add_argument("--results", type=Path, default=[results], nargs="+")
    options = parser.parse_args()
    # of a method that is named all is run: it may have changed
    known = read(COMMITTED) if every is None and not options.having else {}
    for path in options.results:
        known |= read(path)
    if every is None and options.page is not None:
        there = {(axis, use) for axis, found in find_axes().items() for use in found.names()}
        done = [o for o in known.values() if there.issuperset(o.case.tables)]
        matrix_page.write(options.page, done, cases())
        hand_on(options.page / "composition" / COMMITTED.name, done)
        return 0
    warnings.filterwarnings("ignore")
    matrix = runner or Matrix()
    if every is None:
        sizes = tuple(int(n) for n in options.sizes.split(","))
        every = cases(sizes, options.having or ())
    chosen = every
    if options.having:
        chosen = [case for case in chosen if case.methods.intersection(options.having)]
    if options.sample:
        chosen = sample(chosen, options.sample, options.seed)
    part, parts = map(int, options.part.split("/"))
    chosen = chosen[part - 1 :: parts]
    todo = [case for case in chosen if str(case) not in known]
    options.results[0].parent.mkdir(parents=True, exist_ok=True)
    with options.results[0].open("a", encoding="utf-8") as out:
        found = outcomes(matrix, todo, [*read(COMMITTED).values(), *known.values()])
        for outcome in track(found, f"{len(todo)} recipes", len(todo)):
            known[str(outcome.case)] = outcome
            print(json.dumps(dataclasses.asdict(outcome)), file=out, flush=True)
    done = [known[str(case)] for case in chosen]
    counts = Counter(o.kind for o in done)
    print(", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())))
    reasons = Counter(o.why.partition(": ")[2][:110] for o in done if o.kind == "refused")
    for reason, n in reasons.most_common(12):
        print(f"{n:5} refused: {reason}")
    for outcome in done:
        if outcome.kind == "wrong":
            print(f"WRONG {outcome.case}: {outcome.why}")
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
