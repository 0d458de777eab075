"""The corpus, SLURM, and Dagster's face over both; training itself lives in the package `model`."""
