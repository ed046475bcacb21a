"""Data sets: what a run reads besides its image, pinned by digest."""
