"""`make chaos`: a real federation under a seeded plan of faults gives the same result, bit for bit.

Every round must aggregate the uploads of all honest clients (`--at-least`), so that whoever is absent is
waited for. Whatever happens, the server's state, the losses of all rounds and the clients' models are those
of the same federation undisturbed. One more client lies all the time, each time in another way; in the
undisturbed federation it always sends NaN.
"""
