"""Which tokens leave the loss because engine and trainer are too far apart, one file each."""
