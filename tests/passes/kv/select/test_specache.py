"""SpeCache: levels of the copy, what a token reads by hand, whose rows it reads, what it keeps and where, builds
against the oracle, bad input.
"""

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir.errors import PassError
from accel.ir.ops.attention import Form, attention
from accel.ir.ops.groups import group_dequantize, group_quantize, midpoint_quantize
from accel.ir.ops.pages import fetch_pages
from accel.ir.region import Conditional
from accel.ir.state import Home
from accel.passes.kv.select.specache import Specache

from ....refused import refuses
from ....select_case import Selecting, built
from ....session_ways import law_every_target

B, G, R, T, C, D = 2, 2, 3, 5, 64, 10
SLOTS = torch.tensor([41, 22])  # where the tokens of a call lie
SCALE = 0.7


def law_levels(quantize, bits, along, seed=0):
    """No number is further off than half of one of 2^bits equal parts of its group, and a group has so many levels."""
    x = torch.randn(2, 3, 5, 8, 12, generator=torch.Generator().manual_seed(seed))  # [B,G,N,R,D]
    back = group_dequantize(*quantize(x, bits, 4, along), bits, 4, along, 8, 12)
    axis = -2 if along == "rows" else -1
    cut, got = (a.unflatten(axis, (-1, 4)) for a in (x, back.unflatten(2, (-1, 8))))
    low, high = cut.amin(axis, keepdim=True), cut.amax(axis, keepdim=True)
    part = (high - low) / 2**bits
    assert ((got - cut).abs() <= part / 2 + 4e-3).all()
    level = (got - low) / part - 0.5
    assert (level - level.round()).abs().max() < 2e-2


@pytest.mark.parametrize("along", ["rows", "channels"])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_levels_lie_in_the_middle_of_equal_parts(bits, along):
    law_levels(midpoint_quantize, bits, along)
    with pytest.raises(AssertionError):
        law_levels(group_quantize, bits, along)


def test_what_is_no_number_is_read_as_none():
    x = torch.ones(1, 1, 1, 4, 8)
    x[0, 0, 0, 2, 3] = torch.nan
    back = group_dequantize(*midpoint_quantize(x, 2, 4, "rows"), 2, 4, "rows", 4, 8)
    assert back[..., 3].isnan().all() and (back[..., :3] - 1).abs().max() < 1e-3


# What tokens of a call read


def case(method, seed=0):
    """What `choose` gets of random keys and values; those that lie behind a call are none."""
    r = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(B, G, C, D, generator=r) for _ in "kv")
    x = {"queries": torch.randn(B, T, G * R, D, generator=r), "keys": keys, "values": values}
    for role, held in (("k", keys), ("v", values)):
        copy = method.encoded(role, held.unflatten(2, (-1, method.group)))
        x |= dict(zip(method.copied(role, D), copy, strict=True))
    x |= {"positions": SLOTS[:, None] + torch.arange(T), "slots": SLOTS}
    held = torch.arange(C).expand(B, -1)
    return x | {"k_pos": torch.where(held < SLOTS[:, None] + T, held, -1)}


def chosen(method, x, known):
    rows = torch.full((method.tokens_read,), -1)
    rows[:6] = torch.tensor([0, 3, 5, 9, 11, 13])[: method.tokens_read]
    before = {"rows": rows.repeat(B, G)} if method.tokens_read else {}
    form = Form("causal", 0, SCALE)
    return *method.choose(x, form, before, torch.tensor(known)), before


def law_read(method, seed=0, known=(True, False)):
    """Attention over the copy with rows in it that are as they were: those that the token before drew most from."""
    x = case(method, seed)
    listed, new, before = chosen(method, x, known)
    found = attention(
        x["queries"].transpose(1, 2), x["keys"], x["values"], x["positions"], x["k_pos"], None, SCALE, 0.0,
        "causal", 0, pages=listed, page=1, beside=new["out"], beside_lse=new["lse"],
    )  # fmt: skip
    copies = {
        role: method.decoded(role, [x[n] for n in method.copied(role, D)], D) for role in ("k", "v")
    }
    count = method.tokens_read
    for row in range(B):
        for head in range(G):
            for token in range(T):
                own = int(SLOTS[row]) + token
                begin = own // method.group * method.group
                asks = token - 1 if token or not known[row] else None
                if asks is None:
                    rows = (
                        [n for n in before["rows"][row][:count].tolist() if n >= 0] if count else []
                    )
                else:
                    q = x["queries"][row, max(asks, 0)].unflatten(0, (G, R))[head]
                    logits = SCALE * q @ copies["k"][row, head, :begin].T
                    rows = logits.log_softmax(-1).amax(0).topk(min(count, begin)).indices.tolist()
                k, v = (copies[n][row, head, : own + 1].clone() for n in ("k", "v"))
                exact = [*rows, *range(begin, own + 1)]
                k[exact], v[exact] = x["keys"][row, head, exact], x["values"][row, head, exact]
                for one in range(R):
                    q = x["queries"][row, token].unflatten(0, (G, R))[head, one]
                    want = (SCALE * k @ q).softmax(0) @ v
                    torch.testing.assert_close(
                        found[row, head * R + one, token], want, rtol=1e-4, atol=1e-5
                    )


@pytest.mark.parametrize("count", [0, 6, 60])
def test_a_token_reads_the_copy_and_rows_that_the_one_before_asked_for(count):
    """No rows: the copy alone; more than there are: everything as it is."""
    for seed in range(2):
        law_read(built("specache", tokens_read=count), seed, (count == 6, False))


@pytest.mark.parametrize("what", ["twice", "own"])
def test_what_reads_otherwise_is_caught(what):
    class Broken(Specache):
        def choose(self, x, mask, before, known):
            listed, new = super().choose(x, mask, before, known)
            if what == "own":  # the rows that a token asks for itself
                rows = new["rows"].unflatten(2, (G, -1)).transpose(1, 2)
                return torch.cat((listed[..., : self.group], rows), dim=3), new
            copy = Specache(tokens_read=0, group=self.group)  # in which no row is hidden
            _, other = copy.choose(x, mask, {}, known)
            return listed, new | {n: other[n] for n in ("out", "lse")}

    with pytest.raises(AssertionError):
        law_read(Broken(**Specache.small))


def test_rows_of_the_next_token_are_fetched_before_it(stateful):
    """Of keys and of values, in the call that chooses them: the memory has what was asked for."""
    program = Selecting(stateful("llama"), built("specache")).program
    regions = [n.target for n in program.step.graph.nodes if isinstance(n.target, Conditional)]
    chooses = [r for r in regions if r.name.startswith("choose.")]
    assert len(chooses) == 2
    for region in chooses:
        (out,) = region.graph.find_nodes(op="output")
        fetched = region.graph.find_nodes(op="call_function", target=fetch_pages.default)
        assert len(fetched) == 2 and fetched[1].args[0] is fetched[0]
        assert {n.args[1].meta["val"].shape[3] for n in fetched} == {D}
        kept = {node for value in out.args[0] for node in _behind(value)}
        assert fetched[1] in kept


def _behind(node):
    found, waiting = set(), [node]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += one.all_input_nodes
    return found


class Itself(Specache):
    """What no step can know in time: each token reads the rows that it asks for itself."""

    def choose(self, x, mask, before, known):
        return super().choose(x, mask, before, torch.zeros_like(known))


def stepped(stateful, method, guesses):
    """Logits of single tokens behind a prompt, each with a guess beside it that is dropped (None: none)."""
    text = np.random.default_rng(5).integers(3, 50, (1, 60))
    out = []
    with Selecting(stateful("llama"), method).session() as session:
        session.prompt(text[:, :30])
        for i in range(30, 42):
            if guesses is None:
                out.append(session.run(text[:, [i]])[:, 0])
                continue
            both = np.concatenate([text[:, [i]], guesses(text[:, [i + 1]])], axis=1)
            out.append(session.run(both)[:, 0])
            session.rewind(i + 1)
    return np.stack(out)[1:]  # nobody guessed the first


@pytest.mark.long
def test_a_right_guess_asks_for_what_the_token_would(stateful):
    """In a layer behind layers that read everything, so that its query is the token's own."""
    options = {"tokens_read": 4, "group": 4, "dense_layers": 1, "bits": 1}
    want = stepped(stateful, Itself(**options, guess=True), None)
    got = stepped(stateful, Specache(**options, guess=True), lambda right: right)
    assert np.abs(got - want).max() < 1e-4
    for method, guesses in (
        (Specache(**options, guess=True), lambda right: (right + 7) % 50),
        (Specache(**options), lambda right: right),
    ):
        assert np.abs(stepped(stateful, method, guesses) - want).max() > 1e-3


@pytest.mark.long
@pytest.mark.parametrize(
    ("bits", "count"), [(1, 6), pytest.param(2, 0, marks=pytest.mark.long), pytest.param(4, 9, marks=pytest.mark.long)],
)  # fmt: skip
def test_every_way_through_a_session_is_that_of_the_oracle(bits, count):
    small = {"use": "specache", "tokens_read": count, "bits": bits, "group": 8, "dense_layers": 1}
    with accel.optimize(
        models.make("llama", 2), {"kv": {"select": small}}, max_context=128, max_batch=2
    ) as made:
        law_every_target(made)
        homes = {s.name for s in made.artifact.state if s.home is Home.MAPPED}
        assert homes == {"kv.1.k", "kv.1.v"}
        width, heads = 10, 2
        codes = -(-width * bits // 8)
        copy = heads * (codes + 4 * width / 8 + codes + 4 * 2)  # scales of 8 tokens, of 8 channels
        mapped = 2 * heads * width * 4
        fast = 8 + 2 * heads * width * 4 + copy  # positions, the dense layer, the copy
        assert made.report["kv_mapped_per_token"] == mapped
        assert made.report["kv_bytes_per_token"] == fast + mapped
        with made.session(batch=2) as session:
            session.prompt([[5] * 20] * 2)
            rows = 33 * 8 * (heads * count + 1) if count else 0
            assert session.stats["kv_bytes"] == 2 * (256 * (fast + mapped) + rows)
            assert session.stats["kv_mapped"] == 2 * 256 * mapped


def test_a_codec_has_keys_of_its_own():
    tables = {"kv.select": {"use": "specache", "dense_layers": 0}, "kv.codec": {"use": "kv-int8"}}
    with pytest.raises(PassError, match="kv.codec encodes its keys.*leave kv.codec out"):
        accel.optimize(models.tiny(), tables, max_context=64)


test_options_that_make_no_sense = refuses(
    "kv.select.specache",
    ({"bits": 3}, "kv.select.specache: bits is 3; give 1, 2, 4 or 8"),
    ({"group": 24}, "kv.select.specache: group is 24; give 1, 2, 4, 8, 16, 32, 64 or 128"),
    ({"group": 0}, "kv.select.specache: group is 0; give 1, 2, 4, 8, 16, 32, 64 or 128"),
    ({"tokens_read": -1}, "kv.select.specache: tokens_read is -1; give at least 0"),
    ({"bit": 2}, "did you mean 'bits'"),
)
