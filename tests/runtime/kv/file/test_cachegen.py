"""CacheGen: its grid by number, codes without loss, bits beside the entropy, depth, and a session that is opened."""

import numpy as np
import pytest

from accel.ir.errors import RecipeError, SavedSessionError
from accel.runtime.kv.file import Place, _rans
from accel.runtime.kv.file.cachegen import CacheGen

from ....prefill_case import built, far

SHAPE = (1, 2, 1200, 16)
FIRST, DEEP = Place(0, 8, True), Place(7, 8, True)


def keys(seed=0):
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.standard_normal((1, 2, 1, 16)))
    return (rng.standard_normal(SHAPE) * scale).astype(np.float32)


def codes(method, place, x):
    """By hand, one number at a time: [S,G D]."""
    rows = x[0].transpose(1, 0, 2).reshape(x.shape[2], -1)
    steps = method.steps(place)
    return np.array(
        [[round(float(n) * steps / float(abs(row).max())) + steps for n in row] for row in rows]
    )


def law_codes(method, place):
    """What is read back is exactly the codes' numbers: nothing is lost after the grid."""
    x = keys()
    steps, most = method.steps(place), np.abs(x).max(axis=(1, 3))[0]
    back = method.decode(place, method.encode(place, x), x.shape)
    got = back[0].transpose(1, 0, 2).reshape(x.shape[2], -1)
    want = (codes(method, place, x) - steps) * (most / np.float32(steps))[:, None]
    np.testing.assert_array_equal(got, want.astype(np.float32))


@pytest.mark.parametrize("coder", ["huffman", "arithmetic"])
@pytest.mark.parametrize("place", [FIRST, DEEP])
def test_codes_are_those_of_the_paper_and_come_back(place, coder):
    law_codes(CacheGen(coder=coder), place)


def test_the_law_catches_another_grid(monkeypatch):
    encode = CacheGen.encode
    monkeypatch.setattr(CacheGen, "encode", lambda self, place, x: encode(self, DEEP, x))
    with pytest.raises(AssertionError):
        law_codes(CacheGen(), FIRST)


def entropy(found):
    """Bits of codes [S,N], each channel by its own frequencies."""
    bits = 0.0
    for channel in found.T:
        share = np.bincount(channel) / len(channel)
        bits -= len(channel) * (share[share > 0] * np.log2(share[share > 0])).sum()
    return bits


@pytest.mark.parametrize(("coder", "above"), [("huffman", 1.1), ("arithmetic", 1.05)])
def test_bits_are_near_the_entropy(coder, above):
    """Streams, their places and tables of frequencies: all but the tokens' maxima."""
    x, method = keys(), CacheGen(coder=coder)
    bits = entropy(codes(method, FIRST, x))
    size = 8 * sum(a.nbytes for n, a in method.encode(FIRST, x).items() if n != "most")
    assert bits < size < above * bits < 0.9 * 5 * x.size


@pytest.mark.parametrize("count", [1, 3, 512, 513, 1100])
def test_the_arithmetic_coder_loses_nothing(count):
    """Of skewed and constant channels, and of all codes equally often, whatever the length."""
    rng = np.random.default_rng(count)
    found = np.stack([rng.integers(0, 31, count), np.full(count, 30), np.minimum(rng.geometric(0.7, count), 30),
                      np.where(rng.random(count) < 1e-3, 0, 17)]).astype(np.uint8)  # fmt: skip
    parts = _rans.encoded(found, 31)
    np.testing.assert_array_equal(_rans.decoded(parts, 4, count, 31), found)
    for name, change in (("words", parts["words"][:-1]), ("states", parts["states"] ^ 1),
                         ("table", parts["table"][:-6]), ("states", parts["states"][1:])):  # fmt: skip
        if change.size < parts[name].size or name == "states":
            with pytest.raises(ValueError, match="codes|streams|table|incomplete|Error"):
                _rans.decoded({**parts, name: change}, 4, count, 31)


def test_levels_halve_the_bins():
    bins = [(one.bins, one.deep_bins) for one in CacheGen().levels]
    assert bins == [(64, 32), (32, 16), (16, 8)]
    assert [one.bins for one in CacheGen(bins=256, deep_bins=6).levels] == [256, 256, 128]
    assert len(CacheGen(bins=4, deep_bins=4).levels) == 2


def test_the_first_layers_have_more_bins():
    method = CacheGen()
    assert [method.steps(Place(i, 32, True)) for i in (0, 9, 10, 31)] == [15, 15, 7, 7]
    assert [method.steps(Place(i, 32, False)) for i in (0, 1, 2, 31)] == [15, 15, 7, 7]


def test_a_damaged_stream_is_refused():
    parts = CacheGen().encode(FIRST, keys())
    with pytest.raises(ValueError, match="codes instead of 1200|invalid|incomplete"):
        CacheGen().decode(FIRST, {**parts, "codes": parts["codes"][:-40]}, SHAPE)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"bins": 7}, "bins is 7; give an even number"), ({"deep_bins": 2}, "deep_bins is 2; give 4 to 256"),
     ({"key_share": 1.5}, "key_share is 1.5; give 0 to 1")],
)  # fmt: skip
def test_bad_options(options, words):
    with pytest.raises(RecipeError, match=words):
        CacheGen(**options)


def test_an_opened_session_is_near_and_its_file_small(tmp_path):
    """Finer grids are nearer; a codec of the running cache stays as it is; other recipes' files are refused."""
    tokens = np.random.default_rng(3).integers(3, 50, (2, 60))
    errors, sizes = [], []
    for bins in (8, 32, 256):
        file = {"kv.file": {"use": "cachegen", "bins": bins, "deep_bins": bins}}
        model, path = built("llama", tables=file), tmp_path / f"{bins}.session"
        with model.session(2) as session:
            session.prompt(tokens[:, :50], [50, 31])
            session.save(path)
            with model.open_session(path) as opened:
                assert opened.lengths.tolist() == [50, 31]
                errors.append(far(opened.run(tokens[:, 50:51]), session.run(tokens[:, 50:51])))
        sizes.append(path.stat().st_size)
    assert errors == sorted(errors, reverse=True) and 0 < errors[-1] < 0.05 < errors[0]
    assert sizes == sorted(sizes)
    with pytest.raises(SavedSessionError, match="is of recipe"):
        built("llama").open_session(path)
