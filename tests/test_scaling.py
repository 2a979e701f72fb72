"""bench --speculation over several measurements: laws of known synthetic data are found again, and where they cross."""

import math

import numpy as np
import pytest
from typer.testing import CliRunner

from accel import cli
from accel.commands import scaling
from accel.commands.scaling import break_even, fit, point_of, study

SIZES, TRAINED, BATCHES = (1e6, 4e6, 2e7), (1e8, 1e9, 2e10), (1, 2, 4, 8)


def points(tokens, cost, noise=0.0, seed=0):
    """Every size, training and batch; tokens and cost of a round as functions of the three logarithms."""
    rng = np.random.default_rng(seed)
    found = []
    for values in ((n, d, b) for n in SIZES for d in TRAINED for b in BATCHES):
        x = [math.log(v) for v in values]
        made = {"tokens": tokens(*x), "cost": cost(*x), "speed": 100 * tokens(*x) / cost(*x)}
        made = {n: v + noise * rng.standard_normal() for n, v in made.items()}
        made["gain"] = made["tokens"] - made["cost"]
        found.append({**dict(zip(("parameters", "trained", "batch"), values, strict=True)), **made})
    return found


def tokens(n, d, b):
    return 1.2 + 0.05 * n + 0.04 * d - 0.1 * b


def cost(n, d, b):
    return 0.4 + 0.06 * n + 0.9 * b


def law(fitted):
    """Slopes are within three standard errors of the true ones, which are small; true means are met."""
    made = points(tokens, cost, noise=0.05)
    found = fitted(made, "tokens", ["parameters", "trained", "batch"])
    for name, slope in (("parameters", 0.05), ("trained", 0.04), ("batch", -0.1)):
        assert abs(found.slopes[name] - slope) < 3 * found.errors[name] < 0.06
    assert found.r2 > 0.8
    assert all(abs(found.at(p) - p["tokens"]) < 0.25 for p in made)


def test_a_law_is_found_again():
    law(fit)


def test_a_law_in_the_quantities_themselves_is_caught():
    """The control: one that is linear in the number of parameters, where the data are in its logarithm."""

    def linear(made, name, varied):
        return fit(
            [{n: math.exp(v / 1e6) if n == "batch" else v for n, v in p.items()} for p in made],
            name,
            varied,
        )

    with pytest.raises(AssertionError):
        law(linear)


def test_it_warns_where_the_curves_cross():
    """By the law itself: at the middle of the others, tokens = cost; and not where drafting pays throughout."""
    found = study(points(tokens, cost))
    middle = [fmean_log(SIZES), fmean_log(TRAINED)]
    n, d = middle
    crossing = math.exp((1.2 + 0.05 * n + 0.04 * d - 0.4 - 0.06 * n) / 1.0)
    assert found["break_even"]["batch"] == pytest.approx(crossing)
    assert 1 < crossing < 8
    assert any(
        "does not pay above" in line and "rows of a call (fitted)" in line
        for line in found["warnings"]
    )
    pays = study(points(lambda n, d, b: 4.0 + 0.1 * d, lambda n, d, b: 1.0 + 0.1 * b))
    assert pays["warnings"] == [] and pays["break_even"]["batch"] is None
    never = study(points(lambda n, d, b: 1.0, lambda n, d, b: 3.0))
    assert never["warnings"] == ["drafting does not pay anywhere near what was measured"]
    beyond = study(points(lambda n, d, b: 3.2, lambda n, d, b: 1.0 + 0.9 * b))["warnings"]
    assert len(beyond) == 1 and "beyond the 1 to 8 measured" in beyond[0]


def fmean_log(values):
    return float(np.mean(np.log(values)))


def test_what_says_nothing_is_left_out_with_the_reason():
    made = points(tokens, cost)
    together = [p for p in made if SIZES.index(p["parameters"]) == TRAINED.index(p["trained"])]
    found = study([{**p, "trained": 10 * p["parameters"]} for p in together])
    assert not found["laws"] and "vary together" in found["notes"][0]
    few = study([p for p in made if p["batch"] < 4])
    assert "batch" not in few["break_even"] and few["notes"] == [
        "rows of a call: 2 different values; give at least 3"
    ]
    assert (
        study([{"batch": 1.0, "tokens": 1.0, "cost": 1.0, "gain": 0.0, "speed": 1.0}])["notes"]
        == []
    )


def warned(seeds=40):
    """The share of studies that warn, of data in which drafting pays and nothing but noise varies."""
    made = (points(lambda *x: 1.2, lambda *x: 1.0, noise=0.4, seed=seed) for seed in range(seeds))
    return sum(bool(study(one)["warnings"]) for one in made) / seeds


def test_noise_is_no_reason_to_warn(monkeypatch):
    """The control: every slope is believed."""
    assert warned() < 0.15
    monkeypatch.setattr(scaling, "SURE", 0.0)
    assert warned() > 0.5


def test_laws_that_never_meet():
    exact = fit(points(lambda *x: 2.0, lambda *x: 1.0)[:1], "gain", ["batch"])
    assert break_even(exact, "batch", {"batch": 1.0}) is None, "one point says nothing of a slope"


def test_a_measurement_is_a_point(capsys):
    rows = [{"tokens_per_check": 3.0, "speedup": 1.5, "tokens_per_second": 40.0},
            {"tokens_per_check": 2.0, "speedup": 0.5, "tokens_per_second": 20.0}]  # fmt: skip
    result = {"rows": rows, "batch": 4, "draft_parameters": None}
    assert point_of(result) == {
        "batch": 4.0,
        "tokens": 2.5,
        "cost": 3.0,
        "gain": -0.5,
        "speed": 30.0,
    }
    assert point_of({**result, "draft_parameters": 7}, 9)["trained"] == 9.0
    scaling.show(study(points(tokens, cost)))
    assert "does not pay above" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--batch", "2"], "--prompts, --batch, --beside and --trained are of --speculation"),
        (["--prompts", "3"], "--prompts, --batch, --beside and --trained are of --speculation"),
        (["--speculation", "--trained", "5", "--trained", "6"], "--trained is given 2 times for 1 artifacts"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(words, told):
    found = CliRunner().invoke(cli.app, ["bench", "somewhere", *words])
    assert found.exit_code != 0 and told in " ".join(found.output.split())
