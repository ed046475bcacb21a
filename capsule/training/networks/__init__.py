"""Networks, as pure functions of one flat parameter buffer."""
