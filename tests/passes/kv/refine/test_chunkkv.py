"""ChunkKV: against chunks by hand; whole chunks stay, the same in all heads."""

import models
import numpy as np
import pytest

import accel
from accel.ir.entries.compress import COMPRESS
from accel.ir.errors import PassError, RecipeError

from ....kv_case import evicting, kept, recipe, table
from ....kv_slots import AXES, B, G, build, choose, named, sets, slots
from ....session_ways import close, oracle, singles, variants


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_is_the_best_chunks_of_all_heads(chunk, pooling):
    """Tokens are kept chunk by chunk, the last one in part."""
    method = build("refine", "chunkkv", chunk=chunk, pooling=pooling)
    for seed in range(4):
        x, score = slots(seed, base=(0, 0, 0), recent=(16, 12, 7)), build("score", "h2o", recent=2)
        drawn = named(x)["mass"].double().numpy()[:, :, 9:].mean(1)
        found = sets(choose(x, 7, score, refine=method))
        for row, n in enumerate((16, 12, 7)):
            inside = np.arange(n - 2)
            parts = [inside[i : i + chunk] for i in range(0, n - 2, chunk)]
            pool = np.sum if pooling == "sum" else np.mean
            parts.sort(key=lambda part: -pool(drawn[row, part]))
            must, left = {n - 1, n - 2}, min(7, n) - 2
            for part in parts:
                if len(part) > left:
                    assert found[row][0] <= must | set(part.tolist())
                    break
                must, left = must | set(part.tolist()), left - len(part)
            assert all(must <= head and len(head) == min(7, n) for head in found[row])


def test_chunks_go_by_position_where_tokens_are_missing():
    """Of the slots of a head, some are empty, and some tokens of a chunk went before."""
    method = build("refine", "chunkkv", chunk=4)
    for seed in range(4):
        x = slots(seed)
        given = named(x)
        where = given["positions"]
        found = method(given["mass"], where, where < 0)
        for row, head in np.ndindex(B, G):
            for slot, place in enumerate(where[row, head].tolist()):
                if place < 0:
                    continue
                mates = [
                    (s, p) for s, p in enumerate(where[row, head].tolist())
                    if p >= 0 and p // 4 == place // 4
                ]  # fmt: skip
                want = sum(
                    np.mean(
                        [float(given["mass"][row, h, s]) for h in range(G) if where[row, h, s] == p]
                    )
                    for s, p in mates
                )
                assert abs(float(found[row, head, slot]) - want) < 1e-4


def test_what_goes_alone_is_not_a_chunk():
    """The control: without the refine, single tokens stay."""
    x, score = slots(0, base=(0, 0, 0), recent=(16, 16, 16)), build("score", "h2o", recent=0)
    plain = sets(choose(x, 6, score))
    chunks = sets(choose(x, 6, score, refine=build("refine", "chunkkv", chunk=3)))
    assert all(len({p // 3 for p in head}) == 2 for row in chunks for head in row)
    assert any(len({p // 3 for p in head}) > 2 for row in plain for head in row)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"chunk": 0}, "chunk is 0; give 1 to 4096"),
        ({"pooling": "max"}, "pooling 'max' does not exist; known: mean, sum"),
        ({"reuse": 0}, "reuse is 0; give 1 to 1048576"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(RecipeError, match=message):
        AXES["refine"].build("chunkkv", **options)


# What layers share


def reusing(stateful, count, changed=None, **options):
    tables = {**recipe("snapkv", 12), "kv.refine": table("chunkkv", reuse=count, **options)}
    return evicting(stateful("llama"), {**tables, **(changed or {})})


def conversed(case):
    """What each layer keeps after two prompts with tokens behind them, the second of another length per row."""
    with case.session(2) as session:
        tokens = case.tokens(2, 64)
        session.prompt(tokens[:, :30], np.array([30, 21]))
        singles(session, tokens[:, 30:34])
        session.prompt(tokens[:, 34:50], np.array([9, 16]))
        return kept(session), singles(session, tokens[:, 50:54])


def law_reuse(case, count):
    """Layers of a group keep the same positions, head by head; the first what it would keep alone."""
    found, _ = conversed(case)
    for layer, where in found.items():
        assert np.array_equal(where, found[layer - layer % count])
    return found


@pytest.mark.long
def test_layers_that_share_keep_the_same(stateful):
    shared, alone = reusing(stateful, 2), reusing(stateful, 1)
    found, own = law_reuse(shared, 2), conversed(alone)[0]
    assert np.array_equal(found[0], own[0])
    assert not np.array_equal(own[0], own[1]), "or sharing would say nothing"
    with pytest.raises(AssertionError):
        law_reuse(alone, 2)


def test_a_layer_keeps_its_own_keys_and_values(stateful):
    """Of the tokens that the layer before chose."""
    case = reusing(stateful, 2)
    whole = evicting(stateful("llama"), recipe("knorm", 1 << 20))
    tokens = case.tokens(1, 30)
    with case.session(1) as session, whole.session(1) as plain:
        for one in (session, plain):
            one.prompt(tokens)
        mine, every = session._core.backend._state, plain._core.backend._state
        for layer, part in np.ndindex(2, 2):
            name = "kv"[part]
            where = mine[f"kept.{layer}.pos"].clamp(min=0)[..., None]
            source = every[f"kv.{layer}.{name}"]
            want = source.gather(2, where.expand_as(mine[f"kept.{layer}.{name}"]))
            close(mine[f"kept.{layer}.{name}"], want)


@pytest.mark.long
def test_layers_that_share_are_scored_once(stateful):
    def products(case):
        graph = case.program.entries[COMPRESS.name].graph
        return sum("softmax" in str(n.target) for n in graph.nodes)

    assert products(reusing(stateful, 2)) < products(reusing(stateful, 1))


@pytest.mark.long
def test_a_budget_beyond_the_text_loses_nothing_where_layers_share(stateful):
    changed = {"kv.budget": {"use": "uniform", "tokens_kept": 1 << 20}}
    whole = evicting(stateful("llama"), recipe("knorm", 1 << 20))
    close(conversed(reusing(stateful, 2, changed))[1], conversed(whole)[1])


@pytest.mark.long
def test_layers_that_cannot_share_are_refused(stateful):
    for changed, why in (
        (
            {"kv.budget": {"use": "kvzip", "tokens_kept": 12}},
            "unequal numbers of tokens; give reuse = 1",
        ),
        (
            {"kv.budget": table("pyramidkv", tokens_kept=24)},
            "layer 1 cannot keep what layer 0 does",
        ),
        ({"kv.budget": table("uniform", tokens_kept=12, dense_layers=1)}, "unequal numbers"),
    ):
        with pytest.raises(PassError, match=why):
            reusing(stateful, 2, changed)
    reusing(stateful, 1, changed)  # the control


@pytest.mark.long
def test_layers_that_share_in_every_target():
    table_of = {"use": "chunkkv", "chunk": 3, "reuse": 2}
    recipe_of = {
        "kv.score": {"use": "snapkv", "window": 4, "kernel": 1}, "kv.refine": table_of,
        "kv.budget": {"use": "uniform", "tokens_kept": 12},
    }  # fmt: skip
    model = models.ARCHITECTURES["llama"]()
    tokens = np.random.default_rng(3).integers(0, 50, (2, 40))

    def drive(session):
        with session:
            first = session.prompt(tokens[:, :30], np.array([30, 17]))
            return [first, singles(session, tokens[:, 30:36])]

    with accel.optimize(model, recipe_of, max_context=64, max_batch=2) as made:
        want = drive(oracle(made).session(batch=2))
        for kernels, loaded in variants(made):
            for a, b in zip(drive(loaded.session(batch=2)), want, strict=True):
                assert np.abs(a - b).max() < 2e-3 * max(1.0, np.abs(b).max()), kernels
