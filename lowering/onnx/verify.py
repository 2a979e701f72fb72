"""The written graph, run by ONNX Runtime, against the logits that the captured program gave."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor

from accel.ir.errors import LoweringError, Miscompiled
from accel.ir.program import Program


def onnx_error(
    program: Program, file: Path, cases: list[tuple[Tensor, Tensor]], bound: float = 1e-3
) -> float:
    """The largest error over the cases (tokens [B,T], logits [B,T,V]), relative to the largest logit.

    Weights are read where they lie (no packing), so this needs little memory beyond the file's.

    Raises:
        LoweringError: ONNX Runtime refuses the graph, or computes something else.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no base class
        raise LoweringError(
            f"onnxruntime {ort.__version__} refuses {file.name}: {error}"
        ) from error
    worst = 0.0
    for tokens, want in cases:
        batch, length = tokens.shape
        state = {s.name: s.allocate(B=batch, C=length + 3).numpy() for s in program.state}
        feeds = {
            "tokens": tokens.numpy(),
            "positions": np.tile(np.arange(length), (batch, 1)),
            "slots": np.zeros(batch, np.int64),
            "rows": np.tile(np.arange(length), (batch, 1)),
            **state,
        }
        known = {i.name for i in session.get_inputs()}
        (got,) = session.run(["logits"], {k: v for k, v in feeds.items() if k in known})
        scale = max(1.0, float(want.abs().max()))
        off = float((torch.from_numpy(got) - want).abs().max()) / scale
        worst = max(worst, off if off == off else float("inf"))
    if worst > bound:
        raise Miscompiled(
            f"{file.name}, run by onnxruntime {ort.__version__}, differs from the model by {worst:.2e} of "
            f"the largest logit, more than {bound:.0e}: report it with the model's configuration"
        )
    return worst
