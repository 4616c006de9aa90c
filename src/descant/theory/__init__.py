"""What the papers prove, as functions: constants, bounds, envelopes, equilibria, heterogeneity.

Imports priors, models, data and core; methods take their step sizes from here."""
