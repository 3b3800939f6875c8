"""The run: one loop over tickets, and what it drives."""
