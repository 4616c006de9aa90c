"""Several methods on one federation: which one is best, and whether the difference is real.

Imports experiment and all below; the page and the pictures of a comparison are in view."""
