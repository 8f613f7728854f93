"""Run work on a scheduler: retries, resources, errors that name a block, and progress bars."""
