"""What turns rewards into a loss: pure functions, one small file each."""
