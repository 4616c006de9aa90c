"""The items of papers, tables and figures: found, run, and their claims judged."""
