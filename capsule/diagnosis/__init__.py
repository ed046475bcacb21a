"""Finding what makes two runs of one experiment differ, and where."""
