"""An OpenAI-compatible HTTP server over engines. Needs the extra `serve`; only `accel.commands.serve` imports it."""
