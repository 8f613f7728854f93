"""Run work on a scheduler: handles to large objects, retries, fingerprints and progress bars."""
