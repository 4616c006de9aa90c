"""What clients and server believe about models: priors, precisions, groups, beliefs made of them, and solvers.

Imports core."""
