"""The picture of a run: one HTML page that works offline, and the same essentials in the terminal."""
