"""Claims of what a prompt may skip: heads, layers that are predicted, latents behind it."""

from __future__ import annotations

from collections.abc import Iterator

from claim import Row, other_numbers, prune, zeros


def spatten() -> Iterator[Row]:
    """Heads alone: no token goes."""
    for heads in (0.75, 0.5, 0.25):
        own = {"share": 1.0, "heads": heads}
        yield Row(f"`spatten`, {heads:g} of the heads stay", prune("spatten", **own))
        yield Row("… at once", prune("spatten", **own, stages=1))
        yield Row("… from the second layer on", prune("spatten", **own, dense=1))
        yield Row("… from the second layer on, at once", prune("spatten", **own, dense=1, stages=1))


def kv_prediction() -> Iterator[Row]:
    tables = prune("kv-prediction")
    yield Row("`kv-prediction`", tables)
    yield Row("… its maps give zeros", tables, ("prefill.prune", zeros))
    yield Row("… its maps' numbers in another order", tables, ("prefill.prune", other_numbers))


def cache_augment() -> Iterator[Row]:
    tables = prune("cache-augment")
    yield Row("`cache-augment`", tables)
    yield Row("… its coprocessor gives zeros", tables, ("prefill.prune", zeros))
    yield Row(
        "… its coprocessor's numbers in another order", tables, ("prefill.prune", other_numbers)
    )
