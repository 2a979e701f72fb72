"""The Triton target's table: `@lower(op)` above a function `(b: Builder, *operands, **options) -> node`."""

from accel.lowering import Table

lower = Table("triton")
