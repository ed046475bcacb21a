"""Layers whose sums have a fixed order, and the C kernels that compute them."""
