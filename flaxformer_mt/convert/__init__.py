"""One file a foreign format, all driven by a strict table; `formats` has them by name."""
