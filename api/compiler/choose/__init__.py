"""Which recipe suits a model, a machine and prompts: recipes are built and measured within a time budget."""

from accel.compiler.choose.choose import Choice, choose

__all__ = ["Choice", "choose"]
