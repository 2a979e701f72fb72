"""less: evicted tokens go on in sums of fixed size, which queries read in one softmax with what stayed."""

import math

import models
import numpy as np
import pytest
import torch

import accel
from accel.compiler.over_state import keys_of, over_state
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs.absorb import Absorbing, AbsorbRun
from accel.ir.capture.capture import capture
from accel.ir.errors import PassError, RecipeError
from accel.ir.ops.attention import attention
from accel.passes.kv.keep.less import Less
from accel.passes.trained import write

from ....kv_case import FOREVER, evicting, recipe, state
from ....kv_slots import D, G, R, absorbing, build, choose, slots
from ....session_ways import close, oracle, singles

MAPS = ("k1", "k2", "k3", "s1", "s2")


def trained(seed=0):
    """Maps that weigh tokens unlike each other."""
    found = absorbing(Less(), seed)
    for name, size in (("table.s1", 1.5), ("table.s2", 0.8)):
        found[name] = torch.full_like(found[name], size)
    return found


def evict(x, count, seed=0, **more):
    keep = Less()
    return choose(x | trained(seed) | more, count, build("score", "knorm"), keep=keep, most=count)


def gone(x, found):
    """Keys and values [N,D] that went, of the first row and head."""
    where = torch.cat((x["kept_pos"], x["recent_pos"][:, None].expand(-1, G, -1)), dim=2)[0, 0]
    real = (where >= 0) & (where < x["seen"][0])
    stays = set(found["pos"][0, 0].tolist())
    lost = [i for i in range(len(where)) if real[i] and int(where[i]) not in stays]
    keys = torch.cat((x["kept_k"], x["recent_k"]), dim=2)[0, 0]
    values = torch.cat((x["kept_v"], x["recent_v"]), dim=2)[0, 0]
    return keys[lost], values[lost]


def gelu(x):
    return np.array([a * (1 + math.erf(a / math.sqrt(2))) / 2 for a in x])


def asks(query, q1, q2):
    """phi(q) = |GELU(GELU(q W1) W2)| of one query."""
    return np.abs(gelu(gelu(query @ q1) @ q2))


def leaves(key, k1, k2, k3, s1, s2):
    """psi(k) = |u + (u W3) s2| with u = |s1| GELU(GELU(k W1) W2), of one key."""
    u = np.abs(s1) * gelu(gelu(key @ k1) @ k2)
    return np.abs(u + (u @ k3) * s2)


@pytest.mark.parametrize("name", ["q1", "q2", *MAPS])
def test_another_map_is_another_output(name):
    """The formula reads every one of the trained maps."""
    with pytest.raises(AssertionError):
        law_formula({name: taken_tables()[name] * -0.7})


def test_the_output_is_the_formula():
    law_formula({})


def law_formula(other):
    """(phi(q) H + sum e^s v) / (phi(q) z + sum e^s), the sums token by token, but for other maps."""
    x = slots(0)
    found = evict(x, 5)
    keys, values = gone(x, found)
    assert len(keys) > 3
    q = torch.randn(1, G * R, 1, D, generator=torch.Generator().manual_seed(3))
    tables = taken_tables()
    value, lse = Less().read(q, found["absorbed.sums"][:1], tables["q1"], tables["q2"])
    got = attention(
        q, found["k"][:1], found["v"][:1], torch.tensor([[99]]), torch.arange(5)[None], None, 0.4, 0.0, "causal", 0,
        beside=value, beside_lse=lse,
    )  # fmt: skip
    told = {n: t.double().numpy() for n, t in (tables | other).items()}
    maps = {n: told[n][0] for n in MAPS}
    for head in range(R):
        weigh = asks(q[0, head, 0].double().numpy(), told["q1"][head], told["q2"][head])
        top, below = torch.zeros(D), torch.zeros(())
        for key, v in zip(keys, values, strict=True):
            share = float(weigh @ leaves(key.double().numpy(), **maps))
            top, below = top + share * v, below + share
        for slot in range(5):
            share = (q[0, head, 0] @ found["k"][0, 0, slot] * 0.4).exp()
            top, below = top + share * found["v"][0, 0, slot], below + share
        torch.testing.assert_close(got[0, head, 0], top / below, atol=1e-5, rtol=1e-5)
    plain = attention(
        q, found["k"][:1], found["v"][:1], torch.tensor([[99]]), torch.arange(5)[None], None, 0.4, 0.0, "causal", 0
    )  # fmt: skip
    assert (plain - got).abs().max() > 0.01


def taken_tables():
    return {n.removeprefix("table."): t for n, t in trained().items() if n.startswith("table.")}


def test_tokens_in_any_order_and_over_several_evictions_give_one_state():
    x = slots(1, base=(0, 0, 0), recent=(14, 11, 9))
    want = evict(x, 3)["absorbed.sums"]
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    mixed = {n: t.clone() for n, t in x.items()}
    for name in ("recent_k", "recent_v", "recent_pos"):
        axis = 1 if name == "recent_pos" else 2
        part = mixed[name].narrow(axis, 0, 9)
        part.copy_(part.index_select(axis, order))
    assert (want[..., -1] >= 0).all() and (want[..., -1].sum(2) > 0).all()
    torch.testing.assert_close(evict(mixed, 3)["absorbed.sums"], want, atol=1e-5, rtol=1e-5)
    first = evict(x, 6)
    kept = {f"kept_{n}": first[n] for n in ("k", "v", "pos", "absorbed.sums")}
    rest = {n: t for n, t in x.items() if n.startswith("recent_")}
    rest["recent_pos"] = torch.full_like(x["recent_pos"], -1)
    whole = {n: t for n, t in x.items() if not n.startswith(("kept_", "recent_"))}
    score, keep = build("score", "knorm"), Less()
    again = choose(whole | rest | kept | tables_only(), 3, score, keep=keep, most=3)
    torch.testing.assert_close(again["absorbed.sums"], want, atol=1e-5, rtol=1e-5)
    assert (again["absorbed.sums"] - first["absorbed.sums"]).abs().max() > 0.01


def tables_only():
    return {n: t for n, t in trained().items() if n.startswith("table.")}


# Sessions


@pytest.fixture(scope="module")
def maps(stateful, tmp_path_factory):
    """The file of random maps, of large weights, for conftest's llama."""
    program = stateful("llama")
    file = tmp_path_factory.mktemp("less") / "less.safetensors"
    soft = Absorbing(program, Less(), keys_of(program))
    parts = soft.start(8, 0)
    for part in parts.values():
        part["s1"].fill_(2.0)
    write(soft.method, file, parts, soft.names, {})
    return str(file)


def tables(file, kept=12):
    return {**recipe("knorm", kept), "kv.keep": {"use": "less", "trained": file}}


def test_nothing_evicted_is_the_whole_cache_bit_for_bit(stateful, maps):
    tokens = np.random.default_rng(0).integers(3, 60, (2, 44))
    ours, whole = (
        evicting(stateful("llama"), t).session(2, budget=FOREVER)
        for t in (tables(maps), recipe("knorm"))
    )
    for one in (ours, whole):
        one.run(tokens[:, :40])
        one.end_prompt()
    assert np.array_equal(ours.run(tokens[:, 40:]), whole.run(tokens[:, 40:]))


def test_sums_are_of_fixed_size_and_go_back_with_the_row(stateful, maps):
    case = evicting(stateful("llama"), tables(maps))
    tokens, ours = case.tokens(2, 50), case.session(2)
    size = lambda one: sum(a.nbytes for n, a in state(one).items() if n.startswith("absorbed."))  # noqa: E731
    ours.run(tokens[:, :9])
    none = size(ours)
    ours.run(tokens[:, 9:40])
    ours.end_prompt()
    before = state(ours)["absorbed.0.sums"].copy()
    assert size(ours) == none == 2 * 2 * 2 * 8 * 11 * 4 and (before[..., -1].sum(2) > 0).all()
    other = ours.fork()
    want = other.run(tokens[:, 40:44])
    ours.run(tokens[:, 46:50])
    ours.rewind(40)
    close(ours.run(tokens[:, 40:44]), want)
    dropped = evicting(stateful("llama"), recipe("knorm")).session(2)
    dropped.run(tokens[:, :40])
    dropped.end_prompt()
    with pytest.raises(AssertionError):
        close(dropped.run(tokens[:, 40:44]), want)
    other.rewind(0)
    assert not state(other)["absorbed.0.sums"].any()
    assert np.array_equal(state(ours)["absorbed.0.sums"], before)
    close(other.run(tokens[:, :9]), case.session(2).run(tokens[:, :9]))


def test_rows_are_as_they_are_alone(stateful, maps):
    case = evicting(stateful("llama"), tables(maps))
    tokens, together = case.tokens(2, 60), case.session(2)
    together.run(tokens[:, :40], [40, 23])
    together.end_prompt()
    found = singles(together, tokens[:, 40:43])
    for row, n in enumerate((40, 23)):
        alone = case.session()
        alone.run(tokens[[row], :n])
        alone.end_prompt()
        close(found[[row]], singles(alone, tokens[[row], 40:43]))


@pytest.mark.long
def test_graphs_give_what_the_oracle_does(tmp_path):
    model = models.make("llama", 2)
    file = tmp_path / "maps.safetensors"
    program = over_state(capture(model))
    soft = Absorbing(program, Less(), keys_of(program))
    parts = soft.start(8, 0)
    for part in parts.values():
        part["s1"].fill_(2.0)
    write(soft.method, file, parts, soft.names, {})
    table = {"kv": {"score": {"use": "knorm"}, "keep": {"use": "less", "trained": str(file)}}}
    table["kv"]["budget"] = {"use": "uniform", "tokens_kept": 8}
    tokens = np.random.default_rng(0).permutation(50)[None, :46].repeat(2, 0)
    with accel.optimize(model, table, max_context=128, max_batch=2) as compiled:
        eager = oracle(compiled)
        found = []
        for one in (compiled, eager):
            with one.session(2) as session:
                session.run(tokens[:, :21], [21, 5])
                session.end_prompt()
                logits = [session.run(tokens[:, 21:35])]
                session.end_prompt()
                found.append([*logits, session.run(tokens[:, 35:39])])
        for a, b in zip(*found, strict=True):
            close(a, b)


# Training, and what is refused


def test_training_takes_error_away(stateful, tmp_path):
    options = TrainOptions(rate=1e-2, minutes=1.0, inner=8, seed=0, length=24)
    program = stateful("llama")
    soft = Absorbing(program, Less(), keys_of(program))
    run = AbsorbRun(soft, soft.start(8, 0), options, tmp_path / "run")
    rng = torch.Generator().manual_seed(0)
    rows = [(torch.randint(3, 60, (2, 25), generator=rng), torch.ones(2, 24)) for _ in range(4)]
    before = soft_loss(soft, rows, run.parts)
    for i in range(40):
        run.learn(*rows[i % 4])
    after = soft_loss(soft, rows, run.parts)
    assert before == pytest.approx(1.0, abs=0.05) and after < 0.9


def soft_loss(soft, rows, parts):
    with torch.no_grad():
        return float(
            np.mean([float(soft.loss(soft.observe(*row), parts, i)) for i, row in enumerate(rows)])
        )


def test_bad_input_is_refused(stateful, maps):
    with pytest.raises(RecipeError, match="kv.keep.less: rank is 0; give 1 to 256"):
        build("keep", "less", rank=0)
    with pytest.raises(PassError, match="of size"):
        evicting(
            stateful("llama"),
            {**tables(maps), "kv.keep": {"use": "less", "trained": maps, "rank": 4}},
        )
    with pytest.raises(PassError, match="another model"):
        evicting(stateful("llama"), {**tables(""), "kv.keep": {"use": "less"}})
