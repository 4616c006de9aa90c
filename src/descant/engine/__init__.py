"""Cohort execution, the client store, rounds, evaluation."""
