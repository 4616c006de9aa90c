"""Experiments as files: configuration, run directories, checkpoints and resume.

Imports the engine and all below; draws nothing."""
