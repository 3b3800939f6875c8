"""Calling a user's functions in processes that may be lost: rewards, tools."""
