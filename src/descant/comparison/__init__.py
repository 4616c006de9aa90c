"""Several methods on one federation: which is best, and is the difference real?

Imports experiment and all below; the page and the pictures of a comparison are in view."""
