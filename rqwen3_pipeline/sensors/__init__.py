"""What looks after runs and submissions by the clock."""
