"""Prefixes that sessions share, on the Triton target: blocks lie on the device, and attention reads them there."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir.errors import OutOfMemoryError
from accel.ir.ops import kv
from accel.lowering.triton.rules import accel_attention
from accel.runtime.backends.triton.memory import DeviceArray

from .test_triton_models import beside, close, module

IDS = np.random.default_rng(5).integers(3, 50, 30)
TABLE = {"use": "paged-prefix", "block": 4, "blocks": 16}


def built(codec):
    recipe = {"kv.reuse": TABLE, **({"kv.codec": {"use": codec}} if codec else {})}
    return accel.optimize(
        module("llama"), recipe, target="eager", max_context=64, max_batch=2, verify=False
    )


@pytest.fixture(scope="module", params=["", "kv-int8", "kv-float16"])
def both(request):
    """Triton and eager, of one program."""
    with built(request.param) as eager, beside(eager) as model:
        yield model, eager


def driven(model):
    """A prompt; one that begins alike beside one that does not; tokens; a rewind into shared blocks; a fork."""
    with model.session(1) as session:
        session.prompt(IDS[None, :14])
    found = []
    with model.session(2) as session:
        rows = np.stack([IDS[:14], IDS[12:26]])
        found.append(session.prompt(rows, [14, 11]))
        assert session.stats["reused"] >= 12
        found.append(session.run([[7], [8]]))
        session.rewind(session.lengths - [5, 2])
        found.append(session.run(IDS[None, 20:23].repeat(2, 0)))
        with session.fork() as other:
            found.append(other.run([[9], [10]]))
        found.append(session.run([[11], [12]]))
    return found


@pytest.mark.few(1)
def test_shared_prefixes_give_what_they_do_on_the_eager_target(both):
    for got, want in zip(driven(both[0]), driven(both[1]), strict=True):
        close(got, want)


@pytest.mark.few(1)
def test_blocks_lie_in_one_place(both):
    """All sessions read the same memory, and no step gathers or copies it."""
    model = both[0]
    calls = [n.target for n in model.program.compiled["step"].module.graph.nodes]
    assert kv.gather_blocks.default not in calls
    with model.session(1) as one, model.session(1) as two:
        for session in (one, two):
            session.prompt(IDS[None, :14])
        pools = [s._core.backend._state for s in (one, two)]
        names = {v.name for v in model.program.state if v.pooled and v.name in pools[0]}
        names -= {n for n in names if pools[0][n].dim() < 3}
        assert names and all(pools[0][n].data_ptr() == pools[1][n].data_ptr() for n in names)
        assert not names & set(one._core.backend.buffers())


@pytest.mark.long
def test_a_wrong_page_is_seen(both, monkeypatch):
    right = accel_attention.attention_over

    def shifted(q, q_pos, parts, form, partial=False):
        for part in parts:
            if part.table is not None:
                object.__setattr__(part, "table", part.table.roll(1, 1))
        return right(q, q_pos, parts, form, partial)

    monkeypatch.setattr(accel_attention, "attention_over", shifted)
    with pytest.raises(AssertionError, match="Not equal"):
        for got, want in zip(driven(both[0]), driven(both[1]), strict=True):
            close(got, want)


def test_an_array_on_the_device_reads_and_writes_as_one_of_the_host():
    array, host = DeviceArray(torch.zeros(3, 2, dtype=torch.int8)), np.zeros((3, 2), np.int8)
    for one in (array, host):
        one[1] = np.array([5, 6], np.int8)
    assert (array.shape, array.dtype, array.nbytes, len(array)) == ((3, 2), host.dtype, 6, 3)
    np.testing.assert_array_equal(array[[1, 2]], host[[1, 2]])
    array[0][0] = 9
    assert array[0][0] == 0, "what is read is a copy"


def test_no_memory_on_the_device_is_said_and_the_session_goes_on(monkeypatch):
    with accel.optimize(models.tiny(), target="triton", max_context=32, verify=False) as model:
        want = model.logits([[3, 4, 5, 6]])
        with model.session(1) as session:
            session.run(np.array([[3, 4, 5]]))
            compiled = session._core.backend._compiled

            def full(args, plan):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

            monkeypatch.setattr(session._core.backend, "_compiled", _Full(compiled, full))
            with pytest.raises(OutOfMemoryError, match="CUDA out of memory.*give fewer or shorter"):
                session.run(np.array([[6, 7]]))  # one token would replay a graph, on a GPU
            monkeypatch.undo()
            close(session.run(np.array([[6]]))[0, -1], want[0, -1])


class _Full:
    """A compiled entry that finds no memory."""

    def __init__(self, compiled, call):
        self._compiled, self._call = compiled, call

    def __getattr__(self, name):
        return getattr(self._compiled, name)

    def __call__(self, args, plan):
        return self._call(args, plan)
