"""DSpark heads with random weights in published layouts, and what they draft by the formulas of their authors, in plain
PyTorch.
"""

from __future__ import annotations

import torch

from .dflash_case import block_hidden, config_for, speculators_config, tensors_for

RANK = 7


def dspark_tensors(module, kind, confident=True, with_markov=True):
    width, vocabulary = module.config.hidden_size, module.config.vocab_size
    g = torch.Generator().manual_seed(2)

    def some(*shape, by=1.6):
        return torch.randn(shape, generator=g) * by / shape[-1] ** 0.5

    found = tensors_for(width)
    found |= {"embed_tokens.weight": some(vocabulary, width, by=6)}
    found |= {"lm_head.weight": some(vocabulary, width, by=0.8)}
    found |= {"markov_head.markov_w1.weight": some(vocabulary, RANK, by=2.6)}
    found |= {"markov_head.markov_w2.weight": some(vocabulary, RANK, by=1.5)}
    more = {"gated": ("gate_proj", RANK, width + RANK)}
    more |= {"rnn": ("joint_proj", 3 * RANK, width + 2 * RANK)}
    if kind in more:
        name, out, read = more[kind]
        found |= {f"markov_head.{name}.weight": some(out, read, by=3)}
        found |= {f"markov_head.{name}.bias": some(out)}
    if confident:
        found |= {"confidence_head.proj.weight": some(1, width + RANK * with_markov)}
        found |= {"confidence_head.proj.bias": some(1)}
    return found


def dspark_config(module, kind, speculators=False, drafted=None, **more):
    """Flat keys, as the authors write them, or as speculators do."""
    markov = {"markov_rank": RANK, "markov_head_type": kind, "enable_confidence_head": True}
    markov |= {"confidence_head_with_markov": True, **more}
    if speculators:
        found = speculators_config(module, drafted, speculators_model_type="dspark", **markov)
        return {**found, "architectures": ["DSparkDraftModel"], "sample_from_anchor": True, **more}
    found = config_for(module)
    flat = found.pop("dflash_config")
    return {**found, **flat, "num_anchors": 512, "architectures": ["Qwen3DSparkModel"], **markov}


@torch.no_grad()
def walk(
    module,
    t,
    text,
    count,
    follow=None,
    markov=True,
    stays=True,
    late=False,
    with_markov=True,
    **more,
):
    """Walk over a block behind a text: the logits of its first `count` places [count,Vd], how sure each is [count], and
    the tokens: those of `follow`, or the likeliest. more: as of `block_hidden`. The controls: without what the Markov
    head adds; a state that each place forgets; the token `late`, one place before.
    """
    hidden = block_hidden(module, t, text, **more)
    ids = torch.arange(len(t["lm_head.weight"])) + t.get("d2t", 0)
    w1, w2 = (t[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    gate, joint = (t.get(f"markov_head.{name}_proj.weight") for name in ("gate", "joint"))
    state, tokens, said, sure = torch.zeros(RANK), [text[-1]], [], []
    for k, h in enumerate(hidden[:count]):
        e = w1[tokens[k - 1 if late and k else k]]
        known = torch.cat([h, e]) if with_markov else h
        if "confidence_head.proj.weight" in t:
            proj = t["confidence_head.proj.weight"][0] @ known + t["confidence_head.proj.bias"][0]
            sure.append(float(torch.sigmoid(proj)))
        mixed = e
        if gate is not None:
            mixed = e * torch.sigmoid(gate @ torch.cat([h, e]) + t["markov_head.gate_proj.bias"])
        if joint is not None:
            z = joint @ torch.cat([state, e, h]) + t["markov_head.joint_proj.bias"]
            g, new, out = torch.sigmoid(z[:RANK]), torch.tanh(z[RANK : 2 * RANK]), z[2 * RANK :]
            mixed = torch.tanh(out)
            state = g * state + (1 - g) * new if stays else state
        said.append(t["lm_head.weight"] @ h + (w2 @ mixed if markov else 0))
        tokens.append(int(ids[said[-1].argmax()]) if follow is None else int(follow[k]))
    return torch.stack(said), sure, tokens[1:]
