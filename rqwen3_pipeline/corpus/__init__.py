"""From raw parquet to a manifest of token shards, one module per stage, in the order the data flows.

Pure: nothing here imports Dagster or torch. Each stage is a function from files to files; it skips
what is already whole and was made with the same settings from the same inputs, and so may be
killed and started again anywhere.
"""
