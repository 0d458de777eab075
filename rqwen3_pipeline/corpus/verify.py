"""Verifies a built corpus against its manifest, from the files alone.

Costs one read of every shard.
"""

from model.errors import CorpusError
from model.files import sha256_file
from model.shard_format import open_shard, read_manifest
from rqwen3_pipeline.settings import RunRoot


def verify_shards(root: RunRoot) -> list[str]:
    """Compare every shard's size and SHA-256 with the manifest.

    Returns:
        One sentence for each shard that differs; empty when all agree.
    """
    manifest = read_manifest(root.manifest)
    problems: list[str] = []
    for entry in (*manifest.shards, *manifest.heldout):
        try:
            open_shard(root.path, entry)
        except CorpusError as error:
            problems.append(str(error))
            continue
        if (found := sha256_file(root.path / entry.path)) != entry.sha256:
            problems.append(f"{entry.path}: SHA-256 {found[:12]}…, the manifest says {entry.sha256[:12]}…")
    return problems
