"""Sessions whose layers choose pages, on the eager target, without the checks of a whole build."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from accel.compiler.train.runs.fit import Fit
from accel.ir.axis import Axis
from accel.ir.ops.attention import Form
from accel.ir.program import Program
from accel.ir.spec import verify
from accel.ir.tables import Observed, Rows, Tables
from accel.passes.kv._shared.tables import appended, attentions, measured
from accel.passes.kv.inputs import call
from accel.passes.trained import Trained, sample, write
from accel.runtime.session.session import Session

from .session_case import session_of

AXIS = Axis("kv.select", "accel.passes.kv.select")


def built(name: str, **options: Any) -> Any:
    return AXIS.build(name, **{**AXIS.small(name), **options})


def constants(method: Any, groups: int, width: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """What a method with a table measures on a layer of random numbers; nothing where it has none."""
    if not isinstance(method, Tables):
        return {}
    r = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, n, 9, width, generator=r) for n in (2 * groups, groups, groups))
    tokens = torch.randint(3, 9, (2, 10), generator=r)
    return method.measure([Rows(tokens, torch.ones(2, 9), {0: Observed(q, k, v, 0.5)})])[0]


def summary(method: Any, keys: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of pages [B,G,N,page,D]."""
    table = constants(method, keys.shape[1], keys.shape[4])
    found: dict[str, torch.Tensor] = call(method.summary, {"keys": keys, **table})
    return found


def scores(method: Any, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """What pages [B,G,N,page,D] are worth to queries [B,G,M,D]."""
    table = constants(method, keys.shape[1], keys.shape[4])
    parts = summary(method, keys)
    values = {"queries": queries, "parts": parts, "keys": keys.flatten(2, 3), **table}
    values["form"] = Form("causal", scale=keys.shape[4] ** -0.5)
    found: torch.Tensor = call(method.score, values)
    return found


def measured_for(method: Any, program: Program, folder: Any) -> Any:
    """The method with a table of the program, measured on random tokens, or with a trained part that has learnt
    nothing; the method itself where it has none.
    """
    if not isinstance(method, Tables | Trained):
        return method
    file = Path(folder) / f"{method.key}.safetensors"
    r = torch.Generator().manual_seed(0)
    if isinstance(method, Trained):
        fit = Fit(program, method)
        write(method, file, fit.start(8, 0), fit.names, {})
        return dataclasses.replace(method, trained=str(file))
    tokens = torch.randint(3, program.facts.vocab_size, (2, 25), generator=r)
    keys = {layer: appended(node) for layer, node in attentions(program).items()}
    parts = measured(method, program, [(tokens, torch.ones(2, 24))])
    write(method, file, parts, sample(program, keys), {})
    return dataclasses.replace(method, table=str(file))


@dataclass
class Selecting:
    """A program over state (conftest's `stateful`) with a method's pass; none: without."""

    program: Program
    method: Any = None

    def __post_init__(self) -> None:
        if self.method is not None:
            with TemporaryDirectory() as folder:
                self.method = measured_for(self.method, self.program, folder)
                self._run()

    def _run(self) -> None:
        (step,) = self.method.steps()
        report = step.run(self.program)
        assert report.changed, report.refused
        verify(self.program, step.name)

    def session(self, batch: int = 1, wrap: Any = None) -> Session:
        return session_of(self.program, batch, wrap=wrap)

    def tokens(self, *shape: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).integers(3, self.program.facts.vocab_size, shape)
