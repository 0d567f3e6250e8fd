"""A draft's way into service: tried on one worker, given to the others, or taken back."""
