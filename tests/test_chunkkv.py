"""ChunkKV: against chunks by hand; whole chunks stay, the same in all heads."""

import numpy as np
import pytest

from accel.ir.errors import RecipeError

from .kv_slots import AXES, B, G, build, choose, named, sets, slots


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
        ({"chunk": 0}, "chunk is 0; give at least 1 token"),
        ({"pooling": "max"}, "pooling is 'max'; give 'sum' or 'mean'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(RecipeError, match=message):
        AXES["refine"].build("chunkkv", **options)
