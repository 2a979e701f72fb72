"""The ONNX target's table: `@lower(op)` above a function `(b: Builder, *operands, **options) -> name`."""

from accel.lowering import Table

lower = Table("onnx")
