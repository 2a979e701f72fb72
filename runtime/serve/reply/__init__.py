"""A reply as a stream of reasoning, text, tool calls and its end, whatever the model's family writes them as."""
