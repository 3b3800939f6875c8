"""What we rely on of other packages, checked."""
