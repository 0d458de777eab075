"""RQwen3, a Qwen3-style language model written from scratch, and its training.

This package knows nothing of Dagster, of SLURM, or of the corpus' making: it reads token shards
and a manifest, and writes checkpoints, metrics and a ledger. `errors`, `files`, `shard_format`,
`config`, `memory` and `order` are free of torch, so that the pipeline may stand on them too.
"""
