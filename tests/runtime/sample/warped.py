"""Probabilities by transformers' own warpers."""

import torch


def warped(p, warper):
    """[V]: what a warper leaves of probabilities p [V]."""
    scores = torch.from_numpy(p).log()[None]
    return warper(torch.zeros(1, 1, dtype=torch.long), scores).softmax(-1)[0].numpy()
