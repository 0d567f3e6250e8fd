"""What keeps everything inside the walls, and what proves it."""
