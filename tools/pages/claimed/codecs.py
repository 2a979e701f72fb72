"""Claims of fewer bits: codecs beside each other at equal bits, and what stands beside the codes."""

from __future__ import annotations

from collections.abc import Iterator

from claim import Row, codec


def kivi() -> Iterator[Row]:
    """Every codec as its recipe has it, by bits a number, all told but for the newest tokens."""
    for told, tables in (
        ("`kv-int8`: 8.5 bits", codec("kv-int8")),
        ("`kv-fp8`: 8.5", codec("kv-fp8")),
        ("`quantspec-kv`, all bits: 8.3", codec("quantspec-kv")),
        ("`ort-gqa-kv`: 8", codec("ort-gqa-kv")),
        ("`cskv`, 26 of 128 directions: 6.5", codec("cskv")),
        ("`kivi`, 4 bits: 5", codec("kivi", bits=4)),
        ("`minicache`, the last four layers in pairs: 4", codec("minicache")),
        ("`kvquant`: 3.5", codec("kvquant")),
        ("`aqua-kv`, 2 bits: 2.8", codec("aqua-kv")),
        ("`kivi`, 2 bits, groups of 64: 2.5", codec("kivi", group=64)),
        ("`rotatekv`: 2.3", codec("rotatekv")),
        ("`mha2gqa-svd`, two heads in one: 16", codec("mha2gqa-svd")),
    ):
        yield Row(told, tables)


def rotatekv() -> Iterator[Row]:
    """Two and four bits at equal groups."""
    yield Row("`rotatekv`, groups of 32: 3 bits", codec("rotatekv", group=32))
    yield Row("… the newest 128 exact", codec("rotatekv", group=32, recent=128))
    yield Row("`kivi`, groups and residual of 32: 3", codec("kivi", group=32, residual=32))
    tables = codec("kv-adaquant", key_bits=2, value_bits=2, group=32)
    yield Row("`kv-adaquant`, 2 bits each, groups of 32: 3", tables)
    yield Row("`rotatekv`, 4 bits: 4.3", codec("rotatekv", bits=4))
    yield Row("`kvquant`, 2 bits: 2.5", codec("kvquant", bits=2))
    yield Row("`kvquant`, 4 bits: 4.5", codec("kvquant", bits=4))


def ort_gqa_kv() -> Iterator[Row]:
    for bits in (8, 4):
        yield Row(f"`ort-gqa-kv`, {bits} bits", codec("ort-gqa-kv", bits=bits))
        tables = codec("ort-gqa-kv", bits=bits, channels=False)
        yield Row("… one scale for all channels", tables)


def gear() -> Iterator[Row]:
    shape = {"group": 64, "residual": 64}
    yield Row("`kivi`, 2 bits, groups of 64: 2.5 bits", codec("kivi", **shape))
    for told, rank, outliers in (
        ("rank 2 (GEAR-L): 3.5", 2, 0.0),
        ("2 % outliers: 3.3", 0, 0.02),
        ("both: 4.3", 2, 0.02),
    ):
        yield Row(f"… {told}", codec("gear", **shape, low_rank=rank, outliers=outliers))
    yield Row("`kivi`, 2 bits, groups of 16: 4.0", codec("kivi", group=16, residual=64))
    yield Row("`kivi`, 4 bits, groups of 64: 4.5", codec("kivi", bits=4, **shape))


def leank() -> Iterator[Row]:
    for ratio in (0.7, 0.5, 0.3):
        told = f"`leank`, {ratio:.0%} of the channels of keys dropped"
        yield Row(told, codec("leank", ratio=ratio))
    yield Row("`leank`, 70 %, what stays in 4 bits", codec("leank", bits=4))
    for bits in (4, 2):
        yield Row(f"`kivi`, {bits} bits", codec("kivi", bits=bits, group=64))


def squat() -> Iterator[Row]:
    for bits in (2, 4):
        yield Row(f"`kivi`, {bits} bits, groups of 32", codec("kivi", bits=bits))
        for weight in (0.0001, 0.001):
            told = f"… `squat`, lambda {weight:g}"
            yield Row(told, codec("squat", bits=bits, weight=weight))
