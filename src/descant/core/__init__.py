"""Values that everything is made of: trees, models as vectors, fields, federations, tasks, the interface of a method.

Imports no other room."""
