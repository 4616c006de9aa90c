"""Experiments as files: configuration, run directories, checkpoints and resume.

Imports the engine and all below; draws no pictures but a run's own."""
