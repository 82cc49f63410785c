"""Backends that sample and train a policy."""
