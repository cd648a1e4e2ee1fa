"""The commands of `gpuq`, one small module for each group.

A module here imports typer and nothing heavy; what a command needs it imports when it runs, so that `gpuq --help`
and shell completion stay fast.
"""
