"""What codecs may ask for: keys before rope, all heads at once, constants, exact sinks; by codecs that lose nothing."""

from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from accel.ir.axis import find_axes
from accel.ir.errors import InputError
from accel.ir.spec import verify
from accel.ir.tables import Tables
from accel.passes.kv.codec import At, Base, Storage
from accel.passes.kv.codec._encode import Encode

from .kv_case import evicting, recipe
from .select_case import Selecting, measured_for
from .session_ways import close

R = 4
LENGTHS = [31, 14, 2]


@dataclass(frozen=True)
class Plain(Tables, Base):
    """Floats as they are, times a constant of their channel, which reading takes off."""

    heads_as_one: bool = False
    before_rope: bool = False
    tokens: int = 0
    first: int = 0
    broken: str = ""
    key = "plain"

    @property
    def storage(self):
        return Storage(self.tokens, self.first, self.heads_as_one, self.before_rope)

    def sizes(self, width, heads):
        return {"scale": (heads, width)}

    def measure(self, rows):
        found = {}
        for row in rows:
            for layer, x in row.layers.items():
                assert (x.unrotated is not None) and x.unrotated.shape == x.keys.shape
                found[layer] = {"scale": 1 + layer + torch.rand(x.keys.shape[1], x.keys.shape[3])}
        return found

    def by(self, at, x):
        """The constants of x [...,D] of a head, or of all as one."""
        scale = at.constants["scale"]
        if self.heads_as_one:
            return scale.flatten()
        shape = [1] * x.dim()
        shape[1], shape[-1] = scale.shape
        return scale.view(shape)

    def parts(self, at):
        scale = at.constants["scale"]
        assert at.width == (scale.numel() if self.heads_as_one else scale.shape[1])
        return {"": ("float32", (max(1, self.tokens) * at.width,))}

    def encode(self, at, x):
        y = x * self.by(at, x)
        return {"": y.flatten(-2) if self.tokens else y}

    def decode(self, at, parts):
        x = parts[""]
        if self.tokens:
            x = x.unflatten(-1, (self.tokens, -1))
        x = x / self.by(at, x)
        if self.broken == "role" and at.role == "k":
            x = 1.01 * x
        return x.flatten(2, 3) if self.tokens else x

    def within(self, at, x, back):
        return (x - back).abs() <= 1e-5


CODECS = [
    Plain(heads_as_one=a, before_rope=b, tokens=c, first=d)
    for a in (False, True)
    for b in (False, True)
    for c, d in ((0, 0), (R, 0), (R, 3))
]


def drive(case):
    """Ragged rows, single tokens, a wider call, a fork, and a rewind: logits."""
    tokens, found = case.tokens(3, 48), []
    with case.session(3) as session:
        found.append(session.run(tokens[:, :31], LENGTHS)[:, :2])
        found += [session.run(tokens[:, [i]]) for i in range(31, 40)]
        other = session.fork()
        found.append(other.run(tokens[:, 40:46]))
        other.close()
        session.rewind(session.lengths - 2)
        found.append(session.run(tokens[:, 46:48]))
    return np.concatenate([one.reshape(3, -1) for one in found], 1)


@pytest.mark.few(1)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_codec_that_loses_nothing_changes_nothing(stateful, codec):
    """And one that reads keys a hundredth too large does."""
    want = drive(Selecting(stateful("llama")))
    close(drive(Selecting(stateful("llama"), codec)), want)
    broken = drive(Selecting(stateful("llama"), replace(codec, broken="role")))
    assert np.abs(broken - want).max() > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma2", "gpt_neox"])
def test_windows_and_partial_rotations(stateful, name):
    for codec in (
        Plain(heads_as_one=True, before_rope=True),
        Plain(before_rope=True, tokens=R, first=2),
    ):
        close(drive(Selecting(stateful(name), codec)), drive(Selecting(stateful(name))))


def test_sinks_stay_and_blocks_begin_behind_them(stateful):
    case = Selecting(stateful("llama"), Plain(tokens=R, first=3))
    with case.session(2) as session:
        session.run(case.tokens(2, 24), [24, 9])
        assert session.held_from.tolist() == [3 + 16, 0]
        state = session._core.backend._state
        assert state["kept.pos"][0].flatten().tolist() == list(range(3, 19))
        assert state["kv.pos"][0, :3].tolist() == [0, 1, 2]
        with pytest.raises(InputError, match="cannot rewind row 0 to 18"):
            session.rewind([18, 9])
        session.rewind([19, 0])
        assert session.lengths.tolist() == [19, 0]


def drafted(case, wide, within):
    """Logits of tokens that stand, where calls of so many tokens are taken back but for their first; `within`: no
    more than the session has room for.
    """
    tokens, found, rooms = case.tokens(2, 60), [], set()
    with case.session(2) as session:
        session.run(tokens[:, :9], [9, 6])
        for _ in range(24):
            room = session.room if within else np.full(2, wide)
            counts = np.minimum(room, wide)
            rooms.update(counts.tolist())
            held = session.lengths
            ids = np.stack([tokens[b, held[b] : held[b] + wide] for b in range(2)])
            logits = session.run(ids, counts)
            found.append(logits[:, 0])
            session.rewind(held + 1)
    return np.stack(found, 1), rooms


def test_drafts_that_are_cut_to_the_room_leave_no_trace(stateful):
    """In 2 bits, as single tokens do; drafts of one length, which blocks cross, leave some."""
    kivi = find_axes()["kv.codec"].build("kivi", group=4, residual=8)
    case = Selecting(stateful("llama"), kivi)
    want, _ = drafted(case, 1, within=True)
    got, rooms = drafted(case, 5, within=True)
    assert rooms >= {1, 2, 5}
    close(got, want)
    with case.session() as session:
        assert session.capabilities.width is None and session.room.tolist() == [15]
    other, _ = drafted(case, 5, within=False)
    assert np.abs(other - want).max() > 1e-3


EVICTS = {"score": "snapkv", "kept": 13}


def evicted(stateful, codec=None, name="llama", **axes):
    """A session's case that keeps 13 tokens of a prompt, encoded by a codec."""
    case = evicting(stateful(name), recipe(**{**EVICTS, **axes}))
    if codec is not None:
        with TemporaryDirectory() as folder:
            report = Encode(measured_for(codec, stateful(name), folder)).run(case.program)
        assert report.changed, report.refused
        verify(case.program, "codec")
    return case


def behind(case):
    """Logits behind ragged prompts, of which rows keep 13, 13 and 9 tokens, and behind a second eviction."""
    tokens, found = case.tokens(3, 60), []
    with case.session(3) as session:
        session.prompt(tokens[:, :40], [40, 23, 9])
        found += [session.run(tokens[:, [i]]) for i in range(40, 44)]
        other = session.fork()
        session.prompt(tokens[:, 44:50])
        found.append(session.run(tokens[:, 50:52]))
        found.append(other.run(tokens[:, 50:52]))
        other.close()
    return np.concatenate([one.reshape(3, -1) for one in found], 1)


@pytest.mark.long
@pytest.mark.parametrize("codec", [Plain(tokens=R), Plain(before_rope=True, tokens=R)], ids=str)
def test_what_eviction_keeps_is_encoded_in_blocks(stateful, codec):
    """By a codec that loses nothing, and one that reads keys a hundredth too large."""
    want = behind(evicted(stateful))
    close(behind(evicted(stateful, codec)), want)
    assert np.abs(behind(evicted(stateful, replace(codec, broken="role"))) - want).max() > 1e-3


def test_blocks_are_of_what_was_gathered(stateful):
    """What is read of the codes is the codec's reading of what eviction keeps without it."""
    kivi = find_axes()["kv.codec"].build("kivi", group=4, residual=8)
    plain, coded = evicted(stateful), evicted(stateful, kivi)
    tokens = plain.tokens(2, 40)
    states = []
    for case in (plain, coded):
        with case.session(2) as session:
            session.prompt(tokens, [40, 23])
            states.append(session._core.backend._state)
    floats, codes = states
    assert floats["kept.0.k"].shape[2] == 13 and codes["kept.0.k"].shape[2] == 2
    for role in "kv":
        x = floats[f"kept.0.{role}"]
        whole = torch.cat((x, x[:, :, -1:].expand(-1, -1, 3, -1)), 2).unflatten(2, (-1, 8))
        parts = kivi.encode(At(role, x.shape[3]), whole)
        for name, part in parts.items():
            assert torch.equal(codes[".".join(filter(None, ("kept.0", role, name)))], part)
