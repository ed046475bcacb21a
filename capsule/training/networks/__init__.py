"""Networks: pure functions of one flat parameter buffer."""
