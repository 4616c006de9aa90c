"""Where chunks of clients run: in this process, in worker processes, in Ray actors.

Imports the engine's work and batches; `choose` decides which backend a run takes."""
