"""Hostile and damaged files and messages, drawn by hypothesis: `make fuzz`.

A case ends well, or with an error of descant's; in five seconds, and in bounded memory; and what has a check
sum is refused or as it was. `benchmarks.fuzz.case` says how a case is held to that.
"""
