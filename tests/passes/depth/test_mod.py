"""mod: tokens that pass a branch by, against transformers' module with plain routers."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from accel.compiler.over_state import over_state
from accel.compiler.train.runs.routers import SoftLayers
from accel.ir.capture.capture import capture
from accel.ir.errors import PassError, RecipeError
from accel.ir.ops.attention import attention
from accel.passes.depth.mod import Mod

from ...depth_case import NEVER, far, module_of
from ...router_case import file_of_part, part, ran_by, routed_oracle, soft, trained, unit

COUNT, PROMPT = 3, 6
TOKENS = np.random.default_rng(4).integers(3, 90, (2, 10))


def plain(name, tokens, parts, threshold, targets=("attn",)):
    """The module with each token's own choice: sigmoid(w · norm(x)) >= threshold."""

    def factor(target, layer, x):
        score = torch.sigmoid((unit(x) * parts[layer][f"{target}.w"]).sum(-1))
        return (score >= threshold).float()[..., None]

    return routed_oracle(name, module_of(COUNT, name), tokens, factor, targets)


def built(name="llama", on="eager", **options):
    table = {"use": "mod", **trained(name, COUNT, "mod"), **options}
    return accel.optimize(
        *(module_of(COUNT, name), {"depth": table}),
        target=on,
        max_context=64,
        max_batch=2,
        verify=False,
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "on"), [("llama", "eager"), ("gpt_neox", "onnx"), ("gemma2", "eager")]
)
def test_it_is_the_plain_router(name, on):
    """In a prompt and token by token, for two rows and for each alone, by its own threshold and by a call's. The
    control: routers of the next layer.
    """
    parts = part(name, COUNT, "mod")
    with built(name, on) as compiled:
        want = plain(name, TOKENS, parts, 0.5)
        assert far(ran_by(compiled, TOKENS, PROMPT), want) < 1e-4
        assert far(ran_by(compiled, TOKENS[1:], PROMPT), want[1:]) < 1e-4
        given = ran_by(compiled, TOKENS, PROMPT, threshold=0.7)
        assert far(given, plain(name, TOKENS, parts, 0.3)) < 1e-4
        assert far(plain(name, TOKENS, parts, 0.3), want) > 1e-2
        other = {layer: parts[(layer + 1) % COUNT] for layer in parts}
        assert far(plain(name, TOKENS, other, 0.5), want) > 1e-2


def test_rows_of_other_lengths_are_each_alone():
    with built() as compiled:
        want = plain("llama", TOKENS, part("llama", COUNT, "mod"), 0.5)
        with compiled.session(2) as session:
            session.run(TOKENS[:, :PROMPT], [PROMPT, 3])
            got = session.run(TOKENS[[0, 1], [PROMPT, 3]][:, None])
            assert far(got, want[[0, 1], [PROMPT, 3]][:, None]) < 1e-4


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{"threshold": 0.0}, {}])
def test_with_open_routers_it_is_the_base_bit_for_bit(options):
    """By the recipe, and by the call."""
    base = accel.optimize(
        module_of(COUNT), "base", target="eager", max_context=64, max_batch=2, verify=False
    )
    with built(**options) as compiled, base:
        given = {} if options else {"threshold": NEVER}
        want = ran_by(base, TOKENS, PROMPT)
        assert np.array_equal(ran_by(compiled, TOKENS, PROMPT, **given), want)
        assert not np.array_equal(ran_by(compiled, TOKENS, PROMPT, threshold=0.5), want)


class Counted(TorchDispatchMode):
    """How often attention was computed."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is attention.default
        return func(*args, **kwargs or {})


def test_a_branch_that_no_token_takes_is_not_computed():
    """Masking alone would compute it; its keys are written all the same."""
    parts = part("llama", COUNT, "mod")
    score = scores(parts)
    with built() as compiled, compiled.session() as session:
        session.run(TOKENS[:1, :PROMPT])
        for place in range(PROMPT, TOKENS.shape[1]):
            with Counted() as counted:
                session.run(TOKENS[:1, place : place + 1])
            assert counted.count == int((score[:, place] >= 0.5).sum())
        with Counted() as counted:
            session.run(TOKENS[:1, :1], threshold=NEVER)
        assert counted.count == COUNT
    assert len(set((score[:, PROMPT:] >= 0.5).sum(0).tolist())) > 1


def scores(parts):
    """Of the first row, each layer's score of each token [L,T]."""
    found = []

    def factor(target, layer, x):
        score = torch.sigmoid((unit(x) * parts[layer]["attn.w"]).sum(-1))
        found.append(score[0])
        return (score >= 0.5).float()[..., None]

    routed_oracle("llama", module_of(COUNT), TOKENS[:1], factor, ("attn",))
    return torch.stack(found)


def test_mlps_may_have_the_routers():
    parts = {i: {"mlp.w": p["attn.w"]} for i, p in part("llama", COUNT, "mod").items()}
    file = file_of_part("llama", COUNT, "mod", parts)
    with built(target="mlp", trained=file) as compiled:
        want = plain("llama", TOKENS, parts, 0.5, ("mlp",))
        assert far(ran_by(compiled, TOKENS, PROMPT), want) < 1e-4


# Whole layers, with holes in their caches


def blocks(seed=0):
    """Routers of whole layers, by layer."""
    parts = part("llama", COUNT, "mod", seed)
    return {i: {"layer.w": p["attn.w"]} for i, p in parts.items()}


def with_blocks(on="eager", **options):
    file = file_of_part("llama", COUNT, "mod", blocks())
    return built(on=on, target="block", trained=file, **options)


def dense(tokens, threshold, parts=None, read_all=False, ran=(True,) * COUNT):
    """The module's logits of one row [T], computed with no cache: of each layer the rows of its tokens are gathered, go
    through the layer as a text of their own at their own positions, and are put back.
    """
    module, parts = module_of(COUNT), parts or blocks()
    stack = module.model
    with torch.no_grad():
        x = stack.embed_tokens(torch.tensor(tokens[None]))
        places = torch.arange(len(tokens))[None]
        for layer, block in enumerate(stack.layers):
            score = torch.sigmoid((unit(x[0]) * parts[layer]["layer.w"]).sum(-1))
            taken = (score >= threshold) & bool(ran[layer])
            mine = torch.ones_like(taken) if read_all else taken
            if taken.any():
                turns = stack.rotary_emb(x, places[:, mine])
                out = block(x[:, mine], position_ids=places[:, mine], position_embeddings=turns)
                out = out[0] if isinstance(out, tuple) else out
                whole = x.clone()
                whole[:, mine] = out
                x = torch.where(taken[None, :, None], whole, x)
        return module.lm_head(stack.norm(x)).numpy()


@pytest.mark.parametrize("on", ["eager", pytest.param("onnx", marks=pytest.mark.long)])
def test_tokens_that_pass_a_block_by_are_not_read_there(on):
    """In a prompt and token by token, for two rows and for each alone, and after a rewind. The control: a cache without
    holes, and another threshold.
    """
    want = np.concatenate([dense(row, 0.5) for row in TOKENS])
    with with_blocks(on) as compiled:
        assert far(ran_by(compiled, TOKENS, PROMPT), want) < 1e-4
        assert far(ran_by(compiled, TOKENS[1:], PROMPT), want[1:]) < 1e-4
        given = ran_by(compiled, TOKENS, PROMPT, threshold=0.7)
        assert far(given, np.concatenate([dense(row, 0.3) for row in TOKENS])) < 1e-4
        with compiled.session(2) as session:
            session.run(TOKENS[::-1])
            session.rewind(0)
            session.run(TOKENS[:, :PROMPT], [PROMPT, 3])
            other = session.fork()
            for one in (session, other):
                got = one.run(TOKENS[[0, 1], [PROMPT, 3]][:, None])
                assert far(got, want[[0, 1], [PROMPT, 3]][:, None]) < 1e-4
            other.close()
    for wrong in (dense(TOKENS[0], 0.5, read_all=True), dense(TOKENS[0], 0.3)):
        assert far(wrong, want[:1]) > 1e-2


def test_a_block_that_no_token_takes_is_not_computed_and_a_call_may_name_them():
    """A layer that the call leaves out has a hole there, too, and may run again for later tokens."""
    with with_blocks() as compiled, compiled.session() as session:
        plan = np.array([True, False, True])
        with Counted() as counted:
            got = session.run(TOKENS[:1], run_layers=plan, threshold=NEVER)
        assert counted.count == 2
        assert far(got, dense(TOKENS[0], 0.0, ran=plan)) < 1e-4
        session.run(TOKENS[:1, :1], run_layers=~plan)


def test_with_open_routers_blocks_are_the_base_bit_for_bit():
    base = accel.optimize(
        module_of(COUNT), "base", target="eager", max_context=64, max_batch=2, verify=False
    )
    with with_blocks() as compiled, base:
        want = ran_by(base, TOKENS, PROMPT)
        assert np.array_equal(ran_by(compiled, TOKENS, PROMPT, threshold=NEVER), want)


def test_training_reads_what_a_session_reads():
    parts = blocks()
    one = SoftLayers(over_state(capture(module_of(COUNT), max_context=64)), Mod(target="block"))
    with torch.no_grad():
        got, mean = one.logits(torch.from_numpy(TOKENS), parts)
    assert far(got.numpy(), np.concatenate([dense(row, 0.5) for row in TOKENS])) < 1e-4
    assert 0 < mean < 1


@pytest.mark.parametrize(
    ("axis", "method"), [("kv.score", "snapkv"), ("prefill.prune", "promptdistill")]
)
def test_blocks_beside_what_drops_tokens_are_refused(axis, method):
    tables = {"depth": {"use": "mod", "target": "block"}, axis: {"use": method}}
    with pytest.raises(RecipeError, match="mod"):
        accel.optimize(module_of(COUNT), tables, target="eager", max_context=64, verify=False)


def test_a_part_of_another_model_or_target_is_refused():
    with pytest.raises(PassError, match="was trained for another model"):
        built("gemma2", trained=trained("llama", COUNT, "mod")["trained"])
    with pytest.raises(PassError, match=r"0.mlp.w of size \[0\], this model needs"):
        built(target="mlp")


def with_table(axis, method):
    tables = {"depth": {"use": "mod", **trained("llama", COUNT, "mod")}, axis: {"use": method}}
    return accel.optimize(
        module_of(COUNT), tables, target="eager", max_context=64, max_batch=2, verify=False
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(("axis", "method"), [("kv.codec", "kv-int8"), ("weights", "int8")])
def test_the_part_is_found_whatever_is_stored_otherwise(axis, method):
    with with_table(axis, method) as compiled:
        want = plain("llama", TOKENS, part("llama", COUNT, "mod"), 0.5)
        assert far(ran_by(compiled, TOKENS, PROMPT)[:, 0], want[:, 0]) < 0.3


def test_what_reads_attention_from_outside_is_refused():
    with pytest.raises(PassError, match="lies under a condition of its own; prune prompts with"):
        with_table("prefill.prune", "lazyllm")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threshold": -0.1}, "threshold is -0.1; give 0 to 1"),
        ({"threshold": 1.5}, "threshold is 1.5; give 0 to 1"),
        ({"share": 0.0}, "share is 0.0; give more than 0"),
        ({"target": "layer"}, "target 'layer' does not exist"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(RecipeError, match=words):
        Mod(**options)


def test_training_takes_the_price_down():
    """Routers that take all begin as the model itself; what is trained is no weight of it."""
    one = soft("llama", COUNT, "mod")
    ids = torch.from_numpy(TOKENS)
    parts = one.start(6, 0)
    with torch.no_grad():
        begun, mean = one.logits(ids, parts)
        np.testing.assert_allclose(begun, one.logits(ids)[0], atol=1e-5)
    assert mean == 1
    assert one.method.price(torch.tensor(0.9)) == pytest.approx(0.15)
    assert one.method.price(torch.tensor(0.5)) == 0
