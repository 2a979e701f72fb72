"""What filling several slots per call costs: list tasks under rules of unmasking (ParallelBench).

    python tools/bench/bench_parallel.py [--items N] [--rows N] [--block K]     # an oracle, with the expected score
    python tools/bench/bench_parallel.py --model FOLDER [--prompts N] ...       # a masked-diffusion model, copying

Without a model the tokens come of an oracle that knows each task's joint distribution and says of every open slot its
marginal, given the slots that are filled. Tokens are drawn from the marginals, so the score below 100 % is what the
rule loses by drawing them apart from each other. Each rule runs with several settings, from one token per call to all
at once: its curve of score against tokens per call. The bundled diffusion model knows `copy` alone of the tasks.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))
from turns import head, row

from accel.ir.axis import find_axes, host_method
from accel.ir.diffusion import Diffusion
from accel.runtime.canvas.whole import Whole
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.decode.trained_part import TrainedPart
from accel.runtime.sample.standard import Standard
from accel.runtime.session.modes.canvas import CanvasState

PLAIN = "dllm-lowconf"
Ids = npt.NDArray[np.int64]


# The tasks: a line of `items` different items; a prompt is the line and, of `replace`, the item that goes


def _replaced(line: Sequence[int], old: int, new: int) -> list[int]:
    return [new if item == old else item for item in line]


TARGETS: dict[str, Callable[[list[int], int, int], list[int]] | None] = {
    "copy": lambda line, old, new: line,
    "replace": _replaced,
    "reverse": lambda line, old, new: line[::-1],
    "sort": lambda line, old, new: sorted(line),
    "shuffle": None,  # any order
}


@dataclass(frozen=True)
class Task:
    """Of `items` items, ids 0 to items - 1. `items` is the id of what replaces one, items + 1 the mask."""

    name: str
    items: int

    @property
    def mask(self) -> int:
        return self.items + 1

    def prompt(self, rng: np.random.Generator) -> list[int]:
        line = rng.permutation(self.items).tolist()
        return [*line, *rng.integers(0, self.items, 1).tolist()]

    def target(self, prompt: Sequence[int]) -> list[int] | None:
        """The one right answer; None: every order of the line is right."""
        make = TARGETS[self.name]
        return make and make(list(prompt[: self.items]), prompt[self.items], self.items)

    def right(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        target = self.target(prompt)
        return list(answer) == target if target else sorted(answer) == list(range(self.items))

    def marginals(self, prompt: Sequence[int], answer: Sequence[int]) -> npt.NDArray[np.float64]:
        """Of each slot of an answer [n] that holds items and masks, the law [n,V] of its token given the items."""
        laws = np.zeros((self.items, self.items + 2))
        if target := self.target(prompt):
            laws[np.arange(self.items), target] = 1
        else:
            unused = sorted(set(range(self.items)) - set(answer))
            laws[:, unused] = 1 / len(unused)
        return laws

    def expected(self, counts: Sequence[int]) -> float:
        """The score of independent draws, so many tokens in each call: 1 where the answer is known. Of `shuffle`, each
        call draws k of m unused items: all k differ with m! / (m - k)! / m^k.

        In one call that is n! / n^n, or exp(-total correlation) of a uniform order.
        """
        if TARGETS[self.name] is not None:
            return 1.0
        left, found = self.items, 1.0
        for count in counts:
            found *= math.perm(left, count) / left**count
            left -= count
        return found


class Oracle:
    """A session of a masked-diffusion model that knows a task, for `Canvas`: whole canvases in, marginals out.

    `masks`: of each row, how many each of its calls saw.
    """

    def __init__(self, task: Task, prompts: Sequence[Sequence[int]]):
        self.task, self.prompts = task, prompts
        self.vocab_size = task.items + 2
        self.lengths = np.zeros(len(prompts), np.int64)
        self.masks: list[list[int]] = [[] for _ in prompts]

    def observer(self, kind: type) -> Any:
        return CanvasState(Diffusion(self.task.mask), len(self.prompts))

    def write(
        self, tokens: Ids, at: Ids, counts: Ids, rows: Ids, picks: Ids | None = None
    ) -> npt.NDArray[np.float32]:
        laws = np.ones((len(tokens), rows.shape[1], self.vocab_size))
        for i in np.flatnonzero(counts).tolist():
            size = len(self.prompts[i])
            answer = tokens[i, size : counts[i]]
            self.masks[i].append(int((answer == self.task.mask).sum()))
            slots = np.clip(rows[i] - size, 0, self.task.items - 1)
            laws[i] = self.task.marginals(self.prompts[i], answer.tolist())[slots]
            self.lengths[i] = counts[i]
        with np.errstate(divide="ignore"):
            return np.log(laws).astype(np.float32)

    def select(self, rows: Ids) -> None:
        pass

    def rewind(self, lengths: Ids) -> None:
        pass


@dataclass(frozen=True)
class Run:
    """Of one task and rule: the share of right answers, what is expected of it, and tokens per call.

    `counts`: tokens of each call, of a right answer (of any, where none is right), which `expected` is of; None where
    right answers had several, for then what is filled depends on what was drawn.
    """

    score: float
    expected: float | None
    per_call: float
    counts: list[int]


def run(task: Task, table: dict[str, Any], rows: int, seed: int = 0) -> Run:
    """A loop's answers of `rows` prompts, tokens drawn from the marginals."""
    rng = np.random.default_rng(seed)
    prompts = [task.prompt(rng) for _ in range(rows)]
    loop: Any = host_method({"loop": table}, "loop", PLAIN)
    oracle: Any = Oracle(task, prompts)
    made = [
        Row(
            np.array(prompt), Standard(temperature=1.0), np.random.default_rng([seed, i]),
            limit=task.items, max_context=len(prompt) + task.items,
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip
    list(loop.tokens(oracle, made, DecodeContext({"canvas": Whole()})))
    counts = [(-np.diff([*masks, 0])).tolist() for masks in oracle.masks]
    right = [task.right(p, one.tokens) for p, one in zip(prompts, made, strict=True)]
    kept = [c for c, good in zip(counts, right, strict=True) if good] or counts
    calls = sum(map(len, counts))
    one_way = len(set(map(tuple, kept))) == 1
    expected = task.expected(kept[0]) if one_way else None
    return Run(sum(right) / rows, expected, rows * task.items / calls, kept[0])


def rules(items: int, block: int) -> dict[str, dict[str, Any]]:
    """Name -> loop table: each loop that draws, as it is, and the settings between one token per call and all."""
    axis = find_axes()["loop"]
    found: dict[str, dict[str, Any]] = {}
    for name in axis.names():
        method = axis.method(name)
        learnt = issubclass(method, TrainedPart)  # of one model's guesses
        alone = name != "freedave" and "draft" not in method.asks  # greedy; of a second model
        if "canvas" in method.asks and not learnt and alone:
            found[name] = {"use": name}
    steps = [n for n in (2, 4, 8, 16, 32) if n < items]
    found |= {f"{PLAIN}, steps {n}": {"use": PLAIN, "steps": n} for n in (*steps, 1)}
    for value in (0.7, 0.5, 0.2, 0.0):
        found[f"dllm-threshold, {value}"] = {"use": "dllm-threshold", "threshold": value}
    for value in (1.0, 2.0, 4.0):
        found[f"dllm-threshold, factor {value}"] = {"use": "dllm-threshold", "factor": value}
    for value in (1.0, 4.0, 16.0):
        found[f"dllm-eb, {value}"] = {"use": "dllm-eb", "gamma": value}
    return {name: {"block": block, **table} for name, table in found.items()}


def on_oracle(given: Any) -> None:
    head("task", "rule", *(f">{x}" for x in ("tokens per call", "score", "expected")))
    for name in given.tasks:
        task = Task(name, given.items)
        for rule, table in rules(given.items, given.block).items():
            found = run(task, table, given.rows)
            shares = ["–" if x is None else f"{x:.1%}" for x in (found.score, found.expected)]
            row(f"`{name}`", rule, f"{found.per_call:.2f}", *shares)


def on_model(given: Any) -> None:
    """Lists that are copied: whole lines of words, the last of a prompt."""
    from bench_diffusion import questions

    import accel

    head("rule", *(f">{x}" for x in ("tokens per call", "exact answers", "right tokens")))
    model: Any = accel.optimize(given.model, PLAIN, max_context=512, verify=False)
    with model:
        asked = list(questions("rest", given.prompts, given.tokens, given.new))
        for rule, table in rules(given.new, given.block).items():
            model._loop = host_method({"loop": table}, "loop", PLAIN)
            calls = made = exact = 0
            near = []
            for prompt, answer in asked:
                wanted = model.tokenizer.encode(prompt + answer)
                wanted = wanted[len(model.tokenizer.encode(prompt)) :]
                out = model.generate(prompt, max_new_tokens=len(wanted), eos=[])
                got = out.tokens[0]
                calls, made = calls + out.stats["calls"], made + len(got)
                exact += list(wanted) == list(got)
                near.append(statistics.mean(a == b for a, b in zip(got, wanted, strict=True)))
            row(
                rule,
                f"{made / calls:.2f}",
                f"{exact / len(asked):.0%}",
                f"{statistics.mean(near):.0%}",
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--items", type=int, default=8, help="of a line")
    parser.add_argument(
        "--rows", type=int, default=400, help="answers of the oracle, of each task and rule"
    )
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument(
        "--model", type=Path, help="a masked-diffusion model, in the oracle's place"
    )
    parser.add_argument("--prompts", type=int, default=10, help="of a model")
    parser.add_argument("--tokens", type=int, default=100, help="of a model's prompt, about")
    parser.add_argument("--new", type=int, default=36, help="tokens of a model's answer, at most")
    given = parser.parse_args()
    if given.model is None:
        on_oracle(given)
    else:
        on_model(given)


if __name__ == "__main__":
    main()
