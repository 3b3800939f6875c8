"""Here so that `tests` is where pytest starts."""
