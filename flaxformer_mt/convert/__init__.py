"""Export to and import from foreign model formats: one module per format, listed in formats.py."""
