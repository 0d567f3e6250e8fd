"""Trains a draft; only modules of the training process import `torch` and `transformers`."""
