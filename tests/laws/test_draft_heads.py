"""What every head holds to where rows join and leave: a row drafts what it drafts alone, whoever is beside it."""

import importlib
from functools import partial

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir.axis import find_axes
from accel.ir.errors import AccelError
from accel.runtime.length.fixed import Fixed
from accel.runtime.speculation.features import Taps
from accel.runtime.speculation.round_cost import unmeasured_cost

from ..dflash2_case import dflash2_config, dflash2_tensors
from ..dflash_case import config_for, written
from ..dflash_case import tensors_for as dflash_tensors
from ..draft_case import rows_of
from ..dspark_case import dspark_config, dspark_tensors
from ..heads_case import (
    eagle1_folder,
    eagle1_tensors,
    eagle3_folder,
    eagle3_tensors,
    mctp_folder,
    mctp_tensors,
    mtp_folder,
    opened,
    texts_of,
)

AXIS = find_axes()["draft"]
HEADS = [name for name in AXIS.names() if AXIS.method(name).head]
SHORT = ("dspark", "gemma4-assistant", "mctp")  # the others have a test of their own, or build long
COUNT, SIZES = 3, (8, 11)


def case(use):
    """The tests of one head."""
    return importlib.import_module(f"tests.runtime.draft.test_{use.replace('-', '_')}")


def llama(folder, make, layers=4):
    torch.manual_seed(3)
    module = models.make("llama", layers).eval()
    module.save_pretrained(folder)
    return make(folder / "head", module)


def within(use):
    def make(path, module):
        one = case(use)
        tensors = () if use != "medusa" else (one.tensors_for(module), module)
        if use == "bpd":
            return one.written(path, module, one.tensors_for(module))
        if use == "medusa":
            return one.written(path, *tensors)
        return one.written(path, module)[0]

    return partial(llama, make=make, layers=3)


def gemma(folder):
    one = case("gemma4-assistant")
    from transformers import AutoModelForCausalLM

    from accel.compiler.smoke.tiny_models import randomise

    config = one.text_config(one.KINDS)
    randomise(AutoModelForCausalLM.from_config(config), "target").eval().save_pretrained(folder)
    return one.assistant(folder / "head")[1]


def next_token_layer(folder):
    mtp_folder(case("mtp").module_of("glm4_moe"), folder)
    return folder


# a directory of a target, and of a head: each written into a folder, which gives the head's
MADE = {
    "bpd": within("bpd"),
    "dflash": partial(
        llama, make=lambda p, m: written(p, config_for(m), dflash_tensors(m.config.hidden_size))
    ),
    "dflash2": partial(llama, make=lambda p, m: written(p, dflash2_config(m), dflash2_tensors(m))),
    "dovetail": partial(llama, make=lambda p, m: case("dovetail").head_of(m, p)[0]),
    "dspark": partial(
        llama,
        make=lambda p, m: written(p, dspark_config(m, "rnn"), dspark_tensors(m, "rnn")),
    ),
    "eagle1": partial(llama, make=lambda p, m: eagle1_folder(p, m, eagle1_tensors(m))),
    "eagle3": partial(
        llama,
        make=lambda p, m: eagle3_folder(p, eagle3_tensors(48, 48, 101, 101), 48, 101),
        layers=6,
    ),
    "gemma4-assistant": gemma,
    "glide": within("glide"),
    "longspec": within("longspec"),
    "mctp": partial(llama, make=lambda p, m: mctp_folder(p, m, mctp_tensors(m, 4))),
    "medusa": within("medusa"),
    "moa-spec": within("moa-spec"),
    "mtp": next_token_layer,
    "peagle": partial(llama, make=lambda p, m: case("peagle").head_of(m, p)[0], layers=8),
}


def test_every_head_is_here():
    """A new head is held to the law, too: say above how one is made."""
    assert sorted(MADE) == sorted(HEADS)


def drafted(drafters, rows, *which):
    paces = Fixed(COUNT).open(rows, unmeasured_cost)
    trees = drafters.draft(dict.fromkeys(which, COUNT), paces)
    return [trees[i].tokens.tolist() for i in which]


def begun(model, text):
    rows, session = rows_of([text]), model.session(1)
    drafters = opened(model, session, rows)
    session.prompt(np.array([text[:-1]]))
    return session, rows, drafters


def alone(model, text):
    """What a new session of one row drafts behind a text."""
    session, rows, drafters = begun(model, text)
    with session:
        (found,) = drafted(drafters, rows, 0)
        drafters.close()
    return found


def law(model):
    """One row drafts, another joins it, both go on by tokens that were not drafted, at last without a draft; the first
    leaves, the other takes its place and goes on, and a third joins.
    """
    first, second = texts_of(20)
    session, rows, drafters = begun(model, first[: SIZES[0]])
    assert drafted(drafters, rows, 0) == [alone(model, first[: SIZES[0]])]
    assert drafters.joins

    def join(text):
        other, more, theirs = begun(model, text)
        assert drafted(theirs, more, 0) == [alone(model, text)]
        session.join(other)
        rows.extend(more)
        drafters.join(theirs)

    def goes_on(*texts, asked=True):
        new = [
            text[row.seen.size - 1 : row.seen.size + 1]
            for row, text in zip(rows, texts, strict=True)
        ]
        session.run(np.array([[token] for token, _ in new]))
        for row, (_, token) in zip(rows, new, strict=True):
            row.accept(token, None)
        if asked:
            wanted = [alone(model, row.seen.tolist()) for row in rows]
            assert drafted(drafters, rows, *range(len(rows))) == wanted

    with session:
        join(second[: SIZES[1]])
        goes_on(first, second)
        goes_on(first, second, asked=False)  # what the head has not read goes with its row
        order = session.leave(0)
        drafters.leave(order)
        rows[:] = [rows[i] for i in order]
        goes_on(second)
        join(first[:6])
        goes_on(second, first)
        drafters.close()


def of_the_next_row(taps, row, start, stop, of=Taps.of):
    return of(taps, (row + 1) % len(taps._first), start, stop)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "use",
    [
        name if name in SHORT else pytest.param(name, marks=pytest.mark.long)
        for name in sorted(MADE)
    ],
)
def test_rows_join_and_leave(use, tmp_path, monkeypatch):
    """The control: what the target computed for a row stays where it was as rows leave, or is read for another."""
    path = MADE[use](tmp_path)
    recipe = {
        "draft": {"use": use, "path": str(path), "weights": ""},
        "verify": {"use": "sample-match"},
        "length": {"use": "fixed"},
    }
    with accel.optimize(
        tmp_path, recipe, target="eager", max_context=64, max_batch=2, verify=False
    ) as model:
        law(model)
        if AXIS.method(use).independent:  # it reads the newest token alone
            monkeypatch.setattr(Taps, "of", of_the_next_row)
        else:
            monkeypatch.setattr(Taps, "leave", lambda taps, order: taps._sort())
        with pytest.raises((AssertionError, AccelError, IndexError)):
            law(model)
