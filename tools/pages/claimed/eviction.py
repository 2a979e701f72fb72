"""Claims of what stays in the cache: scores, budgets, phases, units, and what absorbs the rest."""

from __future__ import annotations

from collections.abc import Iterator

from claim import Row, Tables, dense, evict, other_half, other_heads, other_layers, other_numbers

from accel.ir.axis import find_axes

QUARTER = 256  # tokens kept of 1024
STEEP = {
    "beta": 4.0
}  # of pyramidkv: with its 20 the least budget is below its window, and then all are equal


def quarter() -> Iterator[Row]:
    """Every score with equal budgets; one that needs another budget or keep is refused, and the row says so."""
    for use in find_axes()["kv.score"].names():
        yield Row(f"`{use}`", evict(use, QUARTER))
        yield Row("… the first two layers whole", dense(use, QUARTER))
    for refine in ("chunkkv", "critical-kv", "graphkv", "kvcrush"):
        yield Row(f"`{refine}`", evict("snapkv", QUARTER, more={"kv.refine": {"use": refine}}))
    for use, steep in (("ada-kv", {}), ("pyramidkv", STEEP)):
        own = {"kv.budget": {"use": use, "tokens_kept": QUARTER, **steep}}
        yield Row(f"`{use}`", evict("snapkv", QUARTER, more=own))


def snapkv() -> Iterator[Row]:
    for kernel in (1, 5, 15):
        yield Row(f"`snapkv`, `kernel` {kernel}", evict("snapkv", QUARTER, kernel=kernel))
    yield Row("… 5, `window` 8", evict("snapkv", QUARTER, window=8))
    yield Row("… 5, the first two layers whole", dense("snapkv", QUARTER))


def when() -> Iterator[Row]:
    """A prompt that is cut once it is whole, as papers do, or every 128 tokens on its way."""
    for use in ("h2o", "keyformer", "critic", "tova", "a2sf"):
        yield Row(f"`{use}`, a whole prompt", evict(use, QUARTER))
        yield Row("… cut on its way", evict(use, QUARTER, more={"kv.when": {"use": "every"}}))
    for told, more in (("a whole prompt", {}), ("cut on its way", {"kv.when": {"use": "every"}})):
        absorb = {"kv.keep": {"use": "less"}, **more}
        yield Row(f"`less`, {told}", evict("h2o", QUARTER, more=absorb, recent=16))


def expected_attention() -> Iterator[Row]:
    for use, told in (
        ("expected-attention", "`expected-attention`"),
        ("expected-attention-stats", "… moments of other text"),
    ):
        yield Row(told, evict(use, QUARTER, epsilon=0.02))
        yield Row(f"{told}, the first two layers whole", dense(use, QUARTER, epsilon=0.02))


def trim_kv() -> Iterator[Row]:
    for kept in (QUARTER, 128):
        yield Row(f"`trim-kv`, {kept} kept", evict("trim-kv", kept))
        yield Row(
            "… its gates' numbers in another order",
            evict("trim-kv", kept),
            ("kv.score", other_numbers),
        )
        for use in ("streaming-llm", "keydiff", "knorm"):
            yield Row(f"… `{use}`", evict(use, kept))


def threshold_evict() -> Iterator[Row]:
    for threshold in (-5, -4, -3, -2):
        told = f"`threshold-evict`, threshold {threshold}" if threshold == -5 else f"… {threshold}"
        budget = {"kv.budget": {"use": "threshold", "threshold": float(threshold)}}
        yield Row(told, {"kv.score": {"use": "threshold-evict"}, **budget})
    own = {"kv.budget": {"use": "kvzip", "tokens_kept": 400}}
    yield Row("`kvzip`, 400 tokens on average", evict("kvzip", 0, more=own))
    for use in ("streaming-llm", "kv-random"):
        yield Row(f"`{use}`, 400 tokens", evict(use, 400))


def less() -> Iterator[Row]:
    for kept in (64, 128, 256):
        yield Row(f"`h2o`, {kept} kept", evict("h2o", kept, recent=16))
        absorb = {"kv.keep": {"use": "less"}}
        yield Row("… and `less`", evict("h2o", kept, more=absorb, recent=16))
        yield Row(
            "… and its maps' numbers in another order",
            evict("h2o", kept, more=absorb, recent=16),
            ("kv.keep", other_numbers),
        )


def subgen() -> Iterator[Row]:
    yield Row("`streaming-llm`, 128 kept", evict("streaming-llm", 128))
    for clusters, slots in ((64, 128), (256, 512)):
        keep = {"kv.keep": {"use": "subgen", "clusters": clusters, "slots": slots}}
        told = f"… and `subgen` of {slots} slots"
        yield Row(told, evict("streaming-llm", 128, more=keep))
    yield Row("`k-centre`, 128 kept", evict("k-centre", 128, recent=16))


def _phases(prompt: int, generated: int) -> Tables:
    budget = {"use": "phases", "tokens_kept": prompt, "decode_kept": generated, "recent": 32}
    return {"kv.budget": budget, "kv.when": {"use": "generated", "tokens": 16}}


def scope() -> Iterator[Row]:
    later, whole = 384, 1024
    yield Row(
        f"… {later} tokens of text before the question, as in all rows below", {}, later=later
    )
    refine = {"kv.refine": {"use": "scope", "recent": 32}}
    for prompt, told in ((whole, "the whole prompt"), (256, "256 of the prompt")):
        tables = evict("snapkv", 0, more={**refine, **_phases(prompt, 64)})
        yield Row(f"`scope`, {told} and 64 generated", tables, later=later)
        both = prompt + 64 if prompt < whole else 560  # prompts have about 500 tokens
        for use in ("snapkv", "h2o", "streaming-llm", "kv-random"):
            when = {"kv.when": {"use": "generated", "tokens": 16}}
            yield Row(f"`{use}`, {both} of all", evict(use, both, more=when), later=later)


def shotkv() -> Iterator[Row]:
    more = {"kv.refine": {"use": "shotkv"}, **_phases(QUARTER, 1024)}
    tables = evict("snapkv", 0, more=more, kernel=1)
    yield Row("`shotkv`, lines as units", tables, units="lines")
    yield Row("… units that cut lines in two", tables, units="halves")
    yield Row("`snapkv`, `kernel` 1", evict("snapkv", QUARTER, kernel=1))
    yield Row("`snapkv`", evict("snapkv", QUARTER))
    yield Row("`chunkkv`", evict("snapkv", QUARTER, more={"kv.refine": {"use": "chunkkv"}}))
    yield Row("`kv-random`", evict("kv-random", QUARTER))


def finch() -> Iterator[Row]:
    moved = {"kv.keep": {"use": "key-rerotate"}}
    yield Row("`finch`, the question marked", evict("finch", QUARTER, more=moved), question=True)
    yield Row("… at its old positions", evict("finch", QUARTER), question=True)
    yield Row(
        "… a share of each chunk of 128",
        evict("finch", QUARTER, more=moved, chunk=128),
        question=True,
    )
    yield Row("… the last 64 tokens", evict("finch", QUARTER, more=moved))
    whole = {**moved, "kv.refine": {"use": "chunkkv"}}
    yield Row(
        "… whole chunks of 10 by it (`chunkkv`)", evict("finch", QUARTER, more=whole), question=True
    )
    parts = {**whole, "kv.when": {"use": "chunk"}}
    yield Row("… after each 512 tokens", evict("finch", QUARTER, more=parts), question=True)
    yield Row("… the last 64 tokens of each", evict("finch", QUARTER, more=parts))
    for use in ("snapkv", "streaming-llm", "kv-random"):
        yield Row(f"`{use}`", evict(use, QUARTER))


def headkv_r2() -> Iterator[Row]:
    score = {"kernel": 7, "pooling": "max"}
    for kept in (QUARTER, 128):
        own = {"kv.budget": {"use": "headkv-r2", "tokens_kept": kept}}
        tables = evict("snapkv", 0, more=own, **score)
        yield Row(f"`headkv-r2`, {kept} on average", tables)
        yield Row("… heads in another order", tables, ("kv.budget", other_heads("share")))
        yield Row("… each head as many (`snapkv`)", evict("snapkv", kept, **score))


def duo_heads() -> Iterator[Row]:
    own = {"kv.budget": {"use": "duo-heads", "share": 0.5, "sinks": 16, "recent": 64}}
    tables = evict("streaming-llm", 0, more=own, sinks=16)
    yield Row("`duo-heads`, half of the heads stream", tables)
    yield Row("… heads in another order", tables, ("kv.budget", other_heads("place")))
    yield Row("… the other half", tables, ("kv.budget", other_half("place")))
    yield Row("`streaming-llm`, all heads 540", evict("streaming-llm", 540, sinks=16))


def prefixkv() -> Iterator[Row]:
    more = {"kv.refine": {"use": "chunkkv", "chunk": 1}, "kv.when": {"use": "prompt"}}
    for kept in (QUARTER, 128):
        for use in ("prefixkv", "uniform", "pyramidkv"):
            steep = STEEP if use == "pyramidkv" else {}
            own = {"kv.budget": {"use": use, "tokens_kept": kept, **steep}}
            tables = evict("h2o", 0, more={**more, **own}, recent=1)
            yield Row(f"`{use}`, {kept} on average", tables)
            if use == "prefixkv":
                yield Row("… layers in another order", tables, ("kv.budget", other_layers("kept")))
    for use in ("prefixkv", "uniform"):
        own = {"kv.budget": {"use": use, "tokens_kept": QUARTER}}
        yield Row(f"`{use}`, 256, by `snapkv`", evict("snapkv", 0, more=own))
