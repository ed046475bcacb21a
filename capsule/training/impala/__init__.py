"""IMPALA (Espeholt et al. 2018, arXiv:1802.01561)."""
