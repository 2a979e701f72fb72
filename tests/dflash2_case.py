"""DFlash2 heads with random weights in published layouts, and what they draft by their authors' formulas, in plain
PyTorch.
"""

from __future__ import annotations

import torch

from .dflash_case import block_hidden, config_for, speculators_config, tensors_for

KERNEL, GROUP, RANK, CANDIDATES = 2, 8, 7, 5
SIZES = {
    "conv_kernel_size": KERNEL,
    "conv_group_size": GROUP,
    "selector_rank": RANK,
    "selector_top_k": CANDIDATES,
}


def dflash2_tensors(module, kernel=KERNEL, layers=2):
    width, vocabulary = module.config.hidden_size, module.config.vocab_size
    g = torch.Generator().manual_seed(4)

    def some(*shape, by=1.0):
        return torch.randn(shape, generator=g) * by / shape[-1] ** 0.5

    found = tensors_for(width, layers)
    for i in range(layers):
        for part in ("attention", "mlp"):
            p = f"layers.{i}.{part}_conv."
            found[p + "base_kernel"] = 0.4 * torch.randn(2, kernel, width, generator=g)
            found[p + "kernel_projection.weight"] = some(
                2 * kernel * (width // GROUP), width, by=0.4
            )
    for name in ("predecessor", "successor"):
        found[f"candidate_selector.{name}_codebook"] = some(vocabulary, RANK, by=1.4)
    found["candidate_selector.hidden_projection.weight"] = some(RANK, width)
    return found


def dflash2_config(module, speculators=False, **more):
    if speculators:
        found = speculators_config(module, speculators_model_type="dflash2", **more)
        return {**found, "architectures": ["DFlash2DraftModel"], **SIZES}
    found = config_for(module, **more)
    inner = {**found["dflash_config"], **SIZES}
    return {**found, "architectures": ["DFlash2DraftModel"], "dflash_config": inner}


def convolutions(t, back=1, late=False, by_input=True):
    """What lies around each part: a convolution before it, and behind it. The controls: each reads the token `back`
    places before in place of the last one; the one behind reads kernels of what it is given; kernels that go by no
    input.
    """

    def around(name, z):
        base = t[f"{name}_conv.base_kernel"]  # [2,kernel,H]
        weight = t[f"{name}_conv.kernel_projection.weight"]

        def kernels(y):
            delta = (y @ weight.T * by_input).view(len(y), 2, base.shape[1], -1)
            return [base[s] + delta[:, s].repeat_interleave(GROUP, -1) for s in (0, 1)]

        def mixed(x, kernel):
            out = torch.zeros_like(x)
            for i in range(len(x)):
                for tap in range(kernel.shape[1]):
                    if 0 <= i - tap * back < len(x):
                        out[i] += kernel[i, tap] * x[i - tap * back]
            return out

        first, second = kernels(z)
        return mixed(z, first), lambda y: mixed(y, kernels(y)[1] if late else second)

    return around


@torch.no_grad()
def path(module, t, text, count, follow=None, knows=True, scales=(1.0, 1.0, 0.0), conv=(), **more):
    """Walk over a block behind a text: the logits of its first `count` places [count,V], of all but candidates minus
    infinity, and the tokens: those of `follow`, or the likeliest. scales: as of `block_logits`. conv: as of
    `convolutions`; None: there are none. more: as of `block_hidden`. The control: the token before says nothing.
    """
    around = None if conv is None else convolutions(t, **dict(conv))
    x = block_hidden(module, t, text, scale=scales[0], around=around, **more)[1:]
    head = t.get("lm_head.weight", module.get_output_embeddings().weight)
    logits = (x @ head.T) * scales[1]
    logits = (logits / scales[2]).tanh() * scales[2] if scales[2] else logits
    a, b = (t[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor"))
    gates = x @ t["candidate_selector.hidden_projection.weight"].T
    tokens, said = [text[-1]], []
    for k in range(min(count, len(x))):
        ids = logits[k].topk(CANDIDATES).indices
        scores = logits[k][ids] + knows * (b[ids] @ (a[tokens[-1]] * gates[k]))
        said.append(torch.full_like(logits[k], -torch.inf).index_put((ids,), scores))
        tokens.append(int(said[-1].argmax()) if follow is None else int(follow[k]))
    return torch.stack(said), tokens[1:]
