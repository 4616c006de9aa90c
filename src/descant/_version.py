"""The version of the package, kept here and nowhere else."""

__version__ = "0.1.0"
