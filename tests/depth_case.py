"""What small models of four layers compute where tokens pass layers by."""

import numpy as np
import torch

LAYERS, NEVER = 4, 2.0
TOKENS = np.random.default_rng(0).integers(0, 90, (2, 24))
WHOLE = np.ones(LAYERS, bool)


def oracle(module, tokens, ran):
    """The module's logits where token t goes through the layers ran[:,t] and passes the others by,
    which all the same make keys and values of it.
    """
    stack = module.transformer.h if hasattr(module, "transformer") else module.model.layers
    handles = []
    for layer, mask in zip(stack, torch.from_numpy(np.array(ran)), strict=True):

        def skip(_, args, kwargs, out, mask=mask):
            x = args[0] if args else kwargs["hidden_states"]
            got = out[0] if isinstance(out, tuple) else out
            new = torch.where(mask[None, :, None], got, x)
            return (new, *out[1:]) if isinstance(out, tuple) else new

        handles.append(layer.register_forward_hook(skip, with_kwargs=True))
    with torch.no_grad():
        found = module(torch.tensor(tokens), use_cache=False).logits.numpy()
    for handle in handles:
        handle.remove()
    return found


def far(got, want):
    return float(np.abs(got - want).max() / max(1.0, np.abs(want).max()))


def plan(*kept):
    return np.isin(np.arange(LAYERS), kept)
