"""Differential privacy of what clients upload: settings, clipped and noised gradients, random numbers that
nobody else knows. How much privacy that is, `theory/accountant.py` says."""
