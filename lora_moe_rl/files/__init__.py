"""What is read and written: untrusted files, our own, and those with a user's functions."""
