"""Containers that runtimes live in: what they are like, and the few acts on those that the registry names."""
