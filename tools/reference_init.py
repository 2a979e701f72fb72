"""An induction circuit to begin with: attention that already copies what came after.

Such heads form late by themselves: without this, 0.8 M tokens of a curriculum made for them left 9%
of repeated tokens right, with it 0.2 M left 79%. Training then shapes these heads as it shapes any
weight; nothing is added to the architecture.

- Dimension 0 of every embedding is one large constant. It stands in for a bias, and it moves no
  softmax because it adds the same to each logit.
- Layer 0, heads 0 to 2 turn the constant into queries and keys whose rotations agree one, two and
  three steps apart: each writes `names` of the token so far back to a subspace of its own.
- Layers 1 and 2, heads 0 and 2 look for the place whose last three tokens are the present ones, by
  the rotary pairs that hardly turn within a prompt, and write the token found there as embedded.
"""

from __future__ import annotations

import torch
from reference_model import Attention, Llama
from torch import Tensor

CONSTANT = 4.0
NEAR = 10
"""The first rotary pairs, fast enough to tell one step from two."""
BACK = 3
"""How many tokens a match compares."""
SLOT = 40


def _basis(columns: int) -> Tensor:
    """[columns - 1, columns] orthonormal rows that are blind to dimension 0."""
    basis, _ = torch.linalg.qr(torch.randn(columns - 1, columns - 1))
    return torch.cat([torch.zeros(columns - 1, 1), basis], dim=1)


def _slow_dims(model: Llama) -> Tensor:
    """The dimensions of a head whose rotary pairs turn by less than 1 in a whole prompt."""
    half = model.shape.head_dim // 2
    speed = model.shape.theta ** -(torch.arange(half) / half)
    pairs = (speed * model.shape.positions < 1).nonzero().squeeze(1)
    return torch.cat([pairs, pairs + half])


def _look_back(model: Llama, names: Tensor, slots: list[Tensor]) -> None:
    attention, width = model.attention(0), model.shape.head_dim
    speed = model.shape.theta ** -(torch.arange(NEAR) / (width // 2))
    attention.k_proj.weight.zero_()
    for group in range(2):
        attention.k_proj.weight[group * width :][:NEAR, 0] = 1.5
        attention.v_proj.weight[group * width :][:SLOT] = names
        attention.v_proj.weight[group * width :][SLOT:width] = 0.0
    for head, slot in enumerate(slots):
        query = attention.q_proj.weight[head * width : (head + 1) * width]
        query.zero_()
        query[:NEAR, 0] = 1.5 * (speed * (head + 1)).cos()
        query[width // 2 :][:NEAR, 0] = -1.5 * (speed * (head + 1)).sin()
        attention.o_proj.weight[:, head * width :][:, :SLOT] = 1.5 * slot.T


def _match(
    attention: Attention, dims: Tensor, sides: list[tuple[Tensor, Tensor]], found: Tensor, part: int
) -> None:
    """Heads 0 and 2 compare each pair of `sides`; `part` chooses which rows, for variety."""
    width = attention.shape.head_dim
    for group in range(2):
        query = attention.q_proj.weight[2 * group * width :][:width]
        key = attention.k_proj.weight[group * width :][:width]
        query.zero_()
        key.zero_()
        for order, some in enumerate(torch.tensor_split(dims[torch.randperm(len(dims))], BACK)):
            rows = (torch.arange(len(some)) + (2 * part + group) * len(some)) % SLOT
            asks, holds = sides[order]
            gain = 4.0 if order == 0 else 2.5  # the present token's own name is the fainter side
            query[some] = gain * asks[rows]
            key[some] = gain * holds[rows]
        rows = torch.arange(width) + group * (len(found) - width)
        attention.v_proj.weight[group * width :][:width] = 2.0 * found[rows]
        attention.o_proj.weight[:, 2 * group * width :][:, :width] = 6.0 * found[rows].T


@torch.no_grad()
def place_induction(model: Llama) -> None:
    basis = _basis(model.shape.hidden)
    names, *slots, found = basis.split([SLOT] * (1 + BACK) + [len(basis) - SLOT * (1 + BACK)])
    model.embed_tokens.weight[:, 0] = CONSTANT
    model.norm.weight[0] = 0.0
    _look_back(model, names, slots)
    sides = list(zip([names, *slots], slots, strict=False))
    for part in range(2):
        _match(model.attention(1 + part), _slow_dims(model), sides, found, part)
