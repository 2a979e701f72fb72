"""What the leaderboard measures of one built recipe: quality, recall, bytes, speed, memory."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from reference_data import REFERENCE, encode, sources, tasks
from tokenizers import Tokenizer

from accel.commands import speculation
from accel.compiler.choose.front import Spread
from accel.compiler.choose.measure import peak
from accel.compiler.quality.divergence import Odds, along, divergence
from accel.runtime.model.compiled import CompiledModel

PARTS = (
    "quality",
    "speed",
    "loop",
)  # what the machine's load leaves as it is, and twice what it does not
NEW = 96  # tokens of a text that a loop writes
THREADS = 1
TASKS = ("pass_key", "key_value", "copy")
LENGTHS = (500, 1000)  # tokens of a prompt, about
DEPTHS = 4  # equal parts of a prompt, in one of which the answer lies
PROMPT, STEPS = 1024, 96  # tokens that are read, and then decoded along the text
SPEED_PROMPT, SPEED_STEPS = 1024, 24
MEMORY_PROMPT = 1500


@dataclass(frozen=True)
class Amount:
    """How much is asked of each case."""

    windows: int = 6  # of held-out text
    prompts: int = 2  # of each task, length and depth
    rounds: int = 5  # of speed, alternating with base


@dataclass
class Peer:
    """The model as it is: what others are compared with, and take turns with."""

    model: CompiledModel
    odds: list[Odds]


def windows(count: int) -> list[npt.NDArray[Any]]:
    """Cuts of the held-out text, evenly over it: PROMPT + STEPS tokens each."""
    tokenizer = Tokenizer.from_file(str(REFERENCE / "tokenizer.json"))
    ids = encode(tokenizer, sources()[1])
    size = PROMPT + STEPS + 1
    starts = np.linspace(0, len(ids) - size, count).astype(int)
    return [ids[s : s + size].astype(np.int64) for s in starts]


def odds(model: CompiledModel, ids: npt.NDArray[Any]) -> Odds:
    """Log-probabilities [STEPS,V] after single tokens after a prompt, the text's own tokens given."""
    return along(model, ids[:PROMPT], ids[PROMPT : PROMPT + STEPS])[1:]


def quality(
    model: CompiledModel, given: list[npt.NDArray[Any]], base: list[Odds] | None
) -> dict[str, float]:
    """Perplexity of the decoded part; KL from base's odds per token, and how often its first token is base's."""
    surprise, kl, same, count = 0.0, 0.0, 0, 0
    for i, ids in enumerate(given):
        found = odds(model, ids)
        want = ids[PROMPT + 1 : PROMPT + STEPS + 1]
        surprise -= float(found[np.arange(STEPS), want].sum())
        if base is not None:
            apart = divergence(base[i], found)
            kl += apart.kl
            same += apart.same
        count += STEPS
    return {
        "perplexity": float(np.exp(surprise / count)),
        "kl": kl / count if base is not None else 0.0,
        "agreement": same / count if base is not None else 1.0,
        "tokens": count,
    }


def questions(prompts: int) -> Iterator[tuple[str, int, int, str, str]]:
    """(task, length, depth, prompt, answer): as many of every task, length and depth."""
    for task in TASKS:
        for length in LENGTHS:
            left = {depth: prompts for depth in range(DEPTHS)}
            rng = random.Random(f"leaderboard {task} {length}")
            while left:
                text, answer = tasks.make(task, rng, length)
                depth = min(DEPTHS - 1, DEPTHS * text.find(answer) // max(1, len(text)))
                if depth in left:
                    left[depth] -= 1
                    if not left[depth]:
                        del left[depth]
                    yield task, length, depth, text, answer


def recall(model: CompiledModel, prompts: int) -> dict[str, list[int]]:
    """Exact answers by greedy decoding: "task length depth" -> [right, asked]."""
    found: dict[str, list[int]] = {}
    assert model.tokenizer is not None
    for task, length, depth, text, answer in questions(prompts):
        count = len(model.tokenizer.encode(answer, special=False))
        right = model.generate([text], max_new_tokens=count).text == [answer]
        cell = found.setdefault(f"{task} {length} {depth}", [0, 0])
        cell[0] += right
        cell[1] += 1
    return found


def kv_bytes(model: CompiledModel) -> int:
    """Of a session after a prompt of PROMPT tokens and one more."""
    with model.session() as session:
        session.prompt(np.random.default_rng(1).integers(3, model.facts.vocab_size, (1, PROMPT)))
        session.run([[5]])
        return int(session.stats["kv_bytes"])


def speed(model: CompiledModel, peer: CompiledModel, rounds: int) -> dict[str, Any]:
    """Tokens per second of prompts and of decoding, and ratios to base's: medians of alternating rounds."""
    taken: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
    for turn in range(rounds):
        pair = (model, peer) if turn % 2 else (peer, model)
        seconds = {id(m): _once(m, turn) for m in pair}
        for i, name in enumerate(taken):
            taken[name].append((seconds[id(model)][i], seconds[id(peer)][i]))
    found: dict[str, Any] = {}
    for name, rows in taken.items():
        ratios = Spread.of([b / a for a, b in rows])
        found[name] = {
            "tokens_per_second": 1 / statistics.median(a for a, _ in rows),
            "ratio": ratios.median, "least": ratios.least, "most": ratios.most,
        }  # fmt: skip
    return found


def _once(model: CompiledModel, seed: int) -> tuple[float, float]:
    """Seconds per token of a prompt and of decoding after it."""
    rng = np.random.default_rng(seed)
    with model.session() as session:
        prompt = rng.integers(3, model.facts.vocab_size, (1, SPEED_PROMPT))
        start = time.perf_counter()
        session.prompt(prompt)
        prefill = (time.perf_counter() - start) / SPEED_PROMPT
        each = []
        for token in rng.integers(3, model.facts.vocab_size, (SPEED_STEPS, 1, 1)):
            start = time.perf_counter()
            session.run(token)
            each.append(time.perf_counter() - start)
    return prefill, statistics.median(each)


def loop(model: CompiledModel, amount: Amount) -> dict[str, Any] | None:
    """Whole texts of every kind of prompt, against plain decoding of the same artifact; None of what decodes so."""
    assert model.artifact is not None
    if (
        model.recipe.get("tables", {}).get("loop", {}).get("use", "autoregressive")
        == "autoregressive"
    ):
        return None
    found = speculation.measure(
        model.artifact.path, count=1, tokens=NEW, repeat=max(1, amount.rounds // 2), threads=THREADS
    )
    rows = found["rows"]
    return {
        "speedup": statistics.geometric_mean(row["speedup"] for row in rows),
        "kinds": {row["kind"]: row["speedup"] for row in rows},
        "tokens_per_check": statistics.geometric_mean(row["tokens_per_check"] for row in rows),
        "equal": sum(row["equal"] for row in rows), "texts": len(rows) * found["prompts"],
    }  # fmt: skip


def measured(
    model: CompiledModel,
    peer: Peer | None,
    given: list[npt.NDArray[Any]],
    amount: Amount,
    parts: Collection[str],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Figures of one case, by PARTS; `peer`: none for base itself."""
    assert model.artifact is not None
    found: dict[str, Any] = {}
    if "quality" in parts:
        tell("quality")
        found["quality"] = quality(model, given, None if peer is None else peer.odds)
        tell("recall")
        found["recall"] = recall(model, amount.prompts)
        found["kv_bytes"] = kv_bytes(model)
    if "speed" in parts:
        tell("speed")
        found["speed"] = speed(model, model if peer is None else peer.model, amount.rounds)
        tell("memory")
        found["peak_memory"] = peak(model.artifact.path, THREADS, MEMORY_PROMPT)
    if "loop" in parts:
        tell("loop")
        found["loop"] = loop(model, amount)
    return found
