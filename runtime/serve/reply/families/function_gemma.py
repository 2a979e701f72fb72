"""FunctionGemma."""

from accel.runtime.serve.reply.family import Family
from accel.runtime.serve.reply.forms.bare_keys import BareKeys

FAMILY = Family(
    signs=("<start_function_call>", "<escape>"),
    form=BareKeys("<escape>"),
    open="<start_function_call>",
    close="<end_function_call>",
)
