"""RQwen3, a Qwen3-style language model written from scratch, and its training.

This package knows nothing of Dagster, of SLURM, or of the corpus' making: it reads token shards
and a manifest, and writes checkpoints, metrics and a ledger. `errors`, `files`, `shard_format`,
`config`, `memory` and `order` are free of torch, so that the pipeline may stand on them too.
"""

import os

# Read when torch's OpenMP is loaded, so it must come before torch: threads that wait for each other sleep. Spinning,
# the default, made a training step five times slower on two cores that had other work to do.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
