"""attention-predictor: its image and list by number, what is noted when, its training, every target, bad input."""

from functools import cache

import models
import numpy as np
import pytest
import torch
from matrix import over_state
from reference_data import REFERENCE
from safetensors.torch import load_file
from torch.nn import functional

import accel
from accel.compiler.assemble import assemble
from accel.compiler.train.runs.fit import Fit
from accel.ir.capture.capture import capture
from accel.ir.errors import PassError, RecipeError
from accel.ir.ops.attention import Form
from accel.ir.recipe import Recipe
from accel.ir.tables import Observed
from accel.passes.kv.select.attention_predictor import AttentionPredictor
from accel.passes.trained import ALL

from ....refused import refuses
from ....select_case import Selecting, built, measured_for
from ....session_ways import close, law_every_target, singles

B, H, G, D, C = 2, 4, 2, 6, 40
LENGTHS = (35, 22)  # tokens before the newest


def method(**options):
    return built("attention-predictor", **options)


def network(seed=0):
    r = torch.Generator().manual_seed(seed)
    sizes = AttentionPredictor().shared(0)
    return {n: torch.randn(*size, generator=r) * 0.3 for n, size in sizes.items()}


def by_hand(image, first, end, w):
    """What the paper's network says of blocks first..end-1 of one head's image [R,N], as a picture of these alone."""
    w = {n: t.double() for n, t in w.items()}
    x = image[None, None, :, first:end].double()
    x = functional.conv2d(x, w["one"], w["one_bias"], padding=1).relu()
    x = functional.conv2d(x, w["two"], w["two_bias"], padding=1).relu()
    x = functional.adaptive_avg_pool2d(x, (1, None))[:, :, 0]
    return functional.conv1d(x, w["out"][..., None], w["out_bias"])[0, 0]


# What is foretold


def law_image(one):
    """Blocks that do not lie between are no part of the picture, wherever it ends."""
    w = network()
    image = torch.rand(3, 8, 20, generator=torch.Generator().manual_seed(1))
    for first, end in ((1, 20), (1, 9), (3, 4)):
        numbers = torch.arange(20)
        inside = ((numbers >= first) & (numbers < end)).expand(3, -1)
        found = one.foretell(image * inside[:, None], inside, w)
        for head in range(3):
            np.testing.assert_allclose(
                found[head, first:end], by_hand(image[head], first, end, w), atol=1e-4
            )


def test_the_network_is_the_papers():
    law_image(method())


def test_a_picture_without_an_edge_is_caught():
    class Edgeless(AttentionPredictor):
        def foretell(self, image, inside, shared):
            return super().foretell(image, torch.ones_like(inside), shared)

    with pytest.raises(AssertionError):
        law_image(Edgeless())


# What is read


def case(seed=0, **options):
    one, r = method(**options), torch.Generator().manual_seed(seed)
    slots, where = torch.tensor(LENGTHS), torch.arange(C)
    x = {
        "queries": torch.randn(B, 1, H, D, generator=r),
        "keys": torch.randn(B, G, C, D, generator=r),
        "positions": slots[:, None], "slots": slots,
        "k_pos": torch.where(where <= slots[:, None], where, -1),
    }  # fmt: skip
    image = torch.rand(B, one.history, H, C // one.block, generator=r)
    return one, x, {"attention": image, **network()}


def chosen(one, x, before):
    known = torch.ones(B, one.history, dtype=torch.bool)
    return one.choose(x, Form("causal"), before, known)


def expected(one, before, row, group):
    """Slots, as the paper's page has them."""
    own = LENGTHS[row]
    first = one.sinks // one.block
    end = first + max(0, (own + 1 - one.sinks - one.window) // one.block)
    worth = torch.stack([
        by_hand(before["attention"][row, :, h], first, end, before)
        for h in range(group * H // G, (group + 1) * H // G)
    ]).amax(0)  # fmt: skip
    blocks = (worth.topk(min(one.blocks, end - first)).indices + first).tolist()
    read = {*range(one.sinks), *range(end * one.block, own + 1)}
    return sorted(read | {b * one.block + i for b in blocks for i in range(one.block)})


def law_list(one, x, before):
    found = chosen(one, x, before)
    for row, group in np.ndindex(B, G):
        listed = [s for s in found[row, group, 0].tolist() if s >= 0]
        assert sorted(listed) == expected(one, before, row, group)
        whole = [s for s in listed if LENGTHS[row] - s >= one.tail]
        assert len(whole) == one.sinks + one.blocks * one.block or len(listed) == LENGTHS[row] + 1


def test_the_blocks_that_are_foretold_are_read():
    law_list(*case())


def test_a_history_that_is_upside_down_is_caught():
    one, x, before = case()
    turned = {**before, "attention": before["attention"].flip(3)}
    with pytest.raises(AssertionError):
        listed = chosen(one, x, turned)
        assert torch.equal(listed, chosen(one, x, before))


def test_heads_in_another_order_read_the_same():
    one, x, before = case()
    order = torch.tensor([1, 0, 3, 2])
    other = {**before, "attention": before["attention"][:, :, order]}
    assert torch.equal(chosen(one, x, before), chosen(one, x, other))
    groups = torch.tensor([2, 3, 0, 1])
    other = {**before, "attention": before["attention"][:, :, groups]}
    assert torch.equal(chosen(one, x, before).flip(1), chosen(one, x, other))


def test_with_few_blocks_everything_is_read():
    one, x, before = case()
    short = torch.tensor([7, 2])  # two blocks between, none
    x |= {"slots": short, "positions": short[:, None]}
    for row, found in enumerate(chosen(one, x, before)[:, 0, 0].tolist()):
        assert sorted(s for s in found if s >= 0) == list(range(short[row] + 1))


def test_what_is_no_number_is_read():
    one, x, before = case()
    before["attention"][0, :, 0, 6] = float("nan")
    assert {12, 13} <= set(chosen(one, x, before)[0, 0, 0].tolist())


# What is noted


def attention(x, row, head, read):
    """A head's weights over these slots."""
    keys = x["keys"][row, head // (H // G)]
    logits = torch.stack([x["queries"][row, 0, head] @ keys[s] for s in read]) * 0.5
    return dict(zip(read, logits.double().softmax(0).tolist(), strict=True))


def test_attention_over_what_is_read_is_noted_and_nothing_elsewhere():
    one, x, before = case()
    found = one.attended({**x, **before}, chosen(one, x, before), Form("causal", scale=0.5))
    for row, head in np.ndindex(B, H):
        read = expected(one, before, row, head // (H // G))
        share = attention(x, row, head, read)
        first, end = one.sinks // one.block, (LENGTHS[row] + 1 - one.window) // one.block
        for block in range(C // one.block):
            inside = [
                share[s] for s in range(block * one.block, (block + 1) * one.block) if s in share
            ]
            want = max(inside) if inside and first <= block < end else 0.0
            assert abs(found[row, 0, head, block].item() - want) < 1e-5


@pytest.fixture(scope="module")
def made(stateful):
    @cache
    def get(**options):
        return Selecting(stateful("llama"), method(dense_layers=1, **options))

    return get


def noted(session, layer=1):
    state = session._core.backend._state
    return state[f"choice.{layer}.attention"], state[f"choice.{layer}.pos"]


def true(observed, one, layer=1):
    """What tokens of one whole call gave to blocks [B,H,T,N]."""
    return one.noted(observed.layers[layer], 0, observed.layers[layer].keys.shape[2])


def law_history(case, tokens, dense):
    """Behind a prompt, and at tokens that look at everything, the history is the true one: of a model that reads
    everything (`dense`), in its first layer that chooses.
    """
    one = case.method
    rows = Fit(dense, one).rows(torch.from_numpy(tokens), torch.ones(1, tokens.shape[1] - 1))
    want = true(rows, one)
    with case.session() as session:
        session.prompt(tokens[:, :30])
        singles(session, tokens[:, 30:50])
        held, places = noted(session)
        blocks = min(held.shape[3], want.shape[3])
        looked = []
        for i, place in enumerate(places[0].tolist()):
            if 9 < place < 30 or (place >= 30 and place % one.every == 0):
                close(held[0, i, :, :blocks], want[0, :, place, :blocks])
                looked.append(place)
        assert set(range(20, 30)) <= set(looked) and max(looked) >= 30
        sparse = [i for i, p in enumerate(places[0].tolist()) if p >= 30 and p % one.every]
        return any(
            np.abs(held[0, i, :, :blocks] - want[0, :, int(places[0, i]), :blocks]).max() > 1e-3
            for i in sparse
        )


@pytest.mark.long
def test_the_history_is_the_true_one_where_tokens_look(made, stateful):
    case = made()
    assert law_history(case, case.tokens(1, 56), stateful("llama")), (
        "the others note what they read"
    )


@pytest.mark.long
def test_with_every_token_looking_the_history_is_the_true_one(made, stateful):
    case = made(every=1)
    assert not law_history(case, case.tokens(1, 56), stateful("llama"))


@pytest.mark.long
def test_a_history_that_forgets_the_prompt_is_caught(stateful):
    class Forgets(type(method())):
        def _noted(self, form, x):
            held, places = super()._noted(form, x)
            return held * 0, places

    case = Selecting(stateful("llama"), Forgets(**vars(method(dense_layers=1))))
    with pytest.raises(AssertionError):
        law_history(case, case.tokens(1, 56), stateful("llama"))


@pytest.mark.long
def test_a_model_with_sinks_reads_all_that_it_may(stateful):
    """Sinks are one more value of the regions: where all tokens are read, logits are the model's."""
    whole = Selecting(stateful("gpt_oss"))
    case = Selecting(stateful("gpt_oss"), method(tokens_read=80))
    tokens = whole.tokens(1, 36)
    with case.session() as a, whole.session() as b:
        close(a.prompt(tokens[:, :30]), b.prompt(tokens[:, :30]))
        close(singles(a, tokens[:, 30:]), singles(b, tokens[:, 30:]))


# The trained part


def test_examples_are_the_history_and_what_comes_next():
    r = torch.Generator().manual_seed(4)
    q, k = torch.randn(1, H, 30, D, generator=r), torch.randn(1, G, 30, D, generator=r)
    one = method()
    for drawn in range(22):
        image, inside, wanted = one.example(Observed(q, k, k, Form("causal", scale=0.5)), drawn)
        assert image.shape == (H, one.history, 15) and wanted.shape == inside.shape == (H, 15)
        assert inside.any() and not (image * ~inside[:, None]).any()
    image, inside, wanted = one.example(Observed(q, k, k, Form("causal", scale=0.5)), 3 * 19 - 1)
    token, head, block = 29, 3, 4
    share = (q[0, head, token] @ k[0, 1, : token + 1].T * 0.5).softmax(0)
    close(wanted[head, block], share[8:10].max())


def test_training_comes_nearer_to_what_comes_next():
    r = torch.Generator().manual_seed(4)
    k = torch.randn(1, G, 60, D, generator=r)
    q = torch.randn(1, H, 1, D, generator=r) + 0.1 * torch.randn(1, H, 60, D, generator=r)
    one = method(dense_layers=0)

    class Text:
        layers, tokens = {0: Observed(q, k, k, Form("causal"))}, torch.ones(1)

    parts = one.start(Text, 1, torch.Generator().manual_seed(0))
    optimiser = torch.optim.Adam([t.requires_grad_() for t in parts[ALL].values()], lr=1e-2)
    losses = []
    for _ in range(40):
        loss = one.loss(parts, Text, 0.0)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4


def test_rows_without_blocks_are_refused():
    k = torch.zeros(1, G, 20, D)
    with pytest.raises(
        PassError, match="rows of 20 tokens have no history; give --length 177 or more"
    ):
        AttentionPredictor().example(Observed(k, k, k, Form("causal")), 0)


def test_the_bundled_part_is_the_papers_network():
    found = load_file(REFERENCE / "attention-predictor.safetensors")
    sizes = {f"all.{n}": size for n, size in AttentionPredictor().shared(0).items()}
    assert {n: tuple(t.shape) for n, t in found.items()} == sizes


# Targets


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Of two layers, the second of which chooses."""
    model = models.make("llama", 2)
    program = over_state(capture(model, max_context=128))
    file = measured_for(method(), program, tmp_path_factory.mktemp("part")).trained
    options = {**AttentionPredictor.small, "dense_layers": 1, "trained": file}
    recipe = {"kv": {"select": {"use": "attention-predictor", **options}}}
    with accel.optimize(model, recipe, max_context=128, max_batch=2, verify=True) as made:
        yield made


@pytest.mark.long
def test_every_way_through_a_session_is_that_of_the_oracle(compiled):
    law_every_target(compiled, into=0)


# Bad input


test_options_that_make_no_sense = refuses(
    "kv.select.attention-predictor",
    ({"page": 16}, "page"),
    ({"sinks": -16}, "kv.select.attention-predictor: sinks is -16; give at least 0"),
    ({"sinks": 24}, "kv.select.attention-predictor: sinks is 24; give a multiple of block = 16$"),
    ({"window": 0}, "kv.select.attention-predictor: window is 0; give at least 1"),
    ({"history": 0}, "kv.select.attention-predictor: history is 0; give at least 1"),
    ({"every": 0}, "kv.select.attention-predictor: every is 0; give at least 1"),
    (
        {"block": 24},
        "kv.select.attention-predictor: block is 24; give 1, 2, 4, 8, 16, 32, 64 or 128",
    ),
    ({"tokens_read": 0}, "kv.select.attention-predictor: tokens_read is 0; give at least 1"),
)


def test_drafts_are_refused():
    tables = {"kv.select": {"use": "attention-predictor"}, "draft": {"use": "prompt-lookup"}}
    with pytest.raises(RecipeError, match="gives the same logits as one call per token"):
        assemble(Recipe(tables=tables))
