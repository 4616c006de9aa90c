"""How fast the engine is, beside a hand-written loop and beside what the processor can do at all."""
