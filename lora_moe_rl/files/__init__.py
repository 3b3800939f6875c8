"""What is read and written: untrusted files, and our own."""
