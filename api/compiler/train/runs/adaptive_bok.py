"""The probe of `adaptive-bok` (arXiv:2410.04707): of each task so many samples are drawn at temperature 1, and the
probe learns, from the hidden state of the prompt's last token, which share of them begins with the task's answer; of a
text, with what it goes on with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from accel.compiler.measure import watched
from accel.compiler.optimize import optimize
from accel.compiler.train.host import HostKind, begun, learn, questions, save_part
from accel.compiler.train.kind import Made
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.source import Source
from accel.ir.errors import InputError
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.decode.trained_part import sample
from accel.runtime.loop.adaptive_bok import AdaptiveBok, Prompts
from accel.runtime.loop.autoregressive import Autoregressive
from accel.runtime.sample.standard import Standard

TRIES = 16  # samples of a task
HELD = 4  # every so manieth task is not learnt from: the chances that samples are spread over are told of them
BINS = 16


class Probed(HostKind):
    """Tasks are answered; then the probe learns from all of them."""

    of = AdaptiveBok

    @classmethod
    def make(cls, method: Any, source: Source, options: TrainOptions) -> Made:
        """See Kind."""
        one, read = watched(method)
        # a loop that reads the same hidden states, for which no part is needed
        tables = {"loop": {"use": "contrastive"}}
        threads = options.threads or None
        with optimize(
            source.path,
            tables,
            verify=False,
            threads=threads,
            max_batch=TRIES,
            progress=source.progress,
        ) as model:
            found = [
                tried(model, source.tokenizer, prompt, answer or "", number)
                for number, (prompt, answer) in enumerate(questions(source, options))
            ]
            names = {"model": sample(model.session)}
        if len(found) < 2 * HELD:
            raise InputError(
                f"adaptive-bok: {len(found)} tasks tell too little; give {2 * HELD} or more"
            )
        x = torch.from_numpy(np.stack([state for state, _ in found]))
        share = torch.tensor([right for _, right in found])
        order = np.random.default_rng(options.seed).permutation(len(x))  # tasks may come in turn
        held = torch.from_numpy(order) % HELD == 0
        probe = taught(one, x, share, held, options)
        chances = one.odds(probe, x[held]).sigmoid()
        told = {
            "loss": float(F.binary_cross_entropy(chances, share[held])),
            "constant": float(
                F.binary_cross_entropy(share[~held].mean().expand_as(chances), share[held])
            ),
            "right": float(share.mean()),
            "tasks": float(len(x)),
        }
        bins = [part.mean() for part in chances.sort().values.tensor_split(min(BINS, len(chances)))]
        return save_part(one, read, {**probe, "bins": torch.stack(bins)}, names, told, options)


def tried(model: Any, tokenizer: Any, prompt: Any, answer: str, seed: int) -> tuple[Any, float]:
    """The hidden state [E] of a prompt's last token, and the share of samples that begin with the answer."""
    want, most = answer.strip(), len(tokenizer.encode(answer)) + 2
    rows = [
        Row(prompt, Standard(temperature=1.0), rng, limit=most, max_context=model.facts.max_context)
        for rng in np.random.default_rng(seed).spawn(TRIES)
    ]
    prompts = Prompts(rows)
    with model.session(TRIES) as session:
        session.listen(prompts)
        for _ in Autoregressive().tokens(session, rows, DecodeContext(model=model)):
            state = prompts.states[0]
    texts = (tokenizer.decode(row.tokens).strip() for row in rows)
    return state, float(np.mean([text.startswith(want) for text in texts]))


def taught(
    method: AdaptiveBok, x: Tensor, share: Tensor, tested: Tensor, options: TrainOptions
) -> dict[str, Tensor]:
    """A probe that learnt from hidden states [N,E] which share of samples is right [N], but for those `tested` [N], by
    which it is known when to stop. It begins as the constant that is best, and stays it where learning gains nothing on
    those tested. It reads states as they are: that they are learnt from less their mean, over their
    deviation, is made part of its first product.
    """
    middle, spread = x.mean(0), x.std(0).clamp(min=1e-6)
    generator = torch.Generator().manual_seed(options.seed)
    probe = begun(method.sizes(x.shape[1], options.inner), generator)
    probe["last"].zero_()
    probe["last.bias"].fill_(float(torch.logit(share[~tested].mean(), eps=1e-6)))
    odds, plain = method.odds, (x - middle) / spread

    def loss(some: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(odds(probe, plain[some]), share[some])

    learn(probe.values(), lambda: loss(~tested), options.rate, check=lambda: loss(tested))
    first = probe["first"] / spread[:, None]
    return {**probe, "first": first, "first.bias": probe["first.bias"] - middle @ first}
