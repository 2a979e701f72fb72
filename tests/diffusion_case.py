"""Masked-diffusion models for tests, and decoding of one row as it is published, plainly and without accel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel.compiler.facts_json import model_facts
from accel.ir.axis import Axis, find_axes
from accel.ir.spec import verify
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.canvas.whole import Whole
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.decode.trained_part import TrainedPart
from accel.runtime.loop._canvas import Guess
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.sample.standard import Standard

from .own_case import file_of
from .part_case import written

VOCABULARY, MASK, LONGEST = 41, 40, 96
_PARTS = TemporaryDirectory()
_STEPPED: dict[Any, Any] = {}  # programs with the passes of a method of `canvas`
NEW, BLOCK = 21, 8  # tokens of an answer, whose last block is shorter


class Filler(nn.Module):
    """Two layers that see both ways; `causal`: only what is before, and no masks."""

    def __init__(
        self, shift: bool, width: int = 32, heads: int = 4, seed: int = 0, causal: bool = False
    ):
        super().__init__()
        torch.manual_seed(seed)
        filling = {} if causal else {"mask_token_id": MASK, "logit_shift": shift}
        self.config = SimpleNamespace(**filling)
        self.shift, self.heads, self.causal = int(shift), heads, causal
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LONGEST, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)
        with torch.no_grad():
            self.head.weight.mul_(6)
            for part in self.qkv:
                part.weight.mul_(2)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            x = x + out(mixed.transpose(1, 2).flatten(2))
        return self.head(x)


class Slots:
    """Keys and values of a `Filler` by token, of one row: what a session is to hold."""

    def __init__(self, module: Filler):
        self.module = module
        self.kept: list[dict[int, Any]] = [{} for _ in module.qkv]

    def says(self, masks):
        """Those of the masks [W] that the last call says something of."""
        return masks

    @torch.no_grad()
    def write(self, tokens, places):
        """Logits [T,V] of tokens [T] that are at these places, which see all that was written."""
        x = self.module.tokens(torch.tensor(tokens)) + self.module.places(torch.tensor(places))
        for kept, qkv, out in zip(self.kept, self.module.qkv, self.module.out, strict=True):
            q, k, v = qkv(x).unflatten(1, (3, self.module.heads, -1)).unbind(1)  # [T,H,D]
            kept.update({int(p): (k[i], v[i]) for i, p in enumerate(places)})
            keys, values = (torch.stack(part, 1) for part in zip(*kept.values(), strict=True))
            weights = (q.transpose(0, 1) @ keys.mT * q.shape[-1] ** -0.5).softmax(-1)
            x = x + out((weights @ values).transpose(0, 1).flatten(1))
        return self.module.head(x).numpy()


@dataclass
class Seen:
    """What a call says of one row, plainly.

    Of the block's K slots: `slots`, which of them are masks (`left`), which the call says something of (`free`), and
    `logits` [K,V], -inf of the mask token. Of every mask that the call sees, in the block and behind it: `masks` [n]
    and `behind` [n,V]. `step`: calls of the block before; `start`, `end`: of the answer; `memory`: what a rule keeps
    of the row from call to call; `text`: the tokens before the block.
    """

    slots: np.ndarray
    left: np.ndarray
    free: np.ndarray
    logits: np.ndarray
    masks: np.ndarray
    behind: np.ndarray
    step: int
    start: int
    end: int
    memory: dict[str, Any]
    text: list[int]

    @property
    def sure(self) -> np.ndarray:
        """The probability of the best token of each slot [K]; -inf where it is filled."""
        return np.where(self.free, law(self.logits).max(1), -np.inf)

    @property
    def entropy(self) -> np.ndarray:
        """Of each slot [K], in nats; infinite where it is filled."""
        p = law(self.logits)
        return np.where(self.free, -(p * np.log(np.where(p > 0, p, 1))).sum(1), np.inf)

    @property
    def order(self) -> list[int]:
        """The masks of the block, the least entropy first."""
        return [i for i in np.argsort(self.entropy, kind="stable").tolist() if self.free[i]]

    @property
    def lead(self) -> np.ndarray:
        """By how much the best logit of each mask that the call sees leads, [n]."""
        two = np.sort(self.behind, 1)[:, -2:]
        return two[:, 1] - two[:, 0]


class Case(NamedTuple):
    """What the law compares a loop with: the loop's options, `stays(seen)`, the places of the block's slots that a call
    fills, and `early(seen)`, whether all that the call sees is filled at once. fewer: the loop may take fewer calls.
    slides: the block begins at the first mask in each call, and masks behind it are in no call.
    """

    options: dict[str, Any]
    stays: Callable[[Seen], Any]
    early: Callable[[Seen], bool] | None = None
    fewer: bool = False
    slides: bool = False

    def __str__(self) -> str:
        return str(self.options)


class Before(NamedTuple):
    """One row before a call, plainly: which slots are masks [W], the block's first slot and that behind it, calls of
    the block before, whether logits are of the slot after.
    """

    open: np.ndarray
    first: int
    last: int
    step: int
    shift: int


class Fed(NamedTuple):
    """What the law compares a method of `canvas` with: its options, and `rule()`, for one row: a function of `Before`
    that says which slots [W] the next call computes; `slots(model, rule)`: what is held of the row, and computed.
    """

    options: dict[str, Any]
    rule: Callable[[], Callable[[Before], Any]]
    slots: Callable[[Filler, Any], Any] = lambda model, rule: Slots(model)


def canvases() -> list[tuple[str, Fed]]:
    """Each method of `canvas` with the cases of its test file, `tests/runtime/canvas/test_METHOD.py`."""
    axis = Axis("canvas", "accel.runtime.canvas")
    return [
        (name, case)
        for name in axis.names()
        for case in file_of("runtime.canvas", name, "CASES").CASES
    ]


def every() -> Callable[[Before], Any]:
    """All slots in each call."""
    return lambda before: np.ones(before.open.size, np.bool_)


def own(name: str) -> ModuleType:
    """The test file of a loop that fills masks, `tests/runtime/loop/test_METHOD.py`; it holds CASES: its published
    rule, plainly.
    """
    return file_of("runtime.loop", name, "CASES")


def law(logits: np.ndarray) -> np.ndarray:
    """Probabilities [n,V]."""
    weights = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def official(
    model: Filler,
    prompt: Any,
    new: int,
    block: int,
    stays: Any,
    feeds: Callable[[], Callable[[Before], Any]] = every,
    early: Any = None,
    slides: bool = False,
    slots: Callable[[Filler, Any], Any] = lambda model, rule: Slots(model),
) -> tuple[list[int], int]:
    """New tokens and calls of one row, by the rules of a `Case` and of a `Fed`."""
    memory: dict[str, Any] = {}
    x = np.array([*prompt, *[MASK] * new])
    rule = feeds()
    store = slots(model, rule)
    calls, start, end = 0, len(prompt), len(x)
    masks = np.arange(end) >= start
    while start < end:
        stop, step = min(start + block, end), 0
        while masks[start:stop].any():
            sees = stop if slides else end
            (fed,) = np.nonzero(rule(Before(masks, start, stop, step, model.shift))[:sees])
            said = dict(zip((fed + model.shift).tolist(), store.write(x[fed], fed), strict=True))
            if model.shift and 0 in fed:
                said[0] = said[1]
            calls += 1
            at = np.array([i for i in range(start, sees) if i in said or i < stop])
            logits = np.stack([said.get(int(i), np.zeros(VOCABULARY, np.float32)) for i in at])
            logits[:, MASK] = -np.inf
            token, here = logits.argmax(1), at < stop
            free = store.says(masks)[at] & np.isin(at, [*said])
            seen = Seen(
                at[here], masks[start:stop].copy(), free[here], logits[here], at[free], logits[free],
                step, len(prompt), end, memory, x[:start].tolist(),
            )  # fmt: skip
            all_of_it = early is not None and early(seen)
            chosen = np.flatnonzero(free) if all_of_it else np.asarray(stays(seen))
            x[at[chosen]], masks[at[chosen]] = token[chosen], False
            step += 1
            if slides:
                break
        start = int(masks.argmax()) if slides and masks.any() else stop
    return x[len(prompt) :].tolist(), calls


def surest(count):
    """`count` of each call: low confidence is put off."""
    return lambda seen: np.argsort(-seen.sure, kind="stable")[: min(count, int(seen.free.sum()))]


def above(threshold):
    """Fast-dLLM's threshold."""
    return lambda seen: np.flatnonzero((seen.sure >= threshold) | (seen.sure == seen.sure.max()))


@cache
def eager(shift: bool) -> tuple[Filler, CompiledModel]:
    """A model and its eager build, for loops of any kind."""
    module = Filler(shift).eval()
    recipe = {"loop": {"use": "dllm-lowconf"}}
    return module, accel.optimize(module, recipe, target="eager", max_context=LONGEST)


@cache
def causal() -> tuple[Filler, CompiledModel]:
    """A causal model of the same tokens, and its eager build."""
    module = Filler(False, seed=5, causal=True).eval()
    return module, accel.optimize(module, target="eager", max_context=LONGEST)


def with_loop(
    compiled: CompiledModel, use: str, canvas: Any = "whole", **options: Any
) -> CompiledModel:
    """The same program under another loop, without a build. A loop that needs a part gets that of its test file, and
    one that needs a causal model that of `causal()`. canvas: a name, or a table.
    """
    method, second = find_axes()["loop"].method(use), None
    if issubclass(method, TrainedPart) and not method.optional:
        block = options.get("block", method.block)
        options = {"trained": _part_of(compiled, use, block), **options}
    table = {"use": canvas} if isinstance(canvas, str) else canvas
    tables = {"loop": {"use": use, **options}, "canvas": table}
    fed = {n: value for n, value in table.items() if n != "use"}
    if method.asks.get("draft") == "":
        tables["draft"] = {"use": "model"}
        second = _again(causal()[1].program)
    return _again(
        with_steps(compiled.program, find_axes()["canvas"].build(table["use"], **fed)),
        tokenizer=compiled.tokenizer,
        recipe={"tables": tables},
        draft_model=second,
    )


def with_steps(program: Any, canvas: Any) -> Any:
    """The program with the passes of a method of `canvas`; the same where it has none."""
    steps = canvas.steps()
    if not steps:
        return program
    key = id(program), *steps
    if key not in _STEPPED:
        made = program.copy()
        for step in steps:
            step.run(made)
        verify(made, canvas.full_name)
        _STEPPED[key] = program, made
    return _STEPPED[key][1]


def _again(program: Any, **options: Any) -> CompiledModel:
    """A program as a model for three rows."""
    program.facts.max_batch = 3
    return CompiledModel(EagerBackend(program), model_facts(program), **options)


@cache
def _part_of(compiled: CompiledModel, use: str, block: int) -> str:
    """The file of a loop's part, `part(block)` of its test file, for this model."""
    tensors = file_of("runtime.loop", use, "part").part(block)
    return written(compiled, use, tensors, Path(_PARTS.name) / f"{id(compiled)}-{use}-{block}")


def prompts(seed: int = 0, sizes: tuple[int, ...] = (5, 11)) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, MASK, n).tolist() for n in sizes]


def decoded(
    compiled: CompiledModel,
    use: str,
    given: Any,
    new: int = NEW,
    canvas: Any = "whole",
    **options: Any,
) -> Any:
    """Tokens and graph calls of each prompt alone, and tokens of all together."""
    with with_loop(compiled, use, canvas, **options) as made:
        alone = [made.generate(prompt, max_new_tokens=new, eos=[]) for prompt in given]
        return (
            [out.tokens[0] for out in alone],
            [out.stats["calls"] for out in alone],
            made.generate(given, max_new_tokens=new, eos=[]).tokens,
        )


def driven(
    loop: Any,
    compiled: CompiledModel,
    prompt: Any,
    sampler: Any = None,
    new: int = NEW,
    canvas: Any = None,
) -> Any:
    """Tokens of one row, by a loop over a session of its own."""
    row = Row(
        np.array(prompt),
        sampler or Standard(),
        np.random.default_rng(0),
        limit=new,
        max_context=LONGEST,
    )
    with with_loop(compiled, "dllm-lowconf") as made, made.session() as own:
        context = DecodeContext(methods={"canvas": canvas or Whole()})
        list(loop.tokens(own, [row], context))
        assert own.lengths.tolist() == [len(prompt) + new - 1]
        return row.tokens, own.stats["calls"]


def guess_of(sure: Any) -> Guess:
    """What a call says that is as sure of slots 0 to n, each of which has two tokens to choose from."""
    p = np.array(sure, float)
    said = np.log(np.stack([p, np.maximum(1 - p, 1e-30)], axis=1))
    return replace(Guess.of(np.arange(len(p)), np.zeros(len(p), np.int64), said), sure=p)
