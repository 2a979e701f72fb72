"""Hermes 2 Pro and later, Qwen 2.5, Qwen 3, SmolLM 3."""

from accel.runtime.serve.reply.family import Family
from accel.runtime.serve.reply.forms.json_object import JsonObject

FAMILY = Family(
    signs=("<tool_call>",),
    form=JsonObject(),
    open="<tool_call>",
    close="</tool_call>",
    begin="\n",
    end="\n",
    apart="\n",
)
