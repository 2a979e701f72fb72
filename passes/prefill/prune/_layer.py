"""What pruning methods share: the layer that decides, and scores that neighbours share."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from accel.ir.errors import PassError
from accel.ir.program import Program


def deciding(program: Program, method: str, layer: int, share: float, last: bool = True) -> int:
    """The layer whose queries and keys decide: `layer`, or where that is -1 the one at a `share` of the
    depth, or the nearest that attends to all tokens (to some, where none does to all) and has a cache of
    its own. Unless `last`, that is not the last of the model, where it has another.
    """
    if program.facts.encoder is not None:
        raise PassError(
            f"{method}: the prompt of an encoder-decoder is the start of the decoder's output "
            "and cannot be pruned; leave prefill.prune out for this model"
        )
    facts = program.facts.layers
    candidates = [i for i, f in enumerate(facts) if f.attention != "recurrent" and f.shares is None]
    if not candidates:
        raise PassError(
            f"{method}: no layer of this model has attention; leave prefill.prune out for it"
        )
    if layer >= 0:
        if layer not in candidates:
            names = ", ".join(map(str, candidates))
            raise PassError(
                f"{method}: layer = {layer}, but the layers with their own keys are "
                f"{names}; give one of these, or -1"
            )
        return layer
    wanted = share * len(facts)
    candidates = candidates if last else [i for i in candidates if i < len(facts) - 1] or candidates
    choice = [i for i in candidates if facts[i].attention == "causal"] or candidates
    return min(choice, key=lambda i: abs(i - wanted))


def near(scores: Tensor, kernel: int) -> Tensor:
    """The mean of `kernel` neighbours along the last axis [..,S]; zeros beyond the ends count."""
    half, count = kernel // 2, scores.shape[-1]
    wide = pad(scores, (half, half))
    total = wide[..., :count]
    for i in range(1, kernel):
        total = total + wide[..., i : i + count]
    return total / kernel


def products(
    queries: Tensor,
    query_positions: Tensor,
    keys: Tensor,
    positions: Tensor,
    include_self: bool = True,
) -> Tensor:
    """q k^T of queries [B,H,N,D] and keys [B,G,S,D], summed over the heads: [B,N,S]; queries that share a key are
    added first. 0 where a query does not see the slot; unless `include_self`, neither its own token.
    """
    shared = queries.unflatten(1, (keys.shape[1], -1)).sum(2)  # [B,G,N,D]
    summed: Tensor = (shared.float() @ keys.float().transpose(-1, -2)).sum(1)
    place, where = query_positions[:, :, None], positions[:, None]
    hidden = (where < 0) | (where > place if include_self else where >= place)
    return summed.masked_fill(hidden, 0)
