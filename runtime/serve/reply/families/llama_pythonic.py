"""Llama 3.2 and Llama 4 with a template for lists of calls, and Gemma 3 with the same one."""

from accel.runtime.serve.reply.family import Family
from accel.runtime.serve.reply.forms.pythonic import Pythonic

FAMILY = Family(
    signs=("[func_name1(params_name1=params_value1",),
    form=Pythonic(),
    open="<|python_start|>",
    close="<|python_end|>",
    begin="[",
    between=", ",
    end="]",
    bare="[",
)
