"""What a manifest and a report say of a program: the model's facts and the layout of its state."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import torch

from accel.ir.program import EncoderFacts, Program, Region
from accel.ir.sizes import grows, per_slot
from accel.runtime.manifest import Encoder, Facts, Kv


def facts_json(program: Program) -> dict[str, Any]:
    """The model, as a manifest keeps it."""
    f = program.facts
    regions = [n.target for n in program.nodes(entry=program.step) if isinstance(n.target, Region)]
    nodes = {r.name: len(r.graph.nodes) for r in regions}
    return {
        "name": f.name,
        "vocab_size": f.vocab_size,
        "num_layers": len(f.layers),
        "max_context": f.max_context,
        "max_batch": f.max_batch,
        "eos": [e for e in f.eos if 0 <= e < f.vocab_size],
        "bos": f.bos if f.bos is not None and 0 <= f.bos < f.vocab_size else None,
        "parameters": f.parameters,
        "layers": [
            {**asdict(layer), "nodes": nodes.get(f"layer.{i}", 0)} for i, layer in enumerate(f.layers)
        ],
        **({} if f.encoder is None else {"encoder": _encoder(f.encoder, f.vocab_size)}),
        **({} if f.kv is None else {"kv": asdict(f.kv)}),
        **({} if f.depth is None else {"depth": asdict(f.depth)}),
        **({} if f.prefill is None else {"prefill": asdict(f.prefill)}),
        **({} if f.diffusion is None else {"diffusion": asdict(f.diffusion)}),
    }


def runtime_facts(program: Program) -> Facts:
    """The model, as a manifest's reader finds it."""
    facts = facts_json(program)
    more = {
        "eos": tuple(facts["eos"]),
        "layers": tuple(facts["layers"]),
        "encoder": Encoder(**facts["encoder"]) if "encoder" in facts else None,
        "kv": Kv(**facts["kv"]) if "kv" in facts else None,
        "depth": program.facts.depth,
        "prefill": program.facts.prefill,
        "diffusion": program.facts.diffusion,
    }
    return Facts(**{**facts, **more})


def _encoder(encoder: EncoderFacts, vocab_size: int) -> dict[str, Any]:
    """The encoder's facts; start tokens that the vocabulary lacks are none."""
    start = encoder.start if all(0 <= t < vocab_size for t in encoder.start) else []
    return {**asdict(encoder), "start": start}


def state_json(program: Program) -> list[dict[str, Any]]:
    """Each state value."""
    return [{**asdict(s), "shape": list(s.shape)} for s in program.state]


def kv_bytes(program: Program) -> int:
    """Bytes of state that each token of a row takes; in blocks, where a codec makes such."""
    block = program.facts.kv.flush if program.facts.kv is not None else 0
    return math.ceil(
        sum(
            per_slot(s.shape) * torch.empty((), dtype=getattr(torch, s.dtype)).element_size()
            for s in program.state
            if ("P" in s.shape if block else grows(s.shape))
        )
        / max(1, block)
    )
