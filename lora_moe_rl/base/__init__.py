"""One frozen base, held once for trainer and engines: what can be, where it lies, who reads it."""
