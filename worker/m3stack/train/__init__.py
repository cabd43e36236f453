"""Trains the built-in tiny model: data, differentiable operations, and the loop."""
