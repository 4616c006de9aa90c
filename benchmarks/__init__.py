"""Measurements of descant. A package by name, because other distributions install one of the same name."""
