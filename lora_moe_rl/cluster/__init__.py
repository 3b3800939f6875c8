"""Ray: actors, their logs and places."""
