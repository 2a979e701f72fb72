"""duo-llm: tokens that take a small MLP or the big one, against transformers' module with plain small MLPs."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs.routers import RoutersRun
from accel.ir.errors import PassError, RecipeError
from accel.passes.depth.duo_llm import DuoLlm

from ...depth_case import KINDS, NEVER, far, module_of
from ...router_case import BEFORE, PLACES, file_of_part, part, ran_by, soft, trained, unit

COUNT, PROMPT = 3, 6
TOKENS = np.random.default_rng(8).integers(3, 90, (2, 10))
MLP = PLACES["mlp"]


def plain(name, tokens, parts, threshold, ran=(True,) * COUNT, scores=None):
    """The module's logits: of each token and layer the big MLP where its score is at least `threshold`, else the small
    one, of plain linear layers; nothing of layers that did not run. scores: gets those of each layer [B,T].
    """
    module = module_of(COUNT, name)
    stack = next(m for m in module.modules() if isinstance(m, torch.nn.ModuleList))
    handles, seen = [], {}
    for layer, block in enumerate(stack):
        tensors = {n.removeprefix("mlp."): t for n, t in parts[layer].items()}

        def note(_, args, layer=layer):
            seen[layer] = args[0]

        def choose(_, args, out, layer=layer, p=tensors):
            new = torch.zeros_like(out)
            read = unit(seen[layer])
            for row, place in np.ndindex(*out.shape[:2]):
                x = read[row, place]
                score = torch.sigmoid(torch.dot(x, p["w"]) + p["bias"][0])
                if scores is not None:
                    scores[layer, row, place] = score
                if score >= threshold:
                    new[row, place] = out[row, place]
                else:
                    gate = p["gate"].T @ x
                    new[row, place] = p["down"].T @ (
                        gate / (1 + torch.exp(-gate)) * (p["up"].T @ x)
                    )
            return new if ran[layer] else torch.zeros_like(out)

        handles += [
            BEFORE[name][MLP](block).register_forward_pre_hook(note),
            KINDS[name][MLP](block).register_forward_hook(choose),
        ]
    with torch.no_grad():
        found = module(torch.tensor(tokens), use_cache=False).logits.numpy()
    for handle in handles:
        handle.remove()
    return found


def built(name="llama", on="eager", **options):
    table = {"use": "duo-llm", **trained(name, COUNT, "duo-llm"), **options}
    return accel.optimize(
        *(module_of(COUNT, name), {"depth": table}),
        target=on,
        max_context=64,
        max_batch=2,
        verify=False,
    )


@pytest.mark.parametrize(
    ("name", "on"),
    [
        ("llama", "eager"),
        pytest.param("gemma2", "eager", marks=pytest.mark.long),
        pytest.param("gpt_neox", "onnx", marks=pytest.mark.long),
    ],
)
def test_it_is_the_plain_choice(name, on):
    """In a prompt and token by token, for two rows and for each alone, by its own threshold and by a call's. The
    controls: small MLPs of the next layer, and none.
    """
    parts, scores = part(name, COUNT, "duo-llm"), {}
    with built(name, on) as compiled:
        want = plain(name, TOKENS, parts, 0.5, scores=scores)
        assert far(ran_by(compiled, TOKENS, PROMPT), want) < 1e-4
        assert far(ran_by(compiled, TOKENS[1:], PROMPT), want[1:]) < 1e-4
        given = ran_by(compiled, TOKENS, PROMPT, threshold=0.7)
        assert far(given, plain(name, TOKENS, parts, 0.3)) < 1e-4
        small = ran_by(compiled, TOKENS, PROMPT, threshold=0.0)
        assert far(small, plain(name, TOKENS, parts, 2.0)) < 1e-4
    assert 0.1 < np.mean([s >= 0.5 for s in scores.values()]) < 0.9
    turned = {i: parts[i] | {"mlp.down": parts[(i + 1) % COUNT]["mlp.down"]} for i in parts}
    nothing = {i: parts[i] | {"mlp.down": 0 * parts[i]["mlp.down"]} for i in parts}
    assert min(far(plain(name, TOKENS, other, 0.5), want) for other in (turned, nothing)) > 1e-2


def test_rows_of_other_lengths_are_each_alone():
    with built() as compiled, compiled.session(2) as session:
        want = plain("llama", TOKENS, part("llama", COUNT, "duo-llm"), 0.5)
        session.run(TOKENS[:, :PROMPT], [PROMPT, 3])
        got = session.run(TOKENS[[0, 1], [PROMPT, 3]][:, None])
        assert far(got, want[[0, 1], [PROMPT, 3]][:, None]) < 1e-4


def test_a_layer_that_a_plan_leaves_out_runs_no_small_mlp_either():
    parts, ran = part("llama", COUNT, "duo-llm"), (True, False, True)
    with built() as compiled, compiled.session(2) as session:
        got = session.run(TOKENS, run_mlp=np.array(ran), threshold=0.5)
        assert far(got, plain("llama", TOKENS, parts, 0.5, ran)) < 1e-4
        assert far(plain("llama", TOKENS, parts, 0.5), got) > 1e-2


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
    """How often a product by a big MLP's last weight was computed."""

    def __init__(self, size):
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += any(isinstance(a, torch.Tensor) and a.shape == self.size for a in args)
        return func(*args, **kwargs or {})


def test_a_big_mlp_that_no_token_takes_is_not_computed():
    size, scores = module_of(COUNT).model.layers[0].mlp.down_proj.weight.shape, {}
    plain("llama", TOKENS[:1], part("llama", COUNT, "duo-llm"), 0.5, scores=scores)
    with built() as compiled, compiled.session() as session:
        session.run(TOKENS[:1, :PROMPT])
        found = []
        for place in range(PROMPT, TOKENS.shape[1]):
            with Counted(size) as counted:
                session.run(TOKENS[:1, place : place + 1])
            found.append(counted.count)
    want = [sum(scores[i, 0, t] >= 0.5 for i in range(COUNT)) for t in range(PROMPT, 10)]
    assert found == [int(n) for n in want] and len(set(found)) > 1


@pytest.mark.parametrize(
    ("axis", "method"),
    [pytest.param("kv.codec", "kv-int8", marks=pytest.mark.long), ("weights", "int8")],
)
def test_small_mlps_stay_whatever_is_stored_otherwise(axis, method):
    tables = {"depth": {"use": "duo-llm", **trained("llama", COUNT, "duo-llm")}}
    with accel.optimize(
        *(module_of(COUNT), tables | {axis: {"use": method}}),
        target="eager",
        max_context=64,
        max_batch=2,
        verify=False,
    ) as compiled:
        small = ran_by(compiled, TOKENS, PROMPT, threshold=0.0)
        assert far(small, plain("llama", TOKENS, part("llama", COUNT, "duo-llm"), 2.0)) < 0.1


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, r"0.mlp.down of size \[0\], this model needs \[-1,"),
        (
            5,
            r"has 0.mlp with gate, up, down of the widths \[6, 6, 5\].*train it again",
        ),
    ],
)
def test_a_part_without_a_whole_small_mlp_is_refused(rows, words):
    parts = {i: dict(p) for i, p in part("llama", COUNT, "duo-llm").items()}
    for tensors in parts.values():
        down = tensors.pop("mlp.down")
        if rows is not None:
            tensors["mlp.down"] = down[:rows]
    with pytest.raises(PassError, match=words):
        built(trained=file_of_part("llama", COUNT, "duo-llm", parts))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threshold": -0.1}, "threshold is -0.1; give 0 to 1"),
        ({"threshold": 1.5}, "threshold is 1.5; give 0 to 1"),
        ({"share": 0.0}, "share is 0.0; give"),
        ({"share": 1.0}, "share is 1.0; give"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(RecipeError, match=words):
        DuoLlm(**options)


def test_small_mlps_learn_by_coins_and_routers_behind_them(tmp_path):
    """A step by coins leaves the routers alone, and is the same again; later ones move both, and tell sharply."""
    one, ids = soft("llama", COUNT, "duo-llm"), torch.from_numpy(TOKENS)
    known = torch.ones(2, 9)

    def after(progress):
        options = TrainOptions(minutes=1.0, rate=0.01)
        run = RoutersRun(one, one.start(6, 0), options, tmp_path / "run", seconds=60 * progress)
        return run.learn(ids, known), run.parts[1]

    (coins, first), (_, again), (later, second) = (after(p) for p in (0.0, 0.0, 0.7))
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not first["mlp.w"].any() and first["mlp.down"].any()
    assert second["mlp.w"].any() and second["mlp.down"].any()
    assert 0.2 < coins["mean"] < 0.8 and later["mean"] == pytest.approx(0.5)
    x, w, bias = torch.randn(2, 9, 16), torch.full((16,), 0.1), torch.zeros(1)
    for progress, sharp in ((0.6, 1.0), (0.8, 10**0.5), (1.0, 10.0)):
        big, mean = one.method.soft(x, progress, w=w, bias=bias)
        want = 1 / (1 + torch.exp(-sharp * 0.1 * x.sum(-1)))
        torch.testing.assert_close(big[..., 0], want)
        torch.testing.assert_close(mean, want.mean())
    assert one.method.price(torch.tensor(0.7)) == pytest.approx(0.04)


def test_what_learns_is_what_a_build_computes():
    """Softly with scores of 0 or 1, as at the end of training, beside the plain choice."""
    parts = {
        i: p | {"mlp.w": 1000 * p["mlp.w"], "mlp.bias": 1000 * p["mlp.bias"]}
        for i, p in part("llama", COUNT, "duo-llm").items()
    }
    with torch.no_grad():
        found = soft("llama", COUNT, "duo-llm").logits(torch.from_numpy(TOKENS), parts, 1.0)[0]
    assert far(found.numpy(), plain("llama", TOKENS, parts, 0.5)) < 1e-4
