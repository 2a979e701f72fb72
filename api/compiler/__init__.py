"""The compiler driver: from a module or a model directory to an artifact."""
