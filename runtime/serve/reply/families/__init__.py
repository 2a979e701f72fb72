"""How families of models write tool calls, a file for each: `FAMILY`."""
