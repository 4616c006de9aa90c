"""Rounds: which clients work, what they compute, what is aggregated, stored and scored.

Imports algorithms, theory and all below; knows no files but the client store."""
