"""Networks as functions over a leading axis of clients, differentiated by hand where that is faster.

Imports the plain values of core (trees, vectors, random numbers), never a task or a method."""
