"""calm by a trained classifier: what it is taught, what it tells, and where a token leaves by it."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import accel
from accel import reference
from accel.compiler.over_state import over_state
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs.exits import HELD, Exits, ExitsRun
from accel.compiler.train.train import train
from accel.ir.capture.capture import capture
from accel.ir.errors import InputError, PassError
from accel.passes.depth._classifier import ExitClassifier, classified, lost
from accel.passes.trained import write

from ...depth_case import LAYERS, NEVER, far, module_of, oracle

TOKENS = np.random.default_rng(3).integers(3, 90, (2, 12))


@cache
def exits():
    return Exits(over_state(capture(module_of(LAYERS), max_context=64)), ExitClassifier())


def states(tokens):
    """The module's own stream behind each layer but the last [L-1,B,T,E]."""
    with torch.no_grad():
        found = module_of(LAYERS)(torch.tensor(tokens), output_hidden_states=True).hidden_states
    return torch.stack(found[1:LAYERS])


def told(after, weight, bias):
    """The rule, in NumPy."""
    x = after.double().numpy()
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    two = x @ weight.double().numpy().T + bias.double().numpy()
    return 1 / (1 + np.exp(two[..., 0] - two[..., 1]))


def some_part(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (2, exits().width), "bias": (2,)}
    return {
        i: {n: torch.randn(s, generator=generator).half().float() for n, s in shapes.items()}
        for i in range(LAYERS - 1)
    }


def test_it_is_taught_by_the_models_own_streams_and_tokens():
    columns = torch.tensor([1, 4, 11])
    streams, same = exits().taught(torch.from_numpy(TOKENS), columns)
    want = states(TOKENS)[:, :, columns].flatten(1, 2)
    torch.testing.assert_close(streams, want, atol=1e-5, rtol=1e-4)
    ran = np.ones((LAYERS, TOKENS.shape[1]), bool)
    last = oracle(module_of(LAYERS), TOKENS, ran).argmax(-1)
    for layer in range(LAYERS - 1):
        ran[layer + 1 :] = False
        here = oracle(module_of(LAYERS), TOKENS, ran).argmax(-1)
        assert np.array_equal(same[layer], (here == last)[:, columns].flatten())
        ran[:] = True
    assert same.any() and not same.all()


def test_both_kinds_of_tokens_weigh_alike():
    x, same = torch.randn(40, 6), torch.arange(40) % 10 == 0
    weight, bias = torch.randn(2, 6), torch.randn(2)
    p = told(x, weight, bias)
    each = -np.log(np.where(same, p, 1 - p))
    want = (each[same.numpy()].mean() + each[~same.numpy()].mean()) / 2
    assert float(lost(x, same, weight, bias)) == pytest.approx(want, rel=1e-5)
    assert float(lost(x, same, weight, bias)) != pytest.approx(each.mean(), rel=1e-2)
    assert np.isfinite(float(lost(x, torch.ones(40, dtype=torch.bool), weight, bias)))


def test_a_run_learns_what_can_be_told(tmp_path, monkeypatch):
    """Of streams that tell it; the control: of such as do not. What is said of a run is of what it did not learn."""
    generator, said = torch.Generator().manual_seed(0), []
    for tells in (True, False):

        def taught(tokens, picked, tells=tells):
            same = torch.rand(LAYERS - 1, 64, generator=generator) < 0.3
            streams = torch.randn(LAYERS - 1, 64, exits().width, generator=generator)
            return streams + tells * 2.0 * same[..., None], same

        monkeypatch.setattr(exits(), "taught", taught)
        options = TrainOptions(rate=2e-2, minutes=1)
        run = ExitsRun(exits(), exits().start(0, 0), options, tmp_path / "run")
        told = [run.learn(torch.zeros(1, 257), torch.ones(1, 256))["rightly"] for _ in range(40)]
        said.append(np.mean(told[-8:]))
        assert len(run.pool) == 40 and len(run.pool[HELD - 1 :: HELD]) == 5
    assert said[0] > 0.8 and 0.4 < said[1] < 0.6


@pytest.mark.few(1)
@pytest.mark.parametrize("target", ["eager", "onnx"])
def test_a_token_leaves_by_its_classifier(target, tmp_path):
    """The control: the classifier of another layer."""
    parts, module, before = some_part(), module_of(LAYERS), TOKENS[:, :-1]
    write(ExitClassifier(), tmp_path / "part", parts, exits().names, {})
    options = dict(use="calm", by="meta", first=1, every=1, threshold=NEVER)
    options |= {"trained": str(tmp_path / "part"), "cache": "refeed"}
    near = np.stack([told(x[:, -1], **parts[i]) for i, x in enumerate(states(TOKENS))])
    swapped = np.stack(
        [told(x[:, -1], **parts[(i + 1) % len(parts)]) for i, x in enumerate(states(TOKENS))]
    )
    depths = []
    with accel.optimize(
        *(module, {"depth": options}), target=target, max_context=32, max_batch=2, verify=False
    ) as compiled:
        for limit in (0.0, *sorted(0.999 * x for x in near.min(1)), NEVER):
            depth, other = (
                next((i + 1 for i, x in enumerate(n.min(1)) if x >= limit), LAYERS)
                for n in (near, swapped)
            )
            ran = np.repeat((np.arange(LAYERS) < depth)[:, None], TOKENS.shape[1], 1)
            with compiled.session(2) as session:
                session.prompt(before)
                got = session.run(TOKENS[:, -1:], threshold=limit)
            assert far(got, oracle(module, TOKENS, ran)[:, -1:]) < 1e-4
            depths.append((depth, other))
    assert len({depth for depth, _ in depths}) > 2 and any(a != b for a, b in depths)


def test_it_tells_what_the_rule_tells():
    part, x = some_part()[0], states(TOKENS)[0]
    np.testing.assert_allclose(classified(x, x, **part), told(x, **part), atol=1e-5)


def test_a_model_without_a_classifier_is_told_how_to_train_one():
    with pytest.raises(PassError, match="calm: .*train it: accel-compile train calm MODEL"):
        accel.optimize(module_of(LAYERS), {"depth": {"use": "calm", "by": "meta"}}, target="eager")


def test_it_does_not_learn_from_the_text_of_thresholds(tmp_path):
    with pytest.raises(InputError, match="calm: .*own text.* give text="):
        train("calm", Path(reference.__file__).parent, {"out": tmp_path / "part"})
