"""R2D2 (Kapturowski et al. 2019, OpenReview r1lyTjAqYX)."""
