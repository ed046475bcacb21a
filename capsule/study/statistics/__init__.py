"""Statistics of groups of runs, in plain Python: the host side has no numpy.

The scores of a group are a matrix, the tasks, each with the scores of its runs. Runs of a task are
independent of one another, and every task may have a number of runs of its own. Scores are returns,
or any other unit in which more is better; the unit has to be the same for all tasks where tasks are
joined, as human-normalised scores are.
"""
