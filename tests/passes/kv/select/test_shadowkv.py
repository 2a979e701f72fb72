"""ShadowKV: its chunks beside the paper's by number, keys of fewer directions, what it keeps and where, builds against
the oracle, bad input.
"""

import models
import numpy as np
import pytest
import torch

import accel
from accel.compiler.assemble import assemble
from accel.ir.errors import PassError, RecipeError
from accel.ir.ops.attention import Form
from accel.ir.recipe import Recipe
from accel.ir.state import Home
from accel.passes.kv._shared.rotation import rotated, rotation_of
from accel.passes.kv._shared.tables import appended, attentions
from accel.passes.kv.select._pages import Where
from accel.passes.kv.select.shadowkv import Shadowkv

from ....refused import refuses
from ....select_case import Selecting, built
from ....session_ways import close, law_every_target, singles

G, R, C, D = 2, 3, 160, 8
OWN = 150  # the slot of the token, which closes no chunk
OPTIONS = {"page": 4, "tokens_read": 24, "outliers": 5, "local": 2}


def case(seed=0):
    """Keys [G,C,D], some of which lie apart from their neighbours, and the queries [G,R,D] of one token."""
    r = torch.Generator().manual_seed(seed)
    common = torch.randn(G, C // 4, 1, D, generator=r)
    keys = (2 * common + torch.randn(G, C // 4, 4, D, generator=r)).flatten(1, 2)
    return keys, torch.randn(G, R, D, generator=r)


def placed(method, keys):
    """The parts of the keys' chunks, and where the token and these lie."""
    parts = method.summary(keys.unflatten(1, (-1, method.page))[None])
    held = torch.where(torch.arange(C) <= OWN, torch.arange(C), -1)[None]
    return parts, (torch.tensor([[OWN]]), held, torch.tensor([OWN]))


def chosen(method, keys, queries):
    parts, places = placed(method, keys)
    where = Where(*places, Form("causal", scale=D**-0.5))
    return method.choice({"queries": queries[None], "parts": parts, "form": where.mask}, where, R)[
        0, :, 0
    ]


def by_paper(method, keys, queries):
    """For each head: local chunks with the token's own, outliers and selected ones, as the paper's code has them."""
    found, own = [], OWN // method.page
    context = own - method.local
    for head in range(G):
        chunks = keys[head, : context * method.page].unflatten(0, (-1, method.page))
        landmarks = chunks.mean(1)
        like = torch.cosine_similarity(landmarks[:, None], chunks, dim=-1).amin(1)
        outliers = like.topk(method.outliers, largest=False).indices.tolist()
        rest = [n for n in range(context) if n not in outliers]
        shares = (queries[head] @ landmarks[rest].T / D**0.5).softmax(-1).amax(0)
        best = shares.topk(method.tokens_read // method.page).indices.tolist()
        found.append((range(context, own + 1), outliers, [rest[i] for i in best]))
    return found


def law_paper(method, seed):
    keys, queries = case(seed)
    lists = chosen(method, keys, queries).tolist()
    for listed, groups in zip(lists, by_paper(method, keys, queries), strict=True):
        wanted = [n for group in groups for n in group]
        assert len(set(wanted)) == len(wanted) == method.count
        assert sorted(listed) == sorted(wanted)


def test_chunks_are_those_of_the_paper():
    for seed in range(4):
        law_paper(built("shadowkv", **OPTIONS), seed)


@pytest.mark.parametrize("what", ["likeness", "landmark", "vote"])
def test_another_choice_is_caught(what):
    class Broken(Shadowkv):
        def summary(self, keys):
            found = super().summary(keys)
            if what == "likeness":
                found[what] = -found[what]
            elif what == "landmark":
                found[what] = keys[:, :, :, 0]
            return found

        def vote(self, scores, seen):
            return scores.sum(2) if what == "vote" else super().vote(scores, seen)

    with pytest.raises(AssertionError):
        for seed in range(4):
            law_paper(Broken(**OPTIONS), seed)


def test_what_is_no_number_is_read():
    method, (keys, queries) = built("shadowkv", **OPTIONS), case()
    keys[0, 50, 3] = torch.nan
    lists = chosen(method, keys, queries)
    assert 12 in lists[0].tolist()
    assert len(set(lists[0].tolist())) == len(set(lists[1].tolist())) == method.count


# Keys of fewer directions

CODED = 121  # tokens of the prompt, the last of which fill no chunk


def law_split(method, seed):
    """What is rebuilt lies whole in the prompt, each chunk once, and is neither an outlier nor local."""
    keys, queries = case(seed)
    parts, places = placed(method, keys)
    asked = queries.flatten(0, 1)[None, None]  # [1,1,H,D]
    names = "queries", "positions", "k_pos", "slots", "coded"
    x = dict(zip(names, (asked, *places, torch.tensor([CODED])), strict=True)) | parts
    exact, rebuilt = (
        pages[0, :, 0].tolist()
        for pages in method._split(Form("causal", scale=D**-0.5), G, list(parts), x)
    )
    for head, (local, outliers, best) in enumerate(by_paper(method, keys, queries)):
        low = [n for n in rebuilt[head] if n >= 0]
        assert len(set(low)) == len(low) and set(low) == {n for n in best if n < CODED // 4}
        rest = [n for n in exact[head] if n >= 0]
        assert sorted(rest + low) == sorted([*local, *outliers, *best])
        assert not {*low} & {*local, *outliers} and len(low) < len(best)


def test_outliers_and_local_chunks_are_not_rebuilt():
    options = OPTIONS | {"local": 3, "tokens_read": 48}
    for seed in range(3):
        law_split(built("shadowkv", **options), seed)

    class Broken(Shadowkv):
        @property
        def exact(self):
            return 1

    with pytest.raises(AssertionError):
        law_split(Broken(**options), 0)


ALL = {"tokens_read": 160, "outliers": 1, "local": 1, "dense_layers": 0}  # of buffers of 256 slots
FULL = 20  # numbers of a token's keys


@pytest.fixture(scope="module")
def whole(stateful):
    return Selecting(stateful("llama"))


def decoded(case, wrap=None):
    """Logits through prompts, one of them behind a rewind into the one before, and single tokens."""
    tokens = case.tokens(2, 96)
    with case.session(2, wrap) as session:
        found = [
            session.prompt(tokens[:, :50], np.array([50, 23])),
            singles(session, tokens[:, 50:56]),
        ]
        session.rewind(np.array([31, 20]))
        found += [singles(session, tokens[:, 60:66]), session.run(tokens[:, 66:70])]
        with session.fork() as other:
            found.append(session.prompt(tokens[:, 70:90]))
            found.append(singles(session, tokens[:, 90:96]))
            found.append(singles(other, tokens[:, 70:76]))
    return found


def off(case, whole):
    return max(
        float(np.abs(a - b).max()) for a, b in zip(decoded(case), decoded(whole), strict=True)
    )


def law_exact(case, whole, wrap=None):
    for a, b in zip(decoded(case, wrap), decoded(whole), strict=True):
        close(a, b)


@pytest.mark.long
def test_all_directions_of_all_chunks_are_the_model(stateful, whole):
    case = Selecting(stateful("llama"), Shadowkv(**Shadowkv.small | ALL | {"low_rank": 160}))
    assert case.program.facts.low_rank.ranks == (FULL, FULL)
    law_exact(case, whole)

    def forgets(backend):
        """To tell the state what a rewind took."""
        part = backend.part
        backend.part = lambda name, given: (
            None if name == "factor" and not given["stop"].any() else part(name, given)
        )
        return backend

    with pytest.raises(AssertionError):
        law_exact(case, whole, forgets)

    class Broken(Shadowkv):
        def _rebuilt(self, form, interleaved, x):
            return super()._rebuilt(form, interleaved, x | {"k_pos": x["k_pos"] - 1})

    with pytest.raises(AssertionError):
        law_exact(
            Selecting(stateful("llama"), Broken(**Shadowkv.small | ALL | {"low_rank": FULL})), whole
        )


@pytest.mark.long
def test_fewer_directions_lose_more(stateful, whole):
    lost = [
        off(
            Selecting(stateful("llama"), Shadowkv(**Shadowkv.small | ALL | {"low_rank": rank})),
            whole,
        )
        for rank in (FULL, 14, 4)
    ]
    assert 100 * lost[0] < lost[1] < lost[2]


def law_svd(case, wrap=None):
    """What is lost of a prompt's keys is what no r directions hold, by an SVD."""
    tokens = case.tokens(2, 50)
    with case.session(2, wrap) as session:
        session.prompt(tokens, np.array([50, 23]))
        state = session._core.backend._state
        for layer, node in attentions(case.program).items():
            rotation = rotation_of(case.program, appended(node), "keys")
            for row, count in enumerate((50, 23)):
                keys = state[f"kv.{layer}.k"][row, :, :count]
                cos, sin = rotation.cos[:count], rotation.sin[:count]
                keys = rotated(keys, cos, -sin, rotation.interleaved)
                low = state[f"low_rank.{layer}.keys"][row, :, :count]
                back = low @ state[f"low_rank.{layer}.basis"][row]
                least = torch.linalg.svdvals(keys.transpose(0, 1).flatten(1))[
                    case.method.low_rank :
                ]
                torch.testing.assert_close((back - keys).norm(), least.norm(), rtol=1e-3, atol=1e-4)


def test_directions_are_those_of_an_svd(stateful):
    case = Selecting(stateful("llama"), built("shadowkv", low_rank=7))
    law_svd(case)

    def others(backend):
        part = backend.part

        def run(name, given):
            turn = {
                n: np.roll(x, 1, axis=3) for n, x in given.items() if n.startswith("directions")
            }
            return part(name, given | turn)

        backend.part = run
        return backend

    with pytest.raises(AssertionError):
        law_svd(case, others)


@pytest.mark.long
def test_every_way_through_a_session_is_that_of_the_oracle():
    small = {"use": "shadowkv", **Shadowkv.small, "dense_layers": 1}
    with accel.optimize(
        models.make("llama", 2), {"kv": {"select": small}}, max_context=128, max_batch=2
    ) as made:
        law_every_target(made)
        homes = {s.name for s in made.artifact.state if s.home is Home.MAPPED}
        assert homes == {"kv.1.k", "kv.1.v"}
        mapped = 2 * 2 * 10 * 4
        fast = 8 + 2 * 2 * 10 * 4 + 2 * (10 + 1) * 4 / 4 + 6 * 4
        assert made.report["kv_bytes_per_token"] == fast + mapped
        assert made.report["kv_mapped_per_token"] == mapped
        with made.session(batch=2) as session:
            session.prompt([[5] * 20] * 2)
            row = 2 * 6 * 10 * 4 + 8  # the directions, and how many tokens have keys in them
            assert session.stats["kv_bytes"] == 2 * (256 * (fast + mapped) + row)
            assert session.stats["kv_mapped"] == 2 * 256 * mapped


@pytest.mark.parametrize("codec", ["kv-int8", "kivi"])
def test_a_codec_has_keys_of_its_own(codec):
    tables = {"kv.select": {"use": "shadowkv", "dense_layers": 0}, "kv.codec": {"use": codec}}
    with pytest.raises(PassError, match="kv.codec encodes its keys.*leave kv.codec out"):
        accel.optimize(models.tiny(), tables, max_context=64)


test_options_that_make_no_sense = refuses(
    "kv.select.shadowkv",
    ({"outliers": -1}, "kv.select.shadowkv: outliers is -1; give 0 to 4096"),
    ({"local": -1}, "kv.select.shadowkv: local is -1; give 0 to 4096"),
    ({"outliers": 5000}, "kv.select.shadowkv: outliers is 5000; give 0 to 4096"),
    ({"page": 6}, "kv.select.shadowkv: page is 6; give 1, 2, 4, 8, 16, 32, 64 or 128"),
    ({"low_rank": 0}, "kv.select.shadowkv: low_rank is 0; give 1 to 16384"),
    ({"low_rank": 1 << 20}, "kv.select.shadowkv: low_rank is 1048576; give 1 to 16384"),
    ({"tokens_read": 0}, "kv.select.shadowkv: tokens_read is 0; give at least 1"),
    ({"outlier": 3}, "did you mean 'outliers'"),
)


def test_layers_that_are_deleted_are_refused():
    """Its entries read the keys of all layers."""
    tables = {"kv.select": {"use": "shadowkv"}, "depth": {"use": "shortgpt"}}
    with pytest.raises(
        RecipeError, match="kv.select = shadowkv cannot be combined with .*shortgpt"
    ):
        assemble(Recipe(name="both", tables=tables))
