"""first-router: layers by the mean score of each row's prompt, against transformers' module with those layers, and with
adapters merged into its weights behind the prompt.
"""

from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import torch

import accel
from accel.ir.errors import InputError, PassError, RecipeError
from accel.passes.depth.first_router import FirstRouter
from accel.runtime.session.state._routes import Routes

from ...depth_case import far, module_of, oracle
from ...router_case import file_of_part, part, ran_by, soft, unit

COUNT = 6
TOKENS = np.random.default_rng(12).integers(3, 90, (2, 16))
PROMPTS = [9, 5]
THRESHOLD = 0.85
PACKED = (  # of a Llama's layer: what has one adapter
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


@cache
def parts_of(name, count):
    """Routers, and adapters that change much."""
    return {
        layer: {n: (10 * t).half().float() if n.endswith(".b") else t for n, t in tensors.items()}
        for layer, tensors in part(name, count, "first-router").items()
    }


@cache
def file_of(name, count):
    return file_of_part(name, count, "first-router", parts_of(name, count))


def means(tokens, count=COUNT, name="llama"):
    """The mean score of each layer over a prompt [n], by the module's own hidden states."""
    parts = parts_of(name, count)
    with torch.no_grad():
        states = module_of(count, name)(
            torch.tensor(tokens[None]), output_hidden_states=True
        ).hidden_states
    return np.array(
        [
            torch.sigmoid((unit(x[0]) @ parts[i]["layer.w"]) + parts[i]["layer.bias"]).mean()
            for i, x in enumerate(states[:count])
        ]
    )


def layers_of(tokens, threshold=THRESHOLD):
    keep = means(tokens) >= threshold
    keep[[0, -1]] = True
    return keep


def ran(prompt, total, keep):
    """Which layers [L,T] each token of a row runs."""
    mask = np.ones((COUNT, total), bool)
    mask[:, prompt:] = keep[:, None]
    return mask


def built(on="eager", name="llama", count=COUNT, **options):
    table = {"use": "first-router", "threshold": THRESHOLD, "trained": file_of(name, count)}
    return accel.optimize(
        *(module_of(count, name), {"depth": {**table, **options}}),
        target=on,
        max_context=64,
        max_batch=3,
        verify=False,
    )


@pytest.fixture(scope="module")
def model():
    with built() as compiled:
        yield compiled


def after(session, tokens, prompts, steps):
    """Logits of single tokens behind prompts, [B,steps,V]."""
    found = []
    for step in range(steps):
        at = [p + step for p in prompts]
        found.append(session.run(tokens[range(len(prompts)), at][:, None]))
    return np.concatenate(found, 1)


@contextmanager
def adapted(module, parts, since):
    """Each product of a Llama's layers gives that of W + (a b)^T, for tokens behind so many."""
    handles = []
    for layer, block in enumerate(module.model.layers):
        for number, names in enumerate(PACKED):
            a, b = (parts[layer][f"adapter.{number}.{n}"] for n in "ab")
            maps = [block.get_submodule(n) for n in names]
            for one, columns in zip(maps, b.split([m.out_features for m in maps], 1), strict=True):

                def add(module, args, out, delta=(0.1 * a @ (0.1 * columns)).T):
                    late = torch.arange(out.shape[1])[:, None] >= since
                    merged = torch.nn.functional.linear(args[0], module.weight + delta, module.bias)
                    return torch.where(late, merged, out)

                handles.append(one.register_forward_hook(add))
    yield
    for handle in handles:
        handle.remove()


def wanted(tokens, prompt, steps, keep, since=None):
    """Logits behind a prompt [1,steps,V]. since: the token from which on adapters act; none: the first behind it."""
    mask, module = ran(prompt, prompt + steps, keep), module_of(COUNT)
    with adapted(module, parts_of("llama", COUNT), prompt if since is None else since):
        return oracle(module, tokens[None, : prompt + steps], mask)[:, prompt:]


def test_each_row_runs_the_layers_that_its_prompt_chose(model):
    """Over the same prompt's cache, with adapters; pads do not decide. The control: the other row's layers, no
    adapters, and adapters in the prompt as well.
    """
    keeps = [layers_of(TOKENS[row, :n]) for row, n in enumerate(PROMPTS)]
    assert not np.array_equal(*keeps) and all(0 < (~k).sum() < COUNT - 1 for k in keeps)
    with model.session(2) as session:
        session.prompt(TOKENS[:, :9], PROMPTS)
        got = after(session, TOKENS, PROMPTS, 5)
    for row, prompt in enumerate(PROMPTS):
        want = wanted(TOKENS[row], prompt, 5, keeps[row])
        assert far(got[row : row + 1], want) < 1e-4
        assert far(wanted(TOKENS[row], prompt, 5, keeps[1 - row]), want) > 1e-2
        for since in (0, 99):
            assert far(wanted(TOKENS[row], prompt, 5, keeps[row], since), want) > 1e-2
        with model.session() as alone:
            alone.prompt(TOKENS[row : row + 1, :prompt])
            one = after(alone, TOKENS[row : row + 1], [prompt], 5)
            assert far(one, want) < 1e-4
            assert far(one, got[row : row + 1]) < 1e-5


@pytest.mark.long
def test_onnx_is_the_eager_model_as_rows_come_and_go(model):
    with built("onnx") as compiled:
        found = []
        for each in (model, compiled):
            with each.session(2) as session:
                session.prompt(TOKENS[:, :9], PROMPTS)
                parts = [after(session, TOKENS, PROMPTS, 2)]
                other = session.fork()
                session.rewind([9, 5])
                parts.append(after(session, TOKENS, PROMPTS, 3))
                parts.append(other.run(TOKENS[:, 12:13]))
                other.close()
                found.append(np.concatenate(parts, 1))
        assert far(*found) < 1e-4


def test_a_prompt_in_parts_chooses_as_one(model):
    with model.session() as whole, model.session() as parts:
        whole.prompt(TOKENS[:1, :9])
        parts.run(TOKENS[:1, :4])
        parts.prompt(TOKENS[:1, 4:9])
        got, want = (after(s, TOKENS[:1], [9], 3) for s in (parts, whole))
        assert far(got, want) < 1e-5


def test_a_rewind_into_the_prompt_forgets_what_came_behind(model):
    with model.session() as session, model.session() as fresh:
        session.prompt(TOKENS[1:, :9])
        after(session, TOKENS[1:], [9], 2)
        session.rewind(4)
        session.prompt(TOKENS[:1, 4:9])
        fresh.prompt(TOKENS[1:, :4])
        fresh.prompt(TOKENS[:1, 4:9])
        got, want = (after(s, TOKENS[:1], [9], 3) for s in (session, fresh))
        assert np.array_equal(got, want)


def test_a_saved_session_goes_on_with_its_layers(model, tmp_path):
    with model.session() as session:
        session.prompt(TOKENS[:1, :9])
        session.save(tmp_path / "saved.kv")
        want = after(session, TOKENS[:1], [9], 3)
    with model.open_session(tmp_path / "saved.kv") as session:
        assert np.array_equal(after(session, TOKENS[:1], [9], 3), want)


@pytest.mark.long
def test_a_threshold_of_0_is_the_base_bit_for_bit():
    base = accel.optimize(
        module_of(COUNT), "base", target="eager", max_context=64, max_batch=2, verify=False
    )
    with built(threshold=0.0) as compiled, base:
        got, want = (ran_by(one, TOKENS, 6) for one in (compiled, base))
        assert np.array_equal(got, want)


def test_a_caller_may_name_layers_for_all_rows(model):
    """They are the model's own, without adapters."""
    keep = np.isin(np.arange(COUNT), [0, 2, 5])
    with model.session(2) as session:
        session.prompt(TOKENS[:, :9])
        got = session.run(TOKENS[:, 9:10], run_layers=keep)
        want = oracle(module_of(COUNT), TOKENS[:, :10], ran(9, 10, keep))[:, 9:]
        assert far(got, want) < 1e-4
        with pytest.raises(InputError, match="layer 1 was skipped for token 9 of row 0"):
            session.run(TOKENS[:, 10:11], run_layers=keep | True)


def test_a_row_without_scores_runs_all():
    routes = Routes(2, 4)
    routes.note(np.array([[0, 1], [-1, -1]]), np.zeros((2, 2, 4)), np.array([True, True]))
    assert routes.chosen(0.5).tolist() == [[True, False, False, True], [True] * 4]
    routes.note(np.array([[2, -1], [0, 1]]), np.ones((2, 2, 4)), np.array([True, False]))
    assert routes.chosen(0.4).tolist() == [[True, False, False, True], [True] * 4]
    assert routes.chosen(0.3).all()  # a third of it, the pad left out
    routes.cut(np.array([2, 0]))
    assert not routes.chosen(0.3).all()


def test_training_weighs_layers_softly():
    """h + r (f(h) - h), and the mean of r is paid for."""
    one = soft("llama", COUNT, "first-router")
    parts = {i: {"layer.w": torch.zeros_like(p["layer.w"]), "layer.bias": torch.tensor(1000.0)}
             for i, p in one.start(6, 0).items()}  # fmt: skip
    ids = torch.from_numpy(TOKENS)
    with torch.no_grad():
        got, mean = one.logits(ids, parts)
        assert far(got.numpy(), one.logits(ids)[0].numpy()) < 1e-5 and mean == 1
        parts[2]["layer.bias"] = torch.tensor(-1000.0)
        got, mean = one.logits(ids, parts)
    keep = np.arange(COUNT) != 2
    want = oracle(module_of(COUNT), TOKENS, np.repeat(keep[:, None], TOKENS.shape[1], 1))
    assert far(got.numpy(), want) < 1e-4 and one.method.price(mean) == pytest.approx(5 / 6)


def test_adapters_learn_once_routers_are_fixed():
    """What is trained then is what a session runs; the model's and the routers' tensors have no gradient."""
    one, parts = soft("llama", COUNT, "first-router"), parts_of("llama", COUNT)
    ids = torch.from_numpy(TOKENS[:, :14])
    keep = torch.tensor(np.array([layers_of(row[:9]) for row in TOKENS]))
    with torch.no_grad():
        got = one.after(ids, 9, keep, parts).numpy()
    for row in range(2):
        want = wanted(TOKENS[row], 9, 5, keep[row].numpy())
        assert far(got[row : row + 1, 9:], want) < 1e-4
    whole = np.ones((COUNT, 9), bool)
    assert far(got[:, :9], oracle(module_of(COUNT), TOKENS[:, :9], whole)) < 1e-4
    learnt = {i: {n: t.clone().requires_grad_() for n, t in p.items()} for i, p in parts.items()}
    learnt[2]["layer.bias"].data.fill_(-9.0)  # else nothing is left out, and adapters do nothing
    logits, _ = one.logits(ids, learnt, one.method.settled)
    logits.square().mean().backward()
    with_gradient = {n.partition(".")[0] for p in learnt.values() for n, t in p.items()
                     if t.grad is not None and t.grad.any()}  # fmt: skip
    assert with_gradient == {"adapter"}


def test_what_it_cannot_take_is_refused():
    parts = {i: dict(p) for i, p in parts_of("llama", 3).items()}
    parts[1]["adapter.2.b"] = parts[1]["adapter.2.b"][:, 1:]
    with pytest.raises(
        PassError, match=r"1.adapter.2.b of size \[6, 151\], this model needs \[6, 152\]"
    ):
        built(count=3, trained=file_of_part("llama", 3, "first-router", parts))
    with pytest.raises(PassError, match="of 2 layers the first and the last always run"):
        built(count=2)
    with pytest.raises(PassError, match="was trained for another model"):
        built(name="gemma2", count=3, trained=file_of("llama", COUNT))
    for threshold in (-0.1, 1.1):
        with pytest.raises(RecipeError, match=f"threshold is {threshold}; give 0 to 1"):
            FirstRouter(threshold=threshold)


@pytest.mark.few(1)
@pytest.mark.parametrize("on", ["eager", "onnx"])
@pytest.mark.long
def test_adapters_are_not_rounded_with_the_weights(on):
    """In int8 a session is as far from the float one as a prompt of it. The control: without adapters it is further."""
    keep = layers_of(TOKENS[0, :9])
    tables = {
        "depth": {"use": "first-router", "threshold": THRESHOLD, "trained": file_of("llama", COUNT)}
    }
    tables["weights"] = {"use": "int8"}
    options = {"target": on, "max_context": 64, "max_batch": 1, "verify": False}
    with accel.optimize(module_of(COUNT), tables, **options) as compiled, compiled.session() as one:
        one.prompt(TOKENS[:1, :9])
        got = after(one, TOKENS[:1], [9], 5)
    error = far(got, wanted(TOKENS[0], 9, 5, keep))
    assert error < 0.1 < far(got, wanted(TOKENS[0], 9, 5, keep, since=99))
