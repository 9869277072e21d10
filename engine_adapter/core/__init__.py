"""The bundled inference core: a small rollout engine that takes new weights while it serves."""
