"""What a recipe does to a model's numbers: calibration texts, losses, equal bits."""
