"""Making what a method needs of a model beside its weights: trained parts and tables."""
