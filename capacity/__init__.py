"""Decisions about memory, shared by the scheduler's estimate, the agent's live decision and the preview. Pure."""
