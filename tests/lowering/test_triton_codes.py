"""Keys and values in codes on the Triton target: attention reads them as they lie."""

import math
from functools import partial

import numpy as np
import pytest
import torch

import accel
from accel.ir.axis import find_axes
from accel.ir.ops import attention, codec, groups, mass
from accel.lowering.triton import lowered

from ..op_case import randn
from .test_triton_models import beside, module
from .test_triton_models import close as alike
from .triton_case import Walls, close, poisoned, sees

lowered._load_rules()

from accel.lowering.triton.rules import accel_attention  # noqa: E402  (it imports triton)
from accel.lowering.triton.writer import chip  # noqa: E402

HEADS, KV = 4, 2
GROUPED = [  # bits, size of a group and what of, of keys; the same of values; rows of a block; D, Dv
    ((2, 4, "rows"), (2, 4, "channels"), 8, 16, 16),
    ((4, 32, "rows"), (4, 32, "channels"), 32, 80, 64),
    ((4, 16, "channels"), (8, 5, "rows"), 15, 33, 17),
    ((8, 6, "rows"), (1, 8, "channels"), 6, 10, 6),
]


@pytest.fixture(autouse=True)
def several_splits(monkeypatch):
    monkeypatch.setattr(chip, "processors", lambda device: 6)


def call(batch, tokens, slots, width, wide, seed=0):
    """Operands of an attention over float32 slots that come after 1000 stored ones."""
    rng = np.random.default_rng(seed)
    q_pos = torch.from_numpy(1000 + slots - tokens + np.arange(tokens)).expand(batch, -1).clone()
    k_pos = 1000 + torch.from_numpy(np.stack([rng.permutation(slots) for _ in range(batch)]))
    return [
        randn(rng, batch, HEADS, tokens, width), randn(rng, batch, KV, slots, width),
        randn(rng, batch, KV, slots, wide), q_pos, k_pos, None, width**-0.5, 0.0, "causal", 0,
    ]  # fmt: skip


def over_kept(operands, part, walls):
    """The kernel over `part`, what of a Part stands before the codes and these, and the operands' own slots."""
    q, k, v, q_pos, k_pos, bias, scale, cap, mask, window = operands
    *before, codes = part
    q, k, v, q_pos, k_pos = walls.around((q, k, v, q_pos, k_pos))
    with poisoned():
        out = accel_attention.attended(
            q, q_pos, [(*walls.around(tuple(before)), None, None, None, walls.around(codes)), (k, v, k_pos)],
            bias, scale, cap, mask, window, None, None, None,
        )  # fmt: skip
    walls.check()
    return out.cpu()


@pytest.mark.few(3)
@pytest.mark.parametrize("batch,tokens", [(1, 1), (3, 2), (1, 17), (8, 1)])
@pytest.mark.parametrize("finer", [None, False, True], ids=["one part", "both parts", "coarse"])
@pytest.mark.parametrize("form", GROUPED, ids=str)
def test_blocks_of_codes_are_read_as_they_lie(form, finer, batch, tokens):
    of_keys, of_values, size, width, wide = form
    rng, blocks = np.random.default_rng(3), 5
    operands = call(batch, tokens, 20, width, wide)
    kept, codes, held = [], [], []
    for (bits, group, along), n in ((of_keys, width), (of_values, wide)):
        x = randn(rng, batch, KV, blocks, size, n)
        found, scale, least = groups.group_quantize(x, bits, group, along)
        more = (
            [] if finer is None else [torch.from_numpy(rng.integers(0, 256, found.shape, np.uint8))]
        )
        sizes = (bits, group, along, size, n)
        kept.append(groups.group_dequantize(found, scale, least, *sizes, *([] if finer else more)))
        asked = [] if finer is None else [*more, torch.tensor(bool(finer))]
        codes.append((along, n, bits, group, size, scale, least, *asked))
        held.append(found)
    pos = torch.from_numpy(rng.permutation(blocks * size)).expand(batch, KV, -1).clone()
    pos[..., ::7] = -1
    got = over_kept(operands, (*held, pos, None, tuple(codes)), Walls())
    want = attention.attention(*operands, None, *kept, pos)
    close(got, want)
    swapped = attention.attention(*operands, None, kept[0].flip(2), kept[1], pos)
    assert not torch.allclose(swapped, want, atol=1e-3)


@pytest.mark.few(2)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("bits,each", [(8, True), (4, True), (4, False)])
def test_codes_of_fixed_steps_are_read_as_they_lie(bits, each, tokens):
    rng, width = np.random.default_rng(bits), 18
    operands = call(3, tokens, 11, width, width)
    steps = [torch.rand(KV, width) + 0.2 if each else torch.tensor([[0.3]]) for _ in "kv"]
    held = [codec.encode_static(randn(rng, 3, KV, 70, width), s, bits) for s in steps]
    kept = [codec.decode_static(h, s, bits, width) for h, s in zip(held, steps, strict=True)]
    pos = torch.from_numpy(rng.permutation(70)).expand(3, KV, -1).clone()
    codes = tuple(("static", width, bits, int(each), 1, s) for s in steps)
    got = over_kept(operands, (*held, pos, None, codes), Walls())
    close(got, attention.attention(*operands, None, *kept, pos))


@pytest.mark.parametrize("scaled", [False, True])
def test_places_in_a_table_are_read_as_they_lie(scaled):
    rng = np.random.default_rng(0)
    operands = call(3, 2, 11, 20, 12)
    table = randn(rng, 200)
    held = [torch.from_numpy(rng.integers(0, 200, (3, KV, 70, n), np.uint8)) for n in (20, 12)]
    scales = tuple(torch.rand(3, KV, 70) for _ in "kv") if scaled else None
    kept = [
        codec.look_up_rows(h, table, s) for h, s in zip(held, scales or (None, None), strict=True)
    ]
    pos = torch.from_numpy(rng.permutation(70)).expand(3, KV, -1).clone()
    codes = (("table", 0, 8, 1, 1, table),) * 2
    got = over_kept(operands, (*held, pos, scales, codes), Walls())
    close(got, attention.attention(*operands, None, *kept, pos))


DECODES = ("group_dequantize", "decode_", "look_up_rows", "read_as_asked", "branch_")
CODECS = [
    {"use": "kivi", "bits": 4, "group": 4, "residual": 8},
    {"use": "kivi", "bits": 2, "group": 4, "residual": 8},
    {"use": "quantspec-kv", "group": 8},
    {"use": "kv-fp8"},
]


@pytest.mark.long
@pytest.mark.parametrize("table", CODECS, ids=str)
def test_a_model_reads_its_cache_in_codes(table):
    """No step decodes it first, and none asks the host."""
    recipe = {"kv.codec": table}
    with (
        accel.optimize(
            module("llama"), recipe, target="eager", max_context=64, verify=False
        ) as eager,
        beside(eager) as model,
    ):
        calls = model.program.compiled["step"].module.graph.nodes
        names = {getattr(n.target, "__name__", "") for n in calls if n.users}
        assert not {n for n in names if n.startswith(DECODES)}
        tokens = np.random.default_rng(0).integers(3, 90, (1, 45))
        found = []
        for each in (eager, model):
            with each.session(1) as session:
                session.prompt(tokens[:, :40])
                found.append(session.run(tokens[:, 40:41]))
                if table["use"] == "quantspec-kv":
                    session.rewind(40)
                    found.append(session.run(tokens[:, 40:41], coarse=True))
    half = len(found) // 2
    for want, got in zip(found[:half], found[half:], strict=True):
        alike(got, want)
    assert half == 1 or not np.allclose(found[0], found[1], atol=1e-6)


# What a query asks for


@pytest.mark.few(4)
@pytest.mark.parametrize("page", [1, 3, 16, 64])
@pytest.mark.parametrize("batch,tokens", [(1, 1), (3, 2), (8, 1), (1, 17)])
@pytest.mark.parametrize("kept", [False, True])
def test_chosen_pages_are_read_and_no_others(page, batch, tokens, kept):
    rng, slots = np.random.default_rng(page), 150
    operands = call(batch, tokens, slots, 16, 10, page)
    count = -(-slots // page)
    pages = rng.permuted(np.tile(np.arange(count), (batch, KV, tokens, 1)), axis=3)[
        ..., : min(count, 5)
    ]
    pages = torch.from_numpy(pages)
    pages[..., 1:][torch.from_numpy(rng.random(pages[..., 1:].shape) < 0.3)] = -1
    operands[3][:] = 1000 + slots  # every slot may be seen
    more = [None] * 6
    parts = [(operands[1], operands[2], operands[4])]
    if kept:
        pos = torch.from_numpy(rng.permutation(9)).expand(batch, KV, -1).clone()
        more[1:4] = [randn(rng, batch, KV, 9, 16), randn(rng, batch, KV, 9, 10), pos]
        parts.insert(0, tuple(more[1:4]))
    want = attention.attention(*operands, *more, pages, page)
    read = attention.read_pages(pages, page, slots).any(2)
    hidden = [x.masked_fill(~read[..., None], torch.nan) for x in operands[1:3]]
    walls = Walls()
    parts[-1] = (*hidden, operands[4])
    q, q_pos, parts, chosen = walls.around((operands[0], operands[3], parts, pages))
    with poisoned():
        got = accel_attention.attended(
            q, q_pos, parts, None, *operands[6:10], None, None, None, None, None, chosen, page
        )
    walls.check()
    close(got.cpu(), want)


def test_a_page_that_is_named_twice_is_read_once():
    operands = call(1, 1, 40, 16, 16)
    once, twice = torch.tensor([[[[1, 3, -1]]] * KV]), torch.tensor([[[[1, 3, 1]]] * KV])
    parts = [(operands[1], operands[2], operands[4])]
    run = partial(accel_attention.attended, operands[0], operands[3], parts, None, *operands[6:10])
    got = [run(None, None, None, None, None, pages, 8) for pages in (once, twice)]
    close(got[1], got[0])
    assert not torch.allclose(got[0], run(None, None, None), atol=1e-3)


# Sums of probabilities


@pytest.mark.few(3)
@pytest.mark.parametrize("batch,tokens", [(1, 1), (3, 5), (1, 40), (8, 2)])
@pytest.mark.parametrize("form", ["plain", "kept", "codes", "sink", "softcap", "window"])
def test_sums_of_probabilities_by_slot(form, batch, tokens):
    rng = np.random.default_rng(tokens)
    operands = call(batch, tokens, 70, 16, 10)
    if tokens > 1:
        operands[3][0, -1] = -1
    more, parts = [None] * 4, [(operands[1], operands[2], operands[4])]
    if form in ("kept", "codes"):
        pos = torch.from_numpy(rng.permutation(9)).expand(batch, KV, -1).clone()
        more[1:] = [randn(rng, batch, KV, 9, 16), randn(rng, batch, KV, 9, 10), pos]
        parts.insert(0, tuple(more[1:]))
    if form == "codes":
        codes, scale = codec.encode_rows(more[1])
        more[1] = codec.decode_rows(codes, scale)
        parts[0] = (codes, more[2], pos, (scale, None))
    if form == "sink":
        more[0] = torch.linspace(-1, 3, HEADS)
    if form == "softcap":
        operands[7] = 2.0
    if form == "window":
        operands[8:] = ["window", 13]
    share = torch.rand(batch, tokens) * 2
    rest = [*more, None, None, None, 0, None, None, None]
    want = mass.drawn_attention(*operands, *rest, share)
    q, k, v, q_pos, k_pos, bias, *way = operands
    walls = Walls()
    q, q_pos, parts, sink, given = walls.around((q, q_pos, parts, more[0], share))
    with poisoned():
        got = accel_attention.drawn(q, q_pos, parts, bias, *way, sink, None, None, given)
    walls.check()
    close(got.cpu(), want)
    assert math.isclose(float(want.sum()), float(got.sum()), rel_tol=1e-4)
    assert sees(operands).any()


@pytest.mark.long
@pytest.mark.parametrize("name", ["quest", "tokenselect", "clusterkv"])
def test_a_model_reads_what_it_chooses(name):
    axis = find_axes()["kv.select"]
    table = {"kv.select": {"use": name, **axis.small(name)}}
    tokens = np.random.default_rng(0).integers(3, 90, (2, 50))
    found = []
    with (
        accel.optimize(
            module("llama"), table, target="eager", max_context=64, max_batch=2, verify=False
        ) as eager,
        beside(eager) as model,
    ):
        graph = model.program.compiled["step"].module.graph
        assert not graph.find_nodes(op="call_function", target=attention.attention.default)
        for each in (eager, model):
            with each.session(2) as session:
                session.prompt(tokens[:, :44], [44, 41])
                found.append([session.run(tokens[:, i : i + 1]) for i in (44, 45)])
    for want, got in zip(*found, strict=True):
        alike(got, want)
