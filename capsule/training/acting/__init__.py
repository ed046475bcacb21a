"""Acting: running actors in this process or in others, and evaluating networks for them."""
