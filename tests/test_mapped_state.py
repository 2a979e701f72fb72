"""State in mapped files: what is not read stays on the disk, files are private and go with the session, a full disk."""

import ctypes
import mmap
import os
import resource

import models
import numpy as np
import pytest

import accel
from accel.ir.errors import StorageError
from accel.ir.parser.read import parse
from accel.ir.state import CacheRegion, Home, Part, StateValue
from accel.runtime.backends.onnx.mapped import mapped, memory_of
from accel.runtime.session.state import low_rank

from .session_ways import singles, variants

PAGE = mmap.PAGESIZE
READ, LAYERS, WIDE = 4, 2, 64  # pages of 16 slots of 64 numbers: a page of the system each
OPTIONS = {"use": "leoam", "tokens_read": 16 * READ, "dense_layers": 0, "spread": 1}
TOKENS = np.random.default_rng(0).integers(3, 101, (1, 2000))
linux = pytest.mark.skipif(not hasattr(mmap, "MADV_RANDOM"), reason="Linux")


def model():
    """A random Llama with one KV head."""
    return models.random(
        "llama",
        vocab_size=101, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=WIDE, max_position_embeddings=4096,
    )  # fmt: skip


@pytest.fixture(scope="module")
def made():
    with accel.optimize(model(), {"kv": {"select": OPTIONS}}, max_context=4096, max_batch=2) as one:
        yield one


def resident(array):
    """Which pages of its file the system holds in memory, bool [pages]."""
    found = (ctypes.c_ubyte * -(-array.nbytes // PAGE))()
    call = ctypes.CDLL(None, use_errno=True).mincore
    if call(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), found):
        pytest.skip(os.strerror(ctypes.get_errno()))
    return np.frombuffer(found, np.uint8) & 1 > 0


def put_away(arrays):
    """Let the system drop what it holds of them in memory; what it holds all the same, for each."""
    left = []
    for array in arrays:
        memory = memory_of(array)
        memory.flush()
        memory.madvise(21)  # MADV_PAGEOUT
        left.append(resident(array))
        if left[-1].mean() > 0.3:
            pytest.skip("this system keeps its files in memory")
    return left


def open_files():
    with open("/proc/self/maps") as lines:
        return {line.split()[4] for line in lines if "accel-" in line or "/#" in line}


def buffers_of(session):
    found = session._core.backend.buffers()
    return [found[f"kv.{layer}.{part}"] for layer in range(LAYERS) for part in "kv"]


@linux
def test_what_is_not_read_stays_on_the_disk(made):
    for kernels, one in variants(made):
        with one.session() as session:
            session.run(TOKENS[:, :1900])
            left = put_away(buffers_of(session))
            session.run(TOKENS[:, 1900:1901])
            most = READ + (0 if kernels == "native" else 4)  # the others look at the own chunk
            for array, before in zip(buffers_of(session), left, strict=True):
                now = resident(array)
                assert now.sum() >= 2 and (now & ~before).sum() <= most, kernels
            put_away(buffers_of(session))
            session.run(TOKENS[:, 1901:1940])  # which reads everything
            for array in buffers_of(session):
                assert resident(array)[: 1940 // 16].all(), kernels


@linux
@pytest.mark.long
def test_exact_keys_of_a_prompt_are_not_in_memory(monkeypatch):
    """Of those a step reads its own chunk, a local one and outliers; chunks that it rebuilds stay on the disk."""
    few = {"use": "shadowkv", "page": 16, "tokens_read": 16 * 8, "outliers": 2, "local": 1}
    with accel.optimize(
        model(),
        {"kv": {"select": few | {"dense_layers": 0, "low_rank": 40}}},
        max_context=4096,
        verify=False,
    ) as one:

        def law():
            with one.session() as session:
                session.prompt(TOKENS[:, :1900])
                keys, values = buffers_of(session)[::2], buffers_of(session)[1::2]
                left = [resident(array) for array in keys]
                assert all(now.mean() < 0.3 for now in left), "keys are in memory"
                before = put_away(values)
                session.run(TOKENS[:, 1900:1901])
                for now, was in zip(map(resident, keys), left, strict=True):
                    assert (now & ~was).sum() <= 1 + 1 + 2
                for now, was in zip(map(resident, values), before, strict=True):
                    assert 8 <= (now & ~was).sum() <= 1 + 1 + 2 + 8

        with one.session() as session:
            session.run(TOKENS[:, :1900])
            put_away(buffers_of(session))  # or this system keeps its files in memory
        law()
        monkeypatch.setattr(low_rank, "put_away", lambda arrays: None)
        with pytest.raises(AssertionError, match="keys are in memory"):
            law()


@linux
@pytest.mark.long
def test_codes_are_read_where_they_lie():
    """By `native`; scales stay in memory."""
    recipe = [{"kv": {"select": OPTIONS}}, "kv-int8"]
    with (
        accel.optimize(model(), recipe, max_context=4096, verify=False) as coded,
        accel.load(coded.artifact.path, kernels="native", threads=1) as one,
        one.session() as session,
    ):
        session.run(TOKENS[:, :1900])
        held = buffers_of(session)
        assert {a.dtype.name for a in held} == {"int8"}
        assert session.stats["kv_mapped"] == 2 * WIDE * LAYERS * 2048
        left = put_away(held)
        session.run(TOKENS[:, 1900:1901])
        for array, before in zip(held, left, strict=True):
            assert (resident(array) & ~before).sum() <= READ < len(before) // 4


def test_bytes_are_those_in_files(made):
    each = 4 * WIDE * 2 * LAYERS
    abstracts = each * (1 / 16 + 1 / 64)
    assert made.report["kv_mapped_per_token"] == each
    assert made.report["kv_bytes_per_token"] == 8 + each + abstracts
    with made.session(batch=2) as session:
        session.run(np.repeat(TOKENS[:, :300], 2, axis=0))
        assert session.stats["kv_mapped"] == 2 * 512 * each
        assert session.stats["kv_bytes"] == 2 * 512 * (8 + each + abstracts)
        arrays = session._core.backend.buffers()
        there = {n for n, a in arrays.items() if memory_of(a) is not None}
        assert there == {s.name for s in made.artifact.state if s.home is Home.MAPPED}
    assert session.stats["kv_mapped"] == session.stats["kv_bytes"] == 0


@linux
def test_files_are_nobody_elses_and_go_with_the_session(made, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = open_files()
    with made.session() as session:
        session.run(TOKENS[:, :20])
        fork = session.fork()
        held = open_files() - before
        assert len(held) == 2 * 2 * LAYERS and not list(tmp_path.iterdir())
        fork.close()
        assert len(open_files() - before) == 2 * LAYERS
        session.run(TOKENS[:, 20:300])  # which takes larger ones
        assert len(open_files() - before) == 2 * LAYERS
    assert not open_files() - before


@linux
def test_a_full_disk_leaves_the_session(made):
    with made.session() as session, made.session() as other:
        want = [x.run(TOKENS[:, :250]) for x in (session, other)][1]
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, hard))
        try:
            with pytest.raises(StorageError, match="has no room for 131,072 bytes .* TMPDIR"):
                session.run(TOKENS[:, 250:260])
            with pytest.raises(StorageError, match="has no room"):
                session.fork()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert session.length == 250 and want.shape == (1, 250, 101)
        a, b = (singles(x, TOKENS[:, 250:260]) for x in (session, other))
        np.testing.assert_array_equal(a, b)


def test_a_folder_that_is_none(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/nowhere/at/all")
    with pytest.raises(StorageError, match="/nowhere/at/all.*No such file"):
        mapped((4, 4), "float32")


def test_rows_and_files_of_sessions(made, tmp_path):
    """Rows that are reordered or dropped, and a saved session, go on as they would in memory."""
    tokens = np.random.default_rng(1).integers(3, 101, (2, 330))
    with made.session(batch=2) as session:
        session.prompt(tokens[:, :300])
        session.save(tmp_path / "one")
        with made.open_session(tmp_path / "one") as opened:
            assert opened.stats["kv_mapped"] == session.stats["kv_mapped"]
            a, b = (singles(x, tokens[:, 300:304]) for x in (session, opened))
            np.testing.assert_array_equal(a, b)
            opened.select([1])
            assert opened.stats["kv_mapped"] == session.stats["kv_mapped"] // 2
            session.select([1, 0])
            a, b = opened.run(tokens[1:, 304:306]), session.run(tokens[::-1, 304:306])
            np.testing.assert_allclose(a[0], b[0], atol=1e-5)


def test_arrays_are_as_those_in_memory():
    found = mapped((3, 5), "int64", -1)
    assert found.dtype == np.int64 and (found == -1).all() and found.flags.writeable
    assert memory_of(found[1:, 2:]) is memory_of(found) is not None
    assert memory_of(np.zeros(3)) is None and memory_of(mapped((0, 5), "int8")) is None
    assert not mapped((3, 5), "float32").any()


def test_a_home_is_told_and_read_back(made):
    value = StateValue(Part.KEYS, 0, "float32", ("B", 1, "C", 4), home=Home.MAPPED)
    told = value.to_json()
    assert told["home"] == "mapped" and StateValue.parse(**told | {"shape": value.shape}) == value
    assert "home" not in StateValue(Part.KEYS, 0, "float32", ("B", 1, "C", 4)).to_json()
    assert {s.part for s in made.artifact.state if s.home is Home.MAPPED} == {
        Part.KEYS,
        Part.VALUES,
    }
    assert all(s.region is CacheRegion.RECENT for s in made.artifact.state)
    text = made.program.text()
    assert text.count("home='mapped'") == 2 * LAYERS
    assert parse(text).state == made.program.state
