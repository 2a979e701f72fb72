"""A model that learns to end its own Jacobi iterations sooner (CLLMs, consistency large language models,
arXiv:2403.00835), for the loop `jacobi`.

The model, as it is, answers prompts block by block; of each block all iterates are noted, from random tokens of the
prompt to what plain decoding gives. Then it learns to say of an iterate what it says of the last one, from the first
token on at which they differ (the global consistency loss), and to go on as it did: ten times the loss of its answers'
next tokens, whose labels are smoothed. An answer and one iterate of each of its blocks stand in one call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from accel.compiler.optimize import optimize
from accel.compiler.part_text import Batch
from accel.compiler.train.host import Tokens, questions
from accel.compiler.train.kind import Tuning
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.source import Source
from accel.compiler.train.windows import Shown, Windowed, WindowedRun
from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.runtime.session.session import Session

FOLLOWING = 10.0  # the weight of the loss of next tokens
SMOOTHING = 0.1  # of its labels
Text = tuple[
    Tensor, list[Tensor]
]  # a prompt [N], and the iterates [J+1,K] of each block of its answer


@dataclass(frozen=True)
class Cllm(Tuning):
    """block: tokens of a block."""

    block: int = option(16, least=2, most=256)

    key: ClassVar[str] = "cllm"


def iterates(
    session: Session, prompt: Tokens, block: int, most: int, ends: Collection[int], seed: int
) -> list[Tokens]:
    """Of `most` blocks behind a prompt [N], or up to that with an end, the iterates [J+1,K]: the last is what plain
    decoding gives, and each has its first token. The session is empty.
    """
    rng, found = np.random.default_rng(seed), list[Tokens]()
    said, size = session.prompt(prompt[None])[0], prompt.size
    for _ in range(most):
        states = [np.append(said[-1].argmax(), rng.choice(prompt, block - 1))]
        while True:
            said = session.run(states[-1][None])[0]
            new = np.append(states[-1][:1], said[:-1].argmax(1))
            if np.array_equal(new, states[-1]):
                break
            states.append(new)
            session.rewind(size)
        size += block
        found.append(np.stack(states))
        if np.isin(states[-1], list(ends)).any():
            break
    return found


class CllmRun(WindowedRun):
    """A step is an answer."""

    tunes = Cllm
    usual: ClassVar[Mapping[str, Any]] = {"rate": 3e-5, "length": 256, "rows": 4}

    @classmethod
    def opened(
        cls, method: Any, source: Source, options: TrainOptions
    ) -> tuple[Windowed, TrainOptions]:
        """See WindowedRun. `samples` x `rows` prompts are answered, each of and by half of `length` tokens. Raises
        InputError where these have no room for a block.
        """
        soft, options = super().opened(method, source, options)
        half, ends = options.length // 2, soft.program.facts.eos
        if half < method.block:
            raise InputError(
                f"answers of {half} tokens have no room for a block of {method.block}; give length=… of at least "
                f"{2 * method.block}, or block=… of less"
            )
        found = list[Text]()
        threads = options.threads or None
        with optimize(
            source.path, {}, verify=False, threads=threads, progress=source.progress
        ) as model:
            for number, (prompt, _) in enumerate(questions(source, options)):
                with model.session() as session:
                    ids, seed = prompt[-half:], options.seed + number
                    said = iterates(session, ids, method.block, half // method.block, ends, seed)
                found.append((torch.from_numpy(ids), [torch.from_numpy(one) for one in said]))
        passes = [len(states) for _, blocks in found for states in blocks]
        source.say(f"{len(passes)} blocks took {np.mean(passes):.2f} passes each")
        options = replace(options, rows=1)
        source.own_rows = lambda length, rows, seed: drawn(found, seed)
        return soft, options

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on ids [2,N]: an answer behind its prompt, and iterates in place of its blocks; known [1,N]: the
        block of each token, from 1 on.
        """
        text, state, block = ids[0], ids[1], known[0].long()
        said, guessed = self.soft.logits(text[None], in_blocks(state, block), self.parts[0])
        ends = torch.tensor(self.soft.program.facts.eos, dtype=torch.int64)
        answer = block > 0
        ended = (torch.isin(text, ends) & answer).cumsum(0) > 0  # an end, or behind one
        apart = differs(text, state, block) & ~ended
        where = apart[answer]
        aim, guess = said[0][apart].detach(), guessed[0][where]
        consistency = -(aim.softmax(-1) * guess.log_softmax(-1)).sum(-1)
        lost = consistency.sum() / max(1, len(consistency))
        coming = (answer[1:] & ~ended[:-1]).nonzero()[:, 0]
        following = F.cross_entropy(said[0][coming], text[1:][coming], label_smoothing=SMOOTHING)
        self.descend(lost + FOLLOWING * following)
        same = (aim.argmax(-1) == guess.argmax(-1)).float()
        return {
            "consistency": lost.item(),
            "next": following.item(),
            "right": float(same.sum() / max(1, len(same))),
        }


def in_blocks(state: Tensor, block: Tensor) -> Shown:
    """The tokens [N] that are of a block [N], which see the text before it, and those of it before them."""
    places = (block > 0).nonzero()[:, 0]
    own = block[places]
    begins = torch.searchsorted(own, own) + places[0]
    sees = (own == own[:, None]) & (places <= places[:, None])
    return Shown(state[places][None], places[None], begins[None], sees)


def differs(text: Tensor, state: Tensor, block: Tensor) -> Tensor:
    """Which tokens [N] are not the text's, or stand behind such a one of their block."""
    wrong = text != state
    same = (block == block[:, None]) & (block > 0)
    before = torch.ones_like(same).tril()
    return (same & before & wrong).any(1)


def drawn(texts: list[Text], seed: int) -> Iterator[Batch]:
    """For ever an answer behind its prompt and, in place of each block, an iterate of it that is not the last, where
    there is one, [2,N]; and the block of each token [1,N], from 1 on.
    """
    generator = torch.Generator().manual_seed(seed)

    def below(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    while True:
        prompt, blocks = texts[below(len(texts))]
        text = torch.cat([prompt, *(states[-1] for states in blocks)])
        taken = [states[below(max(1, len(states) - 1))] for states in blocks]
        number = [torch.full((len(one),), n) for n, one in enumerate(taken, 1)]
        known = torch.cat([torch.zeros(len(prompt)), *number])
        yield torch.stack([text, torch.cat([prompt, *taken])]), known[None].float()
