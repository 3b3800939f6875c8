"""What algorithms are made of: pure functions, one small file each."""
