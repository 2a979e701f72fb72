"""The calibration of `atts` (arXiv:2509.15148): of each prompt the draft model writes a turn at temperature 1, and the
model's perplexity of it is noted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from accel.compiler.load.hub import model_folder
from accel.compiler.measure import watched
from accel.compiler.optimize import optimize
from accel.compiler.train.host import HostKind, Tokens, questions, save_part
from accel.compiler.train.kind import Made
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs.head import lacks_draft
from accel.compiler.train.source import Source
from accel.ir.errors import InputError
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.decode.trained_part import sample
from accel.runtime.loop.atts import Atts, perplexity
from accel.runtime.loop.autoregressive import Autoregressive
from accel.runtime.sample.standard import Standard


class Calibrated(HostKind):
    """Turns are written and read, one a prompt."""

    of = Atts

    @classmethod
    def lacks(cls, options: TrainOptions) -> str | None:
        """See Kind."""
        return lacks_draft(options)

    @classmethod
    def make(cls, method: Any, source: Source, options: TrainOptions) -> Made:
        """See Kind."""
        one, read = watched(method)
        assert options.draft is not None
        turn = one.turn
        plain: dict[str, Any] = {
            "verify": False, "threads": options.threads or None, "progress": source.progress,
        }  # fmt: skip
        with (
            optimize(source.path, "base", **plain) as model,
            optimize(model_folder(options.draft), "base", **plain) as draft,
        ):
            if model.facts.vocab_size != draft.facts.vocab_size:
                raise InputError(
                    f"{options.draft} has {draft.facts.vocab_size} tokens and {source.path} "
                    f"{model.facts.vocab_size}; give a draft of the same tokens"
                )
            most = min(model.facts.max_context, draft.facts.max_context)
            options = replace(options, length=min(options.length, most))
            found = [
                read_by(
                    model, prompt, written(draft, prompt, min(turn, most - prompt.size), number)
                )
                for number, (prompt, _) in enumerate(questions(source, options))
                if prompt.size < most
            ]
            names = {"model": sample(model.session), "draft": sample(draft.session)}
        if not found:
            raise InputError(f"atts: no prompt is shorter than {most} tokens; give shorter ones")
        part = {"perplexities": torch.tensor(sorted(found), dtype=torch.float32)}
        told = {"median": float(np.median(found)), "most": max(found), "turns": float(len(found))}
        return save_part(one, read, part, names, told, options)


def written(draft: Any, prompt: Tokens, turn: int, seed: int) -> Tokens:
    """A turn [n] of the draft model."""
    facts, rng = draft.facts, np.random.default_rng(seed)
    row = Row(
        prompt,
        Standard(temperature=1.0),
        rng,
        limit=turn,
        max_context=facts.max_context,
        eos=facts.eos,
    )
    with draft.session() as session:
        for _ in Autoregressive().tokens(session, [row], DecodeContext(model=draft)):
            pass
    return np.array(row.tokens, np.int64)


def read_by(model: Any, prompt: Tokens, turn: Tokens) -> float:
    """The model's perplexity of a turn behind a prompt."""
    with model.session() as session:
        first = session.prompt(prompt[None])[:, 0]
        rest = session.run(turn[None, :-1], last_only=False)[0] if turn.size > 1 else first[:0]
    return perplexity(np.concatenate([first, rest]), turn)
