"""Experiments as files: configuration, run directories, checkpoints and resume."""
