"""Experiments: their chain of submissions, the hand that stops it, and variations of one another."""
