"""Adapters that sessions choose. No axis of a recipe: an adapter is the user's data, as the model is."""
