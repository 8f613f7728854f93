"""How work reaches the workers of a scheduler: handles to objects, submissions, progress."""
