"""Several methods on one federation: which is best, and is the difference real?"""
