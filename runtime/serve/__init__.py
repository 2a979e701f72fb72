"""Many requests at once over one loaded model."""
