"""smoke(model): build a small clone of an architecture with every recipe and target, in seconds each.

Run it first on a new architecture: it needs a configuration, but no weights.
"""

from __future__ import annotations

import copy
import importlib
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from accel.compiler.assemble import GRADES, Plan, assemble
from accel.compiler.build_options import TARGETS
from accel.compiler.optimize import optimize
from accel.compiler.smoke.clone import own_logits, sources
from accel.compiler.smoke.source import small_model
from accel.ir.axis import find_axes
from accel.ir.capture.inspect import inspect
from accel.ir.capture.rounding import apart
from accel.ir.errors import AccelError, InputError, Miscompiled, PassError, RecipeError, unknown
from accel.ir.recipe import Recipe, bundled
from accel.ir.ties import TOPK
from accel.passes import Pass
from accel.runtime.backends.layer_inputs import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.runtime.model.compiled import CompiledModel

STATUSES = ("right", "approximate", "refused", "wrong", "crashed")
LONGEST, PREFILL, STEPS, KEPT = (
    24,
    13,
    5,
    9,
)  # tokens: of a row, its first call, single ones, not rewound
RAGGED = (11, 4, 8)
CODEC = "kv.codec"
Progress = Callable[[str, float], None]
PARTS = ("ir", "passes", "lowering", "runtime", "compiler")  # where a crash is placed


@dataclass(frozen=True)
class Cell:
    """The result of one recipe on one target.

    Attributes:
        status: "right" (equal to the module's logits up to rounding), "approximate" (within the
            declared error of a lossy recipe), "refused", "wrong" or "crashed".
        error: largest difference of a logit from the module's, relative to the largest logit (at
            least 1), divided where rounding alone takes a token beyond the bound (`compare`); None if nothing ran.
        where: the call with the largest error, or the line of a crash.
        reason: of a refusal, a crash or a wrong result.
    """

    recipe: str
    target: str
    status: str
    error: float | None = None
    where: str = ""
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Smoke:
    """The results of all recipes and targets."""

    model: str
    layers: int
    parameters: int
    notes: list[str]
    seconds: float = 0.0
    cells: list[Cell] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if nothing was wrong and nothing crashed; a refusal is not a failure."""
        return not any(c.status in ("wrong", "crashed") for c in self.cells)

    def to_json(self) -> dict[str, Any]:
        """The JSON form, as printed by `--json`."""
        return {**asdict(self), "ok": self.ok}


def smoke(
    model: Any,
    recipes: Sequence[Any] | str | None = None,
    targets: Sequence[str] | str | None = None,
    *,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Smoke:
    """Build a small clone of a model with random weights, with recipes and targets, and compare it with PyTorch.

    Args:
        model: a directory with a config.json (weights are not read), a config.json, a transformers
            configuration, model or model type, `package.module:callable` that returns an
            `nn.Module`, or such a module, which is used unchanged.
        recipes: each as for `optimize`, tried by itself; one name stands for itself alone. Default: every bundled
            recipe.
        targets: of "onnx", "eager" and "triton", one or several. Default: the first two.
        trust_remote_code: allow Python code from the model directory to run.
        progress: called with (name of the step, fraction of the work done).

    Raises:
        AccelError: the model, recipe or target does not exist, or no small model can be built.
    """
    start = time.perf_counter()
    report = progress or (lambda *_: None)
    recipes = [recipes] if isinstance(recipes, str) else recipes
    targets = [targets] if isinstance(targets, str) else targets
    targets = list(TARGETS[:2] if targets is None else targets)
    for target in targets:
        if target not in TARGETS:
            raise RecipeError(unknown("target", target, TARGETS))
    plans = [assemble(_small(Recipe.load(r))) for r in (bundled() if recipes is None else recipes)]
    report("clone", 0.0)
    with _quiet():
        source = small_model(model, trust_remote_code)
        cells = []
        for index, (plan, target) in enumerate((p, t) for p in plans for t in targets):
            report(f"{plan.recipe.name} for {target}", index / len(plans) / len(targets))
            cells.append(_cell(source.model, plan, target))
    report("done", 1.0)
    count = sum(p.numel() for p in source.model.parameters())
    seconds = round(time.perf_counter() - start, 1)
    return Smoke(source.name, source.layers, count, source.notes, seconds, cells)


def _small(recipe: Recipe) -> Recipe:
    """The recipe with blocks of a codec that few tokens fill. Sizes of other methods stay: random weights say nothing
    of how near the module a model is that evicts, or reads some pages only.
    """
    table = recipe.tables.get(CODEC)
    if table is None:
        return recipe
    small = find_axes()[CODEC].small(table["use"])
    return replace(recipe, tables={**recipe.tables, CODEC: {**table, **small}})


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of models that are not trained and of small sizes."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def _cell(model: nn.Module, plan: Plan, target: str) -> Cell:
    """Build one recipe for one target and compare it with the module."""
    start = time.perf_counter()
    found: dict[str, Any]
    try:
        with optimize(
            copy.deepcopy(model), plan.recipe, target=target, max_context=64, max_batch=len(RAGGED)
        ) as compiled:
            errors = compare(model, compiled, _turns(plan, compiled), allowed(plan))
            found = judge(plan, errors)
    except Exception as error:
        found = _failed(error)
    seconds = round(time.perf_counter() - start, 1)
    return Cell(plan.recipe.name, target, **found, seconds=seconds)


def _turns(plan: Plan, compiled: CompiledModel) -> bool:
    """Whether what a recipe rounds may turn a choice of the model, of experts or keys."""
    rounds = any(step.error > Pass.error for step in plan.passes)
    return rounds and bool(compiled.program.nodes(TOPK))


def _failed(error: Exception) -> dict[str, Any]:
    """A refusal, numbers that a check found wrong, or a crash: in a pass or anywhere else."""
    reason = " ".join(str(error).split())
    if isinstance(error, Miscompiled):
        return {"status": "wrong", "where": "a build check", "reason": reason}
    cause = error.__cause__ if isinstance(error, PassError) else error
    if cause is None or isinstance(cause, AccelError):
        return {"status": "refused", "reason": reason}
    frames = traceback.extract_tb(cause.__traceback__)
    own = [
        Path(p).resolve()
        for part in PARTS
        for p in importlib.import_module(f"accel.{part}").__path__
    ]
    paths = [Path(f.filename).resolve() for f in frames]
    mine = [f for f, p in zip(frames, paths, strict=True) if any(map(p.is_relative_to, own))]
    mine = mine or list(frames)
    where = f"{Path(mine[-1].filename).name}:{mine[-1].lineno}" if mine else ""
    said = " ".join(str(cause).split())
    return {"status": "crashed", "where": where, "reason": f"{type(cause).__name__}: {said}"}


def judge(plan: Plan, errors: dict[str, float]) -> dict[str, Any]:
    """The status of errors by part: what an exact recipe may round, a lossy one declares."""
    part, error = max(errors.items(), key=lambda item: item[1])
    exact, bound = plan.grade != GRADES[-1], allowed(plan)
    found = {"error": error, "where": part}
    if error <= bound:
        return {"status": "right" if exact else "approximate", **found}
    more = ", ".join(f"{p} {e:.1e}" for p, e in errors.items() if not e <= bound)
    return {"status": "wrong", **found, "reason": f"more than {bound:.0e}: {more}"}


def allowed(plan: Plan) -> float:
    """The largest error that a recipe declares."""
    exact = plan.grade != GRADES[-1]
    return Pass.error if exact else max(Pass.error, sum(p.error for p in plan.passes))


def compare(
    model: nn.Module, compiled: CompiledModel, turns: bool = False, bound: float = Pass.error
) -> dict[str, float]:
    """The largest error of each way to call a session, relative to the largest logit (at least 1). Where a rounded
    weight `turns` a close choice, as of experts, that token's logits are others: there the median token counts.

    Where an error is more than `bound`, it is measured how far rounding alone may move the module's own logits; a token
    that it takes beyond the bound has its error divided by as much (`ir/capture/rounding.py`).

    prefill: one call of several tokens; steps: single tokens over the cache; rewind: several tokens
    after a rewind; ragged: rows of different lengths, and a token of each after that. Where layers may
    be left out, all of them run. Where tokens see later ones: `compare_written`.
    """
    if compiled.facts.diffusion is not None:
        return compare_written(model, compiled, bound)
    room = min(LONGEST, compiled.facts.max_context)
    ids = _tokens(model, (len(RAGGED), 2 * room))
    errors: dict[str, list[float]] = {"prefill": [], "steps": [], "rewind": [], "ragged": []}

    depth = compiled.facts.depth
    runs: dict[str, Any] = {} if depth is None else {"run_layers": [True] * len(depth.plan)}
    if depth is not None and depth.threshold is not None:
        runs["threshold"] = NEVER
    crossed = compiled.facts.encoder is not None
    encoder_input = sources(model, RAGGED) if crossed else None  # of an encoder, for each row
    counted = crossed and encoder_input is not None and not encoder_input.is_floating_point()

    def see(part: str, got: Any, tokens: Any, rows: slice, row: int = 0) -> None:
        """Note the error of some rows of the logits of one whole sequence."""
        source = None if encoder_input is None else encoder_input[row : row + 1]
        if source is not None and counted:
            source = source[:, : RAGGED[row]]
        whole = torch.tensor([list(map(int, tokens))])
        errors[part] += _apart(model, whole, source, np.array(got), rows, bound)

    first = min(PREFILL, max(1, room - STEPS))
    end = min(first + STEPS, room)
    kept = min(KEPT, first)
    with compiled.session(1) as session:
        if encoder_input is not None:
            session.encode(encoder_input[:1].numpy(), RAGGED[:1] if counted else None)
        see("prefill", session.run(ids[:1, :first], **runs)[0], ids[0, :first], slice(0, first))
        for i in range(first, end):
            see(
                "steps",
                session.run(ids[:1, i : i + 1], **runs)[0],
                ids[0, : i + 1],
                slice(i, i + 1),
            )
        try:
            session.rewind(kept)
        except InputError:  # a recipe that counts tokens goes back to nothing only
            kept = 0
            session.rewind(kept)
        other = np.concatenate([ids[0, :kept], ids[0, room : 2 * room - kept]])
        see("rewind", session.run(other[None, kept:], **runs)[0], other, slice(kept, room))
    lengths = [min(n, room - 1) for n in RAGGED]
    with compiled.session(len(RAGGED)) as session:
        if encoder_input is not None:
            session.encode(encoder_input.numpy(), RAGGED if counted else None)
        logits = session.run(ids[:, : max(lengths)], lengths, **runs)
        after = session.run(ids[:, room : room + 1], **runs)
    for row, length in enumerate(lengths):
        whole = [*ids[row, :length], ids[row, room]]
        got = np.concatenate([logits[row, :length], after[row]])
        see("ragged", got, whole, slice(0, length + 1), row)
    if turns:
        return {f"median token of {part}": median(found) for part, found in errors.items() if found}
    return {part: max(found, default=0.0) for part, found in errors.items()}


def _apart(
    model: nn.Module, tokens: Tensor, source: Any, got: Any, rows: slice, bound: float
) -> list[float]:
    """Errors of logits `got` [t,V] of some tokens of one sequence [1,T], as `compare` counts them."""
    want = own_logits(model, tokens, source)[0]
    scale = max(1.0, float(want.abs().max()))

    def run() -> Tensor:
        return own_logits(model, tokens, source)[0][rows]

    return apart(torch.from_numpy(got), want[rows], scale, run, bound).tolist()


def compare_written(
    model: nn.Module, compiled: CompiledModel, bound: float = Pass.error
) -> dict[str, float]:
    """As `compare`, of a model that sees both ways. prefill: rows of different lengths in one call; written: some of
    their tokens, again; shorter: all but the last one.
    """
    lengths = [min(n, compiled.facts.max_context) for n in RAGGED]
    ids = _tokens(model, (len(RAGGED), max(lengths)))
    errors = dict.fromkeys(("prefill", "written", "shorter"), 0.0)

    def see(part: str, got: Any, row: int, columns: slice, size: int) -> None:
        whole = torch.from_numpy(ids[row : row + 1, :size])
        errors[part] = max(errors[part], *_apart(model, whole, None, got, columns, bound))

    with compiled.session(len(RAGGED)) as session:
        whole = session.run(ids, lengths)
        again = session.write(ids[:, 1:3], 1)
        session.rewind([n - 1 for n in lengths])
        shorter = session.write(ids, 0, [n - 1 for n in lengths])
    for row, size in enumerate(lengths):
        see("prefill", whole[row, :size], row, slice(0, size), size)
        see("written", again[row], row, slice(1, 3), size)
        see("shorter", shorter[row, : size - 1], row, slice(0, size - 1), size - 1)
    return errors


def _tokens(model: nn.Module, shape: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Random ids without the special ones: padding, for one, is a position of its own to some models."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    told = text.to_dict() if hasattr(text, "to_dict") else {}
    special = {v for n, v in told.items() if n.endswith("token_id") and isinstance(v, int)}
    usual = [i for i in range(inspect(model).vocab_size) if i not in special]
    return np.random.default_rng(3).choice(np.array(usual, np.int64), shape)
