"""What clients and server believe about models: priors, precisions, groups and beliefs; and local solvers.

Imports core."""
