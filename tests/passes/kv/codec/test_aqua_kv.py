"""aqua-kv: what the layer beneath foretells is not stored, and a step reads what the encoder saw."""

import models
import numpy as np
import pytest
import torch
from reference_data import REFERENCE, encode, sources
from tokenizers import Tokenizer

from accel.compiler.load.source import open_source
from accel.compiler.over_state import keys_of, over_state
from accel.ir.axis import find_axes
from accel.ir.capture.capture import capture
from accel.ir.errors import PassError
from accel.ir.tables import Observed, Rows
from accel.passes.kv._shared.tables import observed
from accel.passes.kv.codec import At
from accel.passes.kv.codec._encode import Encode
from accel.passes.trained import constants

from ....refused import refuses
from ....select_case import Selecting
from ....session_ways import close

AXIS = find_axes()["kv.codec"]
R, D, LAYERS = 16, 24, 3


def codec(**options):
    return AXIS.build("aqua-kv", **{"group": 8, "residual": R, "sinks": 0, **options})


@pytest.fixture(scope="module")
def blocks():
    """role -> layer -> [1,1,6,R,D]: a layer is half what a matrix makes of the one beneath, values of keys too."""
    generator = torch.Generator().manual_seed(0)

    def new(*shape):
        return torch.randn(*shape, generator=generator)

    keys, values = [new(1, 1, 6, R, D)], [new(1, 1, 6, R, D)]
    for _ in range(LAYERS - 1):
        keys.append(keys[-1] @ new(D, D) / D**0.5 + 0.2 * new(1, 1, 6, R, D) + 3)
        values.append((values[-1] @ new(D, D) + keys[-1] @ new(D, D)) / D**0.5)
    return {"k": keys, "v": values}


def maps_of(method, blocks):
    layers = {
        i: Observed(*(x.flatten(2, 3) for x in (k, k, v)), 1.0)
        for i, (k, v) in enumerate(zip(blocks["k"], blocks["v"], strict=True))
    }
    count = blocks["k"][0].flatten(2, 3).shape[2]
    return method.measure([Rows(torch.zeros(1, count + 1), torch.ones(1, count), layers)])


def chain(method, blocks, maps, stored=None, exact=False):
    """Encode layer after layer, or read what is `stored`: the parts and what they are read as, by (layer, role).
    `exact`, the control: layers are foretold by what the one beneath was, not by what is read of it.
    """
    parts, read = dict(stored or {}), {}
    for layer in range(LAYERS):
        for role in "kv":
            place = method.place(layer, LAYERS)
            source = {(i, r): x for r in "kv" for i, x in enumerate(blocks[r])} if exact else read
            known = {"read": (layer - 1, role), "keys": (layer, "k")}
            near = {n: source[known[n]] for n in method.near(role, place, True)}
            if stored is None:
                x = blocks[role][layer]
                parts[layer, role] = method.encode(At(role, D, place, maps[layer], near), x)
            if exact:
                near = {n: read[known[n]] for n in method.near(role, place, False)}
            back = method.decode(At(role, D, place, maps[layer], near), parts[layer, role])
            read[layer, role] = back.unflatten(2, (-1, R))
    return parts, read


def loss(method, blocks, maps, **options):
    _, read = chain(method, blocks, maps, **options)
    return sum(float((x - blocks[r][i]).square().sum()) for (i, r), x in read.items() if i)


def test_what_is_foretold_by_nothing_is_plain_quantisation(blocks):
    method = codec(bits=4)
    none = {i: {n: torch.zeros(s) for n, s in method.sizes(D, 1).items()} for i in range(LAYERS)}
    parts, _ = chain(method, blocks, none)
    kivi = AXIS.build("kivi", bits=4, group=8, residual=R)
    found, _ = chain(method, blocks, maps_of(method, blocks))
    for (layer, role), mine in parts.items():
        theirs = kivi.encode(At(role, D), blocks[role][layer])
        assert all(torch.equal(mine[n], theirs[n]) for n in mine)
        assert torch.equal(found[layer, role][""], theirs[""]) == (layer == 0)  # the control


def test_maps_make_rounding_smaller_and_bits_make_it_vanish(blocks):
    """Of what a layer is half made of the one beneath. The control: maps of other layers."""
    found = {}
    for bits in (2, 4, 8):
        method = codec(bits=bits)
        maps = maps_of(method, blocks)
        none = {i: {n: torch.zeros_like(t) for n, t in m.items()} for i, m in maps.items()}
        found[bits] = loss(method, blocks, maps)
        assert found[bits] < 0.5 * loss(method, blocks, none)
        assert loss(method, blocks, {0: maps[0], 1: maps[2], 2: maps[1]}) > found[bits]
    assert found[2] > 10 * found[4] > 100 * found[8]


def test_a_step_reads_bit_for_bit_what_the_encoder_saw(blocks):
    """Blocks that were encoded one at a time, read together. The control: maps of what was, not of what is read."""
    method = codec()
    maps = maps_of(method, blocks)
    alone = [
        chain(method, {r: [x[:, :, i : i + 1] for x in of] for r, of in blocks.items()}, maps)
        for i in range(6)
    ]
    stored = {
        at: {n: torch.cat([parts[at][n] for parts, _ in alone], 2) for n in alone[0][0][at]}
        for at in alone[0][0]
    }
    _, read = chain(method, blocks, maps, stored=stored)
    for at, x in read.items():
        assert torch.equal(x, torch.cat([seen[at] for _, seen in alone], 2))
    right, wrong = (loss(method, blocks, maps, exact=exact) for exact in (False, True))
    assert wrong > 1.2 * right


def drive(case, count=30):
    tokens = case.tokens(2, count + 4)
    with case.session(2) as session:
        session.run(tokens[:, :count], [count, 9])
        found = [session.run(tokens[:, [i]]) for i in range(count, count + 4)]
        return np.concatenate(found, 1)


@pytest.mark.long
def test_a_model_loses_less_with_more_bits(stateful):
    def read(method):
        return drive(Selecting(stateful("llama"), method))

    want = read(None)
    eight, two = (read(codec(residual=8, bits=bits, sinks=2)) for bits in (8, 2))
    close(read(codec(residual=32)), want)  # nothing is encoded yet
    assert 1e-4 < np.abs(eight - want).max() < 0.05 * np.abs(two - want).max()


def test_the_bits_of_a_number():
    method = AXIS.build("aqua-kv")
    assert [method.bits_of(At(r, 128, "later")) for r in "kv"] == [2.5, 2.5]
    assert [method.bits_of(At(r, 128, "first")) for r in "kv"] == [4.5, 4.5]


@pytest.mark.long
def test_the_bundled_maps_foretell_text_that_they_were_not_measured_on():
    """Each layer's keys and values vary less about what is foretold. The control: maps of another layer."""
    loaded = open_source(REFERENCE).load()
    program = over_state(capture(loaded.model, stored=loaded.stored))
    method = AXIS.build("aqua-kv", sinks=0)
    maps = method.constants(constants(method, program, keys_of(program)))
    tokenizer = Tokenizer.from_file(str(REFERENCE / "tokenizer.json"))
    ids = torch.from_numpy(encode(tokenizer, sources()[1][:4])[:1025]).long()
    (row,) = observed(program, [(ids[None], torch.ones(1, 1024))])

    def share(shift):
        """What is left of the squares about the mean [layers - 1,2], of keys and of values."""
        found, read = [], {}
        for layer in sorted(row.layers):
            x, now = row.layers[layer], {}
            place, of = method.place(layer, 8), maps[(layer + shift) % len(maps) if read else 0]
            for role, one in (("k", x.unrotated), ("v", x.values)):
                y = one.transpose(1, 2).flatten(2)[:, None].unflatten(2, (-1, 128))
                known = {"read": read.get(role), "keys": now.get("k")}
                near = {n: known[n] for n in method.near(role, place, True)}
                at = At(role, y.shape[-1], place, of, near)
                back = method.decode(at, method.encode(at, y))
                now[role] = back.unflatten(2, (-1, 128))
                if near:
                    linear = of["key_map" if role == "k" else "value_map"]
                    told = torch.cat([*near.values()], -1) @ linear[:-1] + linear[-1]
                    about = y - y.mean((0, 1, 2, 3))
                    found.append(float((y - told).square().sum() / about.square().sum()))
            read = now
        return np.array(found).reshape(-1, 2)

    left = share(0)
    assert left.max() < 1 and (left.mean(0) < (0.5, 0.25)).all()
    assert share(1).max() > 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plain_latent", "latent"),
        pytest.param("cla", "reads the cache of layer .*one of each", marks=pytest.mark.long),
    ],
)
def test_models_that_it_cannot_serve_are_refused(stateful, name, words):
    program = (
        over_state(capture(models.cla(), max_context=128)) if name == "cla" else stateful(name)
    )
    with pytest.raises(PassError, match=words):
        Encode(codec()).run(program)


test_what_makes_no_sense_is_refused = refuses(
    "kv.codec.aqua-kv",
    {"bits": 3},
    ({"group": 5}, "kv.codec.aqua-kv: residual is 128; give a multiple of group = 5"),
    {"sinks": -1},
)
