"""Example inputs of a captured program: random tokens, and what its encoder takes."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.ir.adapters import ROWS
from accel.ir.capture.encoder import FEATURES, INPUT_POSITIONS, INPUTS
from accel.ir.encoder import EncoderFacts
from accel.ir.program import Program
from accel.ir.state import state_of


def example(batch: int, length: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens [B,T] and their positions [B,T]; both contiguous (a stride guard is a trap)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (batch, length), generator=generator)
    return tokens, torch.arange(length).repeat(batch, 1)


def encoder_example(
    facts: EncoderFacts | None, batch: int, seed: int = 0, length: int = 19
) -> dict[str, Tensor]:
    """Random encoder inputs, by name; rows of different lengths, the rest of each padding."""
    if facts is None:
        return {}
    generator = torch.Generator().manual_seed(seed + 100)
    if facts.features:
        return {FEATURES: torch.randn(batch, *facts.features, generator=generator)}
    longest = min(facts.max_length, length + seed)
    inputs = torch.randint(0, facts.vocab_size, (batch, longest), generator=generator)
    lengths = (longest - 3 * torch.arange(batch)).clamp(min=1)
    places = torch.arange(longest).repeat(batch, 1)
    return {INPUTS: inputs, INPUT_POSITIONS: torch.where(places < lengths[:, None], places, -1)}


def side_inputs(program: Program, batch: int) -> dict[str, Tensor]:
    """What the step entry takes beside tokens and its own state: from the encoder's side an example input, or the
    cross state of it; adapters, of which the rows use different ones.
    """
    given = encoder_example(program.facts.encoder, batch)
    if "encode" in program.entries:
        out = program.run("encode", given)
        given = {state_of(name): value for name, value in out.items()}
    return {**given, **adapter_example(program, batch)}


def adapter_example(program: Program, batch: int) -> dict[str, Tensor]:
    """Inputs of adapters, of which the rows use different ones; none where the step takes none."""
    if program.facts.adapters is None:
        return {}
    known = {**program.step.defaults, **program.examples}
    adapters = {name: known[name] for name in program.facts.adapters.shapes()}
    adapters[ROWS] = known[ROWS][torch.arange(batch) % len(known[ROWS])]
    return adapters
