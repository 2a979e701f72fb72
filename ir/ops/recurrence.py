"""Recurrences: what a row remembers of its tokens has a fixed size. A padded token changes nothing.

Every operator takes `state` (none: the empty state, zeros) and `positions` (none: no padding; else
-1 marks padding, on the right of a row), and returns its values and, last, the state after the last
real token. A Program starts without either; the Cache pass gives both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ir.ops.op import Op


def _real(x: Tensor, positions: Tensor | None) -> Tensor:
    """Whether each token is one: [B,T] bool."""
    if positions is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return positions >= 0


def _causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    taps = weight.shape[1]
    if state is None:
        state = x.new_zeros(x.shape[0], taps - 1, x.shape[2])
    seen = torch.cat((state, x), dim=1)  # [B,K-1+T,E]
    y = F.conv1d(seen.transpose(1, 2), weight.unsqueeze(1), bias, groups=weight.shape[0])
    last = _real(x, positions).sum(1, keepdim=True) + torch.arange(taps - 1, device=x.device)
    after = seen.gather(1, last.unsqueeze(-1).expand(-1, -1, x.shape[2]))
    return y.transpose(1, 2).contiguous(), after


def _selective_scan(
    x: Tensor,
    step: Tensor,
    a: Tensor,
    b: Tensor | None,
    c: Tensor | None,
    state: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    real = _real(x, positions).unsqueeze(-1)
    x, step = torch.where(real, x, 0), torch.where(real, step, 0)
    if state is None:
        state = x.new_zeros(x.shape[0], *a.shape)
    values = []
    for t in range(x.shape[1]):
        new = x[:, t, None] if b is None else b[:, t, :, None] * x[:, t, None]
        state = state * torch.exp(a * step[:, t, None]) + new
        values.append((state if c is None else c[:, t, :, None] * state).sum(1))
    return torch.stack(values, dim=1), state


def _linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    state: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    real = _real(q, positions)[:, :, None]
    heads = v.shape[2]
    q = q.repeat_interleave(heads // q.shape[2], dim=2)
    k = k.repeat_interleave(heads // k.shape[2], dim=2)
    decay = decay if decay.dim() == 4 else decay.unsqueeze(-1)  # [B,T,H,1] or [B,T,H,K]
    decay = torch.where(real.unsqueeze(-1), decay, 0)
    rate = (real if beta is None else torch.where(real, beta, 0)).to(v.dtype)
    rate = rate.expand(-1, -1, heads)
    if state is None:
        state = v.new_zeros(v.shape[0], heads, q.shape[3], v.shape[3])
    values = []
    for t in range(q.shape[1]):
        state = state * decay[:, t].exp().unsqueeze(-1)
        new = v[:, t]
        if beta is not None:  # the delta rule: write what the state does not yet say of k
            new = new - (k[:, t, :, None] @ state).squeeze(2)
        state = state + k[:, t, :, :, None] * (rate[:, t, :, None] * new)[:, :, None]
        values.append((q[:, t, :, None] @ state).squeeze(2))
    return torch.stack(values, dim=1), state


def _dplr_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    erase: Tensor,
    write: Tensor,
    state: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    real = _real(q, positions)[:, :, None, None]
    decay, write, k = (torch.where(real, x, 0) for x in (decay, write, k))
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3])
    values = []
    for t in range(q.shape[1]):
        found = erase[:, t, :, None] @ state  # [B,H,1,Dv]
        kept = state * decay[:, t].exp().unsqueeze(-1)
        state = kept + write[:, t, :, :, None] * found + k[:, t, :, :, None] * v[:, t, :, None]
        values.append((q[:, t, :, None] @ state).squeeze(2))
    return torch.stack(values, dim=1), state


def _wkv(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    first: Tensor,
    state: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    real = _real(k, positions)
    if state is None:
        state = k.new_zeros(k.shape[0], 3, k.shape[2])
    values = []
    for t in range(k.shape[1]):
        total, weight, peak = state.unbind(1)
        peak = torch.where(weight == 0, torch.finfo(k.dtype).min / 2, peak)
        here = torch.maximum(peak, k[:, t] + first)
        old, new = torch.exp(peak - here), torch.exp(k[:, t] + first - here)
        values.append((old * total + new * v[:, t]) / (old * weight + new))
        top = torch.maximum(peak + decay, k[:, t])
        old, new = torch.exp(peak + decay - top), torch.exp(k[:, t] - top)
        after = torch.stack((old * total + new * v[:, t], old * weight + new, top), dim=1)
        state = torch.where(real[:, t, None, None], after, state)
    return torch.stack(values, dim=1), state


def _running_peak(
    x: Tensor, decay: Tensor, state: Tensor | None, positions: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    real = _real(x, positions).unsqueeze(-1)
    x = torch.where(real, x, torch.finfo(x.dtype).min)
    decay = torch.where(real, decay, 0)
    if state is None:
        state = x.new_zeros(x.shape[0], x.shape[2])
    values = [state]
    for t in range(x.shape[1]):
        values.append(torch.maximum(values[-1] + decay[:, t], x[:, t]))
    return torch.stack(values[1:], dim=1), torch.stack(values[:-1], dim=1), values[-1].clone()


# x [B,T,E], weight [E,K], bias [E] or none, state [B,K-1,E] -> y [B,T,E], next:
# y[t] = sum_j weight[j] x[t-K+1+j], each channel by itself
causal_conv = Op(
    "causal_conv",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? state, Tensor? positions) -> (Tensor, Tensor)",
    reference=_causal_conv,
    shape=lambda x, weight, *rest: (
        x.new_empty(x.shape),
        x.new_empty((x.shape[0], weight.shape[1] - 1, x.shape[2])),
    ),
)

# x, step [B,T,E], a [N,E], b, c [B,T,N] (none: ones), state [B,N,E] -> y [B,T,E], next:
# state = exp(step[t] a) state + b[t] ⊗ x[t];  y[t] = c[t] · state
selective_scan = Op(
    "selective_scan",
    "(Tensor x, Tensor step, Tensor a, Tensor? b, Tensor? c, Tensor? state, Tensor? positions) "
    "-> (Tensor, Tensor)",
    reference=_selective_scan,
    shape=lambda x, step, a, *rest: (
        x.new_empty(x.shape),
        x.new_empty((x.shape[0], *a.shape)),
    ),
)

# q, k [B,T,Hq,D] and [B,T,Hk,D], v [B,T,H,Dv] (Hq and Hk divide H), decay [B,T,H], [1,1,H] or, by
# channel of k, [B,T,H,D] (a logarithm), beta [B,T,H] or none, state [B,H,D,Dv] -> y [B,T,H,Dv], next:
# state = exp(decay[t]) state + k[t] ⊗ v[t];  y[t] = q[t] · state. With beta, the delta rule:
# beta[t] (v[t] - k[t] · exp(decay[t]) state) in place of v[t].
linear_attention = Op(
    "linear_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? beta, Tensor? state, Tensor? positions) "
    "-> (Tensor, Tensor)",
    reference=_linear_attention,
    shape=lambda q, k, v, *rest: (
        v.new_empty(v.shape),
        v.new_empty((v.shape[0], v.shape[2], q.shape[3], v.shape[3])),
    ),
)

# q, k, decay (a logarithm), erase, write [B,T,H,D], v [B,T,H,Dv], state [B,H,D,Dv] -> y [B,T,H,Dv], next:
# state = exp(decay[t]) state + write[t] ⊗ (erase[t] · state) + k[t] ⊗ v[t];  y[t] = q[t] · state. The transition is
# diagonal plus low rank (DPLR), as in RWKV-7. The delta rule: erase = exp(decay) k, write = -beta k, beta k for k.
dplr_attention = Op(
    "dplr_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor erase, Tensor write, Tensor? state, "
    "Tensor? positions) -> (Tensor, Tensor)",
    reference=_dplr_attention,
    shape=lambda q, k, v, *rest: (
        v.new_empty(v.shape),
        v.new_empty((v.shape[0], v.shape[2], q.shape[3], v.shape[3])),
    ),
)

# k, v [B,T,E], decay, first [E], state [B,3,E] -> y [B,T,E], next. y[t] is the mean of v[0..t] with
# the weights exp(k[s] + (t - 1 - s) decay) for s < t and exp(k[t] + first). The state is the sum of
# weighted values, the sum of weights (0: no token yet), both divided by exp(peak), and that peak.
wkv = Op(
    "wkv",
    "(Tensor k, Tensor v, Tensor decay, Tensor first, Tensor? state, Tensor? positions) "
    "-> (Tensor, Tensor)",
    reference=_wkv,
    shape=lambda k, *rest: (k.new_empty(k.shape), k.new_empty((k.shape[0], 3, k.shape[2]))),
)

# x, decay [B,T,H], state [B,H] -> peak [B,T,H], the peak before each token [B,T,H], next:
# peak[t] = max(peak[t-1] + decay[t], x[t])
running_peak = Op(
    "running_peak",
    "(Tensor x, Tensor decay, Tensor? state, Tensor? positions) -> (Tensor, Tensor, Tensor)",
    reference=_running_peak,
    shape=lambda x, *rest: (
        x.new_empty(x.shape),
        x.new_empty(x.shape),
        x.new_empty((x.shape[0], x.shape[2])),
    ),
)

RECURRENT = {
    op.default
    for op in (causal_conv, selective_scan, linear_attention, dplr_attention, wkv, running_peak)
}
