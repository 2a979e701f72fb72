"""A small model with a massive activation, as real ones have: an early layer writes 1000 into one channel of one
token's residual stream, and a later one takes it out again but for a rest, so that what rounding does to the first
stays on the second.
"""

from __future__ import annotations

from typing import Any

import models
import torch
from torch import Tensor, nn

from accel.ir.capture.examples import example

VOCABULARY, FLAG, SINK, NEURONS = 101, 0, 1, 8
TOKENS = example(2, 13, VOCABULARY, 7)[0]  # the numeric check's, where there is no text
TOKEN = int(TOKENS[0, 8])  # the one that carries it
WRITTEN, LEFT = 1000.0, 30.0
WRITES, TAKES = 1, 4  # layers


def massive(layers: int = 6) -> nn.Module:
    """A Llama of 64 channels."""
    model = models.random(
        "llama", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
    ).eval()  # fmt: skip
    with torch.no_grad():
        _plant(model.model)
    return model


def _plant(model: Any) -> None:
    table = model.embed_tokens.weight
    table[:, [FLAG, SINK]] = 0.0
    table[TOKEN, FLAG] = 6 * float(table.std())
    for layer in model.layers:  # nothing else writes into the two channels
        layer.self_attn.o_proj.weight[[FLAG, SINK]] = 0.0
        layer.mlp.down_proj.weight[[FLAG, SINK]] = 0.0
        layer.post_attention_layernorm.weight[FLAG] = 1.0
    for place, total in ((WRITES, WRITTEN), (TAKES, LEFT - WRITTEN)):
        mlp = model.layers[place].mlp
        for weight in (mlp.gate_proj.weight, mlp.up_proj.weight):
            weight[:NEURONS] = 0.0
        mlp.down_proj.weight[:, :NEURONS] = 0.0
        loud = float(_input(model, mlp)[FLAG])
        spread = torch.linspace(1.0, 3.0, NEURONS)
        mlp.gate_proj.weight[:NEURONS, FLAG] = spread / loud
        mlp.up_proj.weight[:NEURONS, FLAG] = spread.flip(0) / loud
        share = torch.linspace(0.4, 1.0, NEURONS)
        given = _input(model, mlp.down_proj)[:NEURONS]
        mlp.down_proj.weight[SINK, :NEURONS] = share * total / float(share @ given)


def _input(model: Any, module: nn.Module) -> Tensor:
    """What a module is given for the token."""
    found: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda m, args: found.append(args[0]))
    model(TOKENS[:1])
    hook.remove()
    return found[0][0, 8]
