"""R2D2 (Kapturowski et al. 2019, https://openreview.net/forum?id=r1lyTjAqYX)."""
