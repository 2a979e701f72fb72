"""An induction circuit to begin with: two attention layers that already copy what came after.

Such heads form by themselves only after some millions of tokens, which two CPU cores do not see in
time; training then shapes these as it shapes any weight. Nothing is added to the architecture.

- Dimension 0 of every embedding is one large constant. It stands in for a bias, and it moves no
  softmax because it adds the same to each logit.
- Layer 0, head 0 turns the constant into a query and a key whose rotations agree one step apart:
  it attends to the previous token and writes a projection `names` of it to the subspace `slots`.
- Layer 1, heads 0 and 2 compare the current token's `names` with each key's `slots`, in the
  rotary pairs that hardly turn within a prompt, and write the found token back as it is embedded.
"""

from __future__ import annotations

import torch
from reference_model import Llama
from torch import Tensor

CONSTANT = 4.0
NEAR = 10
"""The first pairs, fast enough to tell one step from two."""


def _basis(columns: int) -> Tensor:
    """[columns - 1, columns] orthonormal rows that are blind to dimension 0."""
    basis, _ = torch.linalg.qr(torch.randn(columns - 1, columns - 1))
    return torch.cat([torch.zeros(columns - 1, 1), basis], dim=1)


def _slow_pairs(model: Llama) -> Tensor:
    """The head dimensions, as (all first halves, all second), of pairs turning < 1 in 2048."""
    half = model.shape.head_dim // 2
    powers = torch.arange(half) / half
    pairs = (model.shape.theta**-powers * model.shape.positions < 1).nonzero().squeeze(1)
    return torch.cat([pairs, pairs + half])


@torch.no_grad()
def place_induction(model: Llama) -> None:
    shape, width = model.shape, model.shape.head_dim
    slots, found = _basis(shape.hidden)[: 3 * width].split([width, 2 * width])
    names = found[:width]
    model.embed_tokens.weight[:, 0] = CONSTANT
    model.norm.weight[0] = 0.0

    previous = model.layers[0].self_attn
    turn = model.shape.theta ** -(torch.arange(NEAR) / (width // 2))
    previous.q_proj.weight[:width] = 0.0
    previous.q_proj.weight[:NEAR, 0] = 1.3
    previous.k_proj.weight[:width] = 0.0
    previous.k_proj.weight[:NEAR, 0] = 1.3 * turn.cos()
    previous.k_proj.weight[width // 2 : width // 2 + NEAR, 0] = 1.3 * turn.sin()
    previous.v_proj.weight[:width] = names
    previous.o_proj.weight[:, :width] = 1.5 * slots.T

    match = model.layers[1].self_attn
    dims = _slow_pairs(model)
    for group in range(2):
        query = 2 * group * width  # the first query head of key-value head `group`
        key = group * width
        part = torch.arange(len(dims)) + group * (width - len(dims))
        match.q_proj.weight[query : query + width] = 0.0
        match.q_proj.weight[query + dims] = 3.5 * names[part]
        match.k_proj.weight[key : key + width] = 0.0
        match.k_proj.weight[key + dims] = 3.5 * slots[part]
        match.v_proj.weight[key : key + width] = found[key : key + width]
        match.o_proj.weight[:, query : query + width] = 8.0 * found[key : key + width].T
