"""Exports models to other formats and imports them: one module per format, listed in formats.py."""
