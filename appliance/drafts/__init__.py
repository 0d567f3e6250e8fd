"""The life of a draft model: lint, registry, harvest, training, evaluation, promotion."""
