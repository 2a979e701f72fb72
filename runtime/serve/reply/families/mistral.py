"""Mistral and Mixtral, to version 3 of their tokenizer."""

from accel.runtime.serve.reply.family import Family
from accel.runtime.serve.reply.forms.json_object import JsonObject

FAMILY = Family(
    signs=("[TOOL_CALLS]",),
    form=JsonObject(),
    open="[TOOL_CALLS]",
    begin=" [",
    between=", ",
    end="]",
    id_size=9,
)
