"""Builds of one model: it is captured once, and each recipe rewrites a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from accel.compiler.assemble import Plan
from accel.compiler.build_options import BuildOptions
from accel.compiler.draft_build import at_home
from accel.compiler.load.source import open_source, tokenizer_of
from accel.compiler.optimize import build_captured
from accel.compiler.pipeline import reads_text
from accel.ir.capture.capture import capture
from accel.ir.program import Program
from accel.runtime.model.compiled import CompiledModel


class Builds:
    """A model directory, captured. Logits are not compared again: what a build loses is measured.

    Raises AccelError where it cannot be captured.
    """

    def __init__(self, model: Path, options: BuildOptions):
        self.options = replace(options, verify=False)
        self.source = open_source(model)
        self.tokenizer = tokenizer_of(options.tokenizer, self.source)
        loaded = self.source.load(options.trust_remote_code)
        self.program: Program = capture(
            loaded.model, max_context=options.max_context, stored=loaded.stored
        )
        self.program.facts.notes += loaded.notes

    def build(
        self, plan: Plan, out: Path, progress: Callable[[str, float], None] | None = None
    ) -> CompiledModel:
        """A recipe's artifact in a folder, opened. Raises AccelError where the recipe is refused."""
        options, plan = self.options, at_home(plan, self.source)
        if not reads_text(plan):
            options = replace(options, calibration=None)
        return build_captured(self.program, plan.recipe, options, self.tokenizer, out, progress)
