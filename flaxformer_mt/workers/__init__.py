"""Workers that may die: a map over blocks by processes of this machine or actors of a Ray cluster."""
