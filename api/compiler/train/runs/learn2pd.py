"""The network of `learn2pd` (arXiv:2509.25188): each prompt is answered by one token per call, then anew by an oracle
that keeps in each call just the guesses that this answer has; what the model was sure of and which guesses were right
is what the network learns, as long as it gets better at an eighth of the prompts. Where an oracle's call has none
right, its whole block is given.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from accel.compiler.measure import watched
from accel.compiler.optimize import optimize
from accel.compiler.train.filled import decoded
from accel.compiler.train.host import HELD, HostKind, Tokens, begun, learn, questions, save_part
from accel.compiler.train.kind import Made
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.source import Source
from accel.ir.errors import InputError
from accel.runtime.decode.trained_part import sample
from accel.runtime.loop._blocks import Blocks
from accel.runtime.loop._canvas import Guess, Place
from accel.runtime.loop.dllm_lowconf import DllmLowconf
from accel.runtime.loop.learn2pd import Learn2pd, read

BLOCKS = 2  # that each prompt is continued by
STEPS = 4000
Seen = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Oracle(Blocks):
    """It knows the answer [N], and notes of each call what the network reads [K], whether each guess is that of the
    answer [K], and which slots were to be filled [K].
    """

    answer: Tokens = field(default_factory=lambda: np.zeros(0, np.int64))
    calls: list[Seen] = field(default_factory=list)

    def stays(self, guess: Guess, place: Place) -> Any:
        within = guess.slots - place.first
        want = self.answer[place.before + within]
        right, there = np.zeros((2, self.block), np.float32)
        right[within], there[within] = guess.tokens == want, 1
        self.calls.append((read(guess, place, self.block), right, there))
        if not right.any():
            guess.tokens[:] = want
            return slice(None)
        return np.flatnonzero(guess.tokens == want)


class Filtered(HostKind):
    """Answers are written twice; then the network learns from all calls."""

    of = Learn2pd
    asks = True

    @classmethod
    def make(cls, method: Any, source: Source, options: TrainOptions) -> Made:
        """See Kind."""
        one, made_of = watched(method)
        block, new = one.block, BLOCKS * one.block
        tables = {"loop": {"use": "dllm-lowconf", "block": block}}
        threads = options.threads or None
        with optimize(
            source.path, tables, verify=False, threads=threads, progress=source.progress
        ) as model:
            most = model.facts.max_context
            if most <= new:
                raise InputError(
                    f"learn2pd: the model takes {most} tokens, and an answer to learn from has {new}; give a recipe "
                    "with a smaller block"
                )
            options = replace(options, length=min(options.length, most - new))
            texts = [
                examples(model, prompt[: most - new], block)
                for prompt, _ in questions(source, options)
            ]
            names = {"model": sample(model.session)}
        if len(texts) < 3:
            raise InputError("learn2pd: fewer than 3 prompts tell too little; give more, samples=…")
        order = np.random.default_rng(options.seed).permutation(len(texts))
        texts = [texts[n] for n in order]  # tasks may come in turn
        last, first, *_ = held = [texts[n::HELD] for n in range(min(HELD, len(texts)))]
        x, right, there = stacked([calls for some in held[2:] for calls in some])
        generator = torch.Generator().manual_seed(options.seed)
        network = begun(one.sizes(block, options.inner), generator)
        known = stacked(first)
        learn(
            network.values(),
            lambda: loss(one.odds(network, x), right, there),
            options.rate,
            STEPS,
            lambda: loss(one.odds(network, known[0]), *known[1:]),
        )
        told = judged(method, network, *stacked(last)) | {"calls": float(len(x))}
        return save_part(one, made_of, network, names, told, options)


def examples(model: Any, prompt: Tokens, block: int) -> list[Seen]:
    """What an oracle sees of the calls of one answer."""
    answer = decoded(model, DllmLowconf(block=block), prompt, BLOCKS * block)
    oracle = Oracle(block=block, answer=answer)
    decoded(model, oracle, prompt, BLOCKS * block)
    return oracle.calls


def stacked(texts: list[list[Seen]]) -> tuple[Tensor, Tensor, Tensor]:
    """[N,K] of what was read, was right, and was to be filled."""
    calls = [call for text in texts for call in text]
    first, second, third = (torch.from_numpy(np.stack(part)) for part in zip(*calls, strict=True))
    return first, second, third


def loss(odds: Tensor, right: Tensor, inside: Tensor) -> Tensor:
    """Cross-entropy [] over the slots that were to be filled."""
    each = F.binary_cross_entropy_with_logits(odds, right, reduction="none")
    return (each * inside).sum() / inside.sum()


def judged(
    method: Learn2pd, network: dict[str, Tensor], x: Tensor, right: Tensor, inside: Tensor
) -> dict[str, float]:
    """On prompts that it did not learn from: its loss, that of the best constant; of the slots to be filled how many
    guesses are right, how many are found final, and how many of these are right.
    """
    odds, open_slots = method.odds(network, x), inside > 0
    share = right[open_slots].mean()
    same = share.clamp(1e-6, 1 - 1e-6).logit().expand_as(right)
    final = (odds.sigmoid() > method.threshold) & open_slots
    return {
        "loss": float(loss(odds, right, inside)),
        "constant": float(loss(same, right, inside)),
        "right": float(share),
        "final": float(final.sum() / open_slots.sum()),
        "rightly": float(right[final].mean()) if final.any() else 1.0,
    }
