"""Claims of what a step reads: trained guesses, boundaries, units, keys of fewer directions, a copy of few bits."""

from __future__ import annotations

from collections.abc import Iterator

from claim import Row, codec, evict, other_numbers, select


def tokenbutler() -> Iterator[Row]:
    """Selection that was trained or measured, beside quest."""
    for use, options in (
        ("tokenbutler", {}),
        ("attention-predictor", {"sinks": 16, "window": 16}),
        ("double-sparsity", {}),
        ("actqkv", {"floor": 0, "sinks": 16}),
    ):
        tables = select(use, 96, **options)
        yield Row(f"`{use}`, 96 read", tables)
        yield Row("… its numbers in another order", tables, ("kv.select", other_numbers))
    yield Row("`quest`, 96 read", select("quest", 96))


def sentencekv() -> Iterator[Row]:
    """Units, beside quest."""
    read = 256
    yield Row("`clusterkv`, clusters of 16", select("clusterkv", read, size=16, every=64))
    yield Row("`sentencekv`", select("sentencekv", read))
    yield Row("… a line for a sentence", select("sentencekv", read, ends="\n"))
    yield Row("`actqkv`", select("actqkv", read, floor=0))
    yield Row("… blocks of 16", select("actqkv", read, floor=0, size=16))
    yield Row("… vectors of all 32 keys", select("actqkv", read, floor=0, best=32))
    yield Row("… probe queries of 8 tokens", select("actqkv", read, floor=0, chunk=8))
    yield Row("`quest`", select("quest", read))


def louiskv() -> Iterator[Row]:
    for boundary, told in (
        (2.0, "each token searches"), (0.7, "`boundary` 0.7, as in the paper"), (0.5, "`boundary` 0.5"),
        (0.3, "`boundary` 0.3"), (-2.0, "once"),
    ):  # fmt: skip
        yield Row(f"`louiskv`, {told}", select("louiskv", 128, boundary=boundary))
    for use in ("clusterkv", "quest"):
        yield Row(f"`{use}`", select(use, 128))
    yield Row("`streaming-llm`, 128 kept", evict("streaming-llm", 128))


def rwkv_x() -> Iterator[Row]:
    for size in (16, 64):
        tables = select("rwkv-x", 256, page=size, dense_layers=2)
        yield Row(f"`rwkv-x`, chunks of {size}", tables)
        yield Row(f"`quest`, pages of {size}", select("quest", 256, page=size))
    yield Row("`streaming-llm`, 256 kept", evict("streaming-llm", 256))


def shadowkv() -> Iterator[Row]:
    """Keys of all heads of a layer have 128 numbers here."""
    for low_rank in (128, 80, 48, 24, 8):
        tables = select("shadowkv", 96, outliers=3, local=1, low_rank=low_rank)
        yield Row(f"`shadowkv`, keys in {low_rank} of 128 directions", tables)
    yield Row("`quest`, 136 read in pages of 8", select("quest", 136, page=8))


def specache() -> Iterator[Row]:
    for bits in (1, 2):
        for rows in (0, 16, 64):
            tables = select("specache", rows, bits=bits)
            yield Row(f"`specache`, {bits}-bit copy, {rows} rows as they are", tables)
    yield Row("`kivi`, 2 bits", codec("kivi", residual=32))
