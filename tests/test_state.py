"""State values are typed: names and roles come from what a value is, and a manifest's are read back to it."""

import pytest

from accel.ir.state import CacheRegion, Part, StateValue, Writer, writer_of

VALUES = {  # as artifacts have them: name, role, layer -> what it is
    ("kv.pos", "pos", None): (Part.POSITIONS, CacheRegion.RECENT, "", Writer.STEP),
    ("kv.pos.1", "pos", None): (Part.POSITIONS, CacheRegion.RECENT, "1", Writer.STEP),
    ("kv.12.k", "k", 12): (Part.KEYS, CacheRegion.RECENT, "", Writer.STEP),
    ("kv.0.v.scale", "v.scale", 0): (Part.VALUES, CacheRegion.RECENT, "scale", Writer.STEP),
    ("recurrent.0.ssd.1", "recurrent", 0): (Part.RECURRENT, CacheRegion.RECENT, "ssd.1", Writer.STEP),
    ("pages.3.high", "pages", 3): (Part.PAGES, CacheRegion.RECENT, "high", Writer.STEP),
    ("absorbed.0.sums", "absorbed", 0): (Part.ABSORBED, CacheRegion.RECENT, "sums", Writer.COMPRESS),
    ("mass.0.recent", "mass", 0): (Part.MASS, CacheRegion.RECENT, "", Writer.STEP),
    ("mass.0.kept", "mass", 0): (Part.MASS, CacheRegion.KEPT, "", Writer.STEP),
    ("mass.0.entropy.kept", "mass", 0): (Part.MASS, CacheRegion.KEPT, "entropy", Writer.STEP),
    ("mass.0.steps.recent", "mass", 0): (Part.MASS, CacheRegion.RECENT, "steps", Writer.STEP),
    ("note.0.recent", "note", 0): (Part.NOTE, CacheRegion.RECENT, "", Writer.STEP),
    ("note.0.kept", "kept.note", 0): (Part.NOTE, CacheRegion.KEPT, "", Writer.COMPRESS),
    ("cross.pos", "cross.pos", None): (Part.POSITIONS, CacheRegion.CROSS, "", Writer.ENCODE),
    ("cross.1.k", "cross.k", 1): (Part.KEYS, CacheRegion.CROSS, "", Writer.ENCODE),
    ("kept.pos", "kept.pos", None): (Part.POSITIONS, CacheRegion.KEPT, "", Writer.COMPRESS),
    ("kept.1.pos", "kept.pos", 1): (Part.POSITIONS, CacheRegion.KEPT, "", Writer.COMPRESS),
    ("kept.1.k.scale", "kept.k.scale", 1): (Part.KEYS, CacheRegion.KEPT, "scale", Writer.COMPRESS),
    ("low.1.pos", "kept.low.pos", 1): (Part.POSITIONS, CacheRegion.LOW, "", Writer.COMPRESS),
    ("low.1.v.least", "kept.low.v.least", 1): (Part.VALUES, CacheRegion.LOW, "least", Writer.COMPRESS),
    ("low.1.pos.two", "kept.low.pos", 1): (Part.POSITIONS, CacheRegion.LOW, "two", Writer.COMPRESS),
    ("low.1.k.two.scale", "kept.low.k.two.scale", 1): (Part.KEYS, CacheRegion.LOW, "two.scale", Writer.COMPRESS),
    ("pool.2.k", "kept.block.k", 2): (Part.KEYS, CacheRegion.POOL, "", Writer.SESSION),
    ("table", "kept.block.table", None): (Part.TABLE, CacheRegion.POOL, "", Writer.SESSION),
}  # fmt: skip


@pytest.mark.parametrize(("name", "role", "layer"), VALUES, ids=[n for n, _, _ in VALUES])
def test_names_and_roles_are_those_of_artifacts(name, role, layer):
    value = StateValue.parse(name, role, layer, "float32", ("B", "C"), 0)
    part, region, detail, writer = VALUES[name, role, layer]
    assert (value.part, value.region, value.detail, value.writer) == (part, region, detail, writer)
    assert (value.name, value.role) == (name, role)
    assert value.to_json() == {
        "name": name, "role": role, "layer": layer, "dtype": "float32", "shape": ["B", "C"], "fill": 0,
    }  # fmt: skip
    assert writer_of(role) is writer
    assert value.cross == (writer is Writer.ENCODE) and value.shared == (writer is Writer.SESSION)
    assert value.written_between_steps == (writer in (Writer.COMPRESS, Writer.SESSION))
    assert value.pooled == (name == "pool.2.k")


@pytest.mark.parametrize(
    ("name", "role", "layer"),
    [
        ("kv.0.k", "v", 0),
        ("kv.0.k", "k", 1),
        ("kv.0.q", "q", 0),
        ("kept.0.k", "k", 0),
        ("", "", None),
    ],
)
def test_what_does_not_fit_is_no_state(name, role, layer):
    with pytest.raises(ValueError, match=f"{name} with role {role} and layer {layer}"):
        StateValue.parse(name, role, layer, "float32", ("B", "C"), 0)
