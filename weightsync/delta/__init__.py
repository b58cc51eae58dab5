"""Delta files and what is done with them: write, read, apply, undo, merge."""
