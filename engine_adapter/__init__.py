"""Engines behind one contract: each adapter ties a receiver to an engine."""
