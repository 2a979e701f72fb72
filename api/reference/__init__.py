"""The bundled reference model and the tasks it was trained on; see README.md here."""
