"""DQN (Mnih et al. 2015, doi:10.1038/nature14236; Nagarajan et al. 2019, arXiv:1809.05676)."""
