"""One run, on Ray or on this machine."""
