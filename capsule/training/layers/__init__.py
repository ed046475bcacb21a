"""Layers whose sums have a written order, and the C kernels behind them."""
