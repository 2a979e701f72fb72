"""Qwen3-Coder, Qwen 3.5."""

from accel.runtime.serve.reply.family import Family
from accel.runtime.serve.reply.forms.tags import Tags

FAMILY = Family(
    signs=("<tool_call>", "<function=", "<parameter="),
    form=Tags(),
    open="<tool_call>",
    close="</tool_call>",
    begin="\n",
    end="\n",
    apart="\n",
)
