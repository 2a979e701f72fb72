"""LFM 2 and 2.5."""

from accel.runtime.serve.reply.family import Family
from accel.runtime.serve.reply.forms.pythonic import Pythonic

FAMILY = Family(
    signs=("<|tool_list_start|>",),
    form=Pythonic(),
    open="<|tool_call_start|>",
    close="<|tool_call_end|>",
    begin="[",
    between=", ",
    end="]",
)
