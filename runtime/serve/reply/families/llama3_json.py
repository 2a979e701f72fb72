"""Llama 3.1 and 3.2, with JSON. Their template takes one call a message."""

from accel.runtime.serve.reply.family import Family
from accel.runtime.serve.reply.forms.json_object import JsonObject

FAMILY = Family(
    signs=("<|start_header_id|>", '"parameters": dictionary of argument name and its value'),
    form=JsonObject(arguments="parameters"),
    open="<|python_tag|>",
    bare="{",
)
