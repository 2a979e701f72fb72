"""Edited prompts served (kvshare): requests of which half are earlier prompts with other words in three places, and
half are new, by turns, all at once. Of each way to serve them: time to the first token, tokens reused, and what the 16
tokens behind a prompt lose.

python tools/bench/bench_edited.py MODEL [--tokens 400] [--pairs 6] [--rounds 3]
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from turns import REFERENCE, head, row

import accel
from accel.compiler.quality.divergence import divergence, log_odds
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.schedule.continuous_batching import ContinuousBatching
from accel.runtime.schedule.hit_ratio import HitRatio
from accel.runtime.serve import engine as serving

AFTER, WORDS = 16, 8  # tokens looked at; of an edit
Ids = npt.NDArray[Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    size, context = options.tokens, options.tokens + 2 * AFTER
    built: dict[str, Any] = {
        n: accel.optimize(options.model, n, max_context=context, verify=False)
        for n in ("base", "kvshare")
    }
    tokenizer = built["base"].tokenizer
    assert tokenizer is not None
    text = (REFERENCE / "calibration.txt").read_text(encoding="utf-8")
    ids = np.array(tokenizer.encode(text, special=False))
    places = np.linspace(0, len(ids) - size - AFTER, 2 * options.pairs).astype(int)
    texts = [ids[s : s + size + AFTER] for s in places]
    old, new = texts[::2], texts[1::2]
    ways = [
        ("base", ContinuousBatching()),
        ("kvshare", ContinuousBatching()),
        ("kvshare", HitRatio()),
    ]
    times: dict[int, list[list[float]]] = {i: [] for i in range(len(ways))}
    reused: dict[int, float] = {}
    for _ in range(options.rounds):
        for i, (name, schedule) in enumerate(ways):
            with accel.load(built[name].artifact.path) as model:  # nothing is stored yet
                for each in old:
                    with model.session() as session:
                        session.prompt(edited(each[:size], old)[None])
                asked = [one[:size] for pair in zip(new, old, strict=True) for one in pair]
                spent, reused[i] = served(model, schedule, asked)
                times[i].append(spent)
    head(
        "recipe, schedule",
        ">median to the first token, s",
        ">of edited",
        ">of new",
        ">all, s",
        ">reused",
    )
    for i, (name, schedule) in enumerate(ways):
        of = np.median(np.array(times[i]), axis=0)
        cells = (median(of), median(of[1::2]), median(of[::2]), of.max())
        row(
            f"`{name}`, {type(schedule).__name__}", *(f"{x:.2f}" for x in cells), f"{reused[i]:.0%}"
        )
    kl, same = loss(built, old, size)
    print(f"\nloss of edited prompts: KL {kl:.4f} a token, same best token {same:.1%}")


def edited(prompt: Ids, texts: list[Ids]) -> Ids:
    """With other words in three places."""
    found = prompt.copy()
    for number, place in enumerate((len(prompt) // 4, len(prompt) // 2, 3 * len(prompt) // 4)):
        found[place : place + WORDS] = texts[number][:WORDS]
    return found


def served(model: Any, schedule: Any, prompts: list[Ids]) -> tuple[list[float], float]:
    """Seconds to the first token of each prompt, all given at once, and the share of their tokens that was reused."""
    first: dict[int, float] = {}
    with patch.object(serving, "chosen", lambda recipe: schedule), serving.Engine(model) as engine:
        begun = time.perf_counter()

        def listener(number: int) -> Any:
            return lambda ticket, event: first.setdefault(number, time.perf_counter() - begun)

        params = SamplingParams(max_tokens=4)
        for i, prompt in enumerate(prompts):
            engine.submit(serving.Request(prompt, params), listener=listener(i))
        engine.close()
        share = engine.stats["reused_tokens_total"] / engine.stats["prompt_tokens_total"]
    return [first[i] for i in range(len(prompts))], share


def loss(built: dict[str, Any], texts: list[Ids], size: int) -> tuple[float, float]:
    """Of the tokens behind edited prompts, to computing them whole: KL, and how often the best token is the same."""
    kl = same = 0.0
    with accel.load(built["kvshare"].artifact.path) as model:
        for text in texts:
            found = []
            with model.session() as session:
                session.prompt(edited(text[:size], texts)[None])
            for each in (built["base"], model):
                with each.session() as session:
                    session.prompt(text[None, :size])
                    found.append(log_odds(session.run(text[None, size:])[0]))
            lost = divergence(*found)
            kl, same = kl + lost.kl, same + lost.same
    count = len(texts) * AFTER
    return kl / count, same / count


if __name__ == "__main__":
    main()
