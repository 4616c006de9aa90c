"""Values that everything is made of: trees, models as vectors, fields, federations, tasks, what a method is.

Imports no other room."""
