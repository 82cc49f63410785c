"""Leyden trains any agent: it records what an agent does, keeps it in a durable store, and turns it into better agents."""
