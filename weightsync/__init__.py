"""Moves model weights from a trainer to an inference engine."""
