"""How far rounding alone may move what a module gives: nearly equal terms that cancel, and a norm of what is left of
them, make a difference in the last place as large as a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_NOISE = 2.0  # how many times as far as the samples of `rounding` another order of additions may be
_SAMPLES = 4
_LAST = 2.0**-23  # of a number: one unit in the last place of float32


class Float64(TorchDispatchMode):
    """Within it float32 is float64, in casts that a module writes too; with `seed` every result is off by a random
    multiple of the last place of float32, as if it were rounded there.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = args, dict(kwargs or {})
        if not isinstance(func, torch._ops.OpOverload):
            return func(*given[0], **given[1])
        writes = func._schema.is_mutable  # into a tensor of the caller's
        wide = tree_map(_widened if not writes else _wide_type, given)
        try:
            found = func(*wide[0], **wide[1])
        except (NotImplementedError, RuntimeError):  # no float64 form, as some grouped products
            narrow = tree_map(_narrowed, given)
            found = func(*narrow[0], **narrow[1])
        return found if writes else tree_map(self._off if not func.is_view else _widened, found)

    def _off(self, value: Any) -> Any:
        value = _widened(value)
        if self.generator is None or not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        by = torch.randn(value.shape, generator=self.generator, dtype=torch.float64)
        known = value == value.float().double()  # as counts are, which nothing rounds
        return torch.where(known, value, value * (1 + _LAST * by))


def _wide_type(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype is torch.float32:
        return value.double()
    return _wide_type(value)


def _narrowed(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.float64 else value


def rounding(run: Callable[[], Tensor]) -> Tensor:
    """[..., T] of a run that gives logits [..., T, V]: the largest distance of a logit from a run in float64 when
    every operator's result is off in its last place, of a few draws.

    A float32 run's own distance tells less: where two of its roundings are alike, it is thirty times as near as
    another order of the same additions. Zeros where two runs differ, as of a module that draws at random, and where it
    does not run in float64. Monte Carlo arithmetic, Parker 1997.
    """
    with torch.no_grad():
        exact = []
        try:
            for _ in range(2):
                with Float64():
                    exact.append(run())
        except RuntimeError:  # an operator that takes no float64 beside float32 weights
            return torch.zeros(1)
        want, again = exact
        if not torch.allclose(want, again, 0.0, 1e-9, equal_nan=True):
            return torch.zeros_like(want[..., 0])
        moved = []
        for seed in range(_SAMPLES):
            with Float64(seed):
                moved.append(run())
        return torch.stack([(m - want).abs().amax(-1) for m in moved]).amax(0)


def apart(
    got: Tensor, want: Tensor, scale: float, run: Callable[[], Tensor], bound: float
) -> Tensor:
    """[..., T]: of each token the largest difference of its logits [..., T, V], relative to `scale`; infinity where
    there are no numbers. If one is more than `bound`, `run`, which gave `want`, tells how far rounding may take each
    token: where that is beyond the bound, the error is divided by as much.
    """
    each = (got - want).abs().amax(-1).double() / scale
    if bool((each > bound).any()):
        each /= (_NOISE * rounding(run) / scale / bound).nan_to_num(1.0).clamp(min=1.0)
    return each.nan_to_num(torch.inf)
