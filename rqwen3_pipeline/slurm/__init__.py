"""SLURM, without Dagster: ask it, describe a job, write its script, check a site.

Everything goes through `client.Slurm`, in argument lists with time-outs; nothing here imports Dagster.
"""
