"""Makes training samples from kept content; they exist only as long as that content."""
