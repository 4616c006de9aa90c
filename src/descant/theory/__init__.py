"""What the papers prove, as functions: constants, bounds, envelopes, equilibria, heterogeneity."""
