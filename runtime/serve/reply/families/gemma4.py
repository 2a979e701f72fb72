"""Gemma 4."""

from accel.runtime.serve.reply.family import Family
from accel.runtime.serve.reply.forms.bare_keys import BareKeys

FAMILY = Family(
    signs=("<|tool_call>", '<|"|>'),
    form=BareKeys('<|"|>'),
    open="<|tool_call>",
    close="<tool_call|>",
)
