"""Speculation on one worker: the monitor against each fixed K in pairs, and its reactions to a change."""
