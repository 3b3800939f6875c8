"""What a run says of itself: metrics, console, report."""
