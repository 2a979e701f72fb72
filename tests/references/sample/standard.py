"""Probabilities by transformers' own processors, in the order of its `generate`, for OPTIONS; penalties that it does
not have by OpenAI's formula, `mu[j] -= c[j] * frequency + (c[j] > 0) * presence`, c[j] of the tokens behind the prompt.
"""

import torch
from transformers.generation import logits_process as hf

OPTIONS = [
    dict(temperature=1.0),
    dict(temperature=0.7, top_k=50),
    dict(temperature=1.5, top_p=0.9),
    dict(temperature=0.3, top_p=0.95),
    dict(temperature=30.0, top_p=0.99),
    dict(temperature=1.0, min_p=0.05),
    dict(temperature=1.0, min_p=0.0),
    dict(temperature=0.8, top_k=40, top_p=0.9, min_p=0.1, repetition_penalty=1.3),
    dict(temperature=1.2, repetition_penalty=0.5),
    dict(temperature=0.9, presence_penalty=1.5, frequency_penalty=-0.75, start=20),
    dict(temperature=1.1, repetition_penalty=1.4, presence_penalty=-2, frequency_penalty=0.5),
    dict(temperature=1.0, top_k=1),
    dict(temperature=1.0, top_k=10**6, top_p=1.0),
    dict(temperature=0.01, top_p=1e-9),
]


def probabilities(logits, seen, o):
    """[V], of a sampler's options `o` and the tokens `seen` so far."""
    scores = torch.from_numpy(logits.copy())[None]
    ids = torch.from_numpy(seen)[None]
    steps = []
    if o.repetition_penalty != 1.0:
        steps.append(hf.RepetitionPenaltyLogitsProcessor(float(o.repetition_penalty)))
    steps += [_penalties(o), hf.TemperatureLogitsWarper(float(o.temperature))]
    if o.top_k:
        steps.append(hf.TopKLogitsWarper(o.top_k))
    if o.top_p is not None and o.top_p < 1:
        steps.append(hf.TopPLogitsWarper(o.top_p))
    if o.min_p is not None:
        steps.append(hf.MinPLogitsWarper(o.min_p))
    for step in steps:
        scores = step(ids, scores)
    return scores.softmax(-1)[0].numpy()


def _penalties(o):
    def lowered(ids, scores):
        counts = torch.bincount(ids[0, o.start :], minlength=scores.shape[1])
        return scores - counts * o.frequency_penalty - (counts > 0) * o.presence_penalty

    return lowered
