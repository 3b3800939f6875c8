"""Model directories: where they are, what they are, what fits them."""
