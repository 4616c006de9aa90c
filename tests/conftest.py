"""What every test shares: one thread, no display, and property tests that repeat."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the processes that tests start
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import matplotlib
import torch

torch.set_num_threads(1)
matplotlib.use("Agg")

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")
