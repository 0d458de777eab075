"""Faults in a built corpus: one for each of its promises, which breaks that promise."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from model.files import read_json, sha256_file, write_json
from model.shard_format import docs_path, sidecar_path
from rqwen3_pipeline.corpus.data_card import card_path
from rqwen3_pipeline.corpus.stamps import tokens_stamp_path

SOURCE = "pes2o"


def restamp(root, source, *paths):
    """Make a partition's stamp, sidecar and manifest agree with changed files, as a faulty program would leave them."""
    stamp_file = tokens_stamp_path(root, source, "00000")
    stamp, manifest = read_json(stamp_file), read_json(root.manifest)
    for path in paths:
        sidecar = read_json(sidecar_path(path))
        sidecar |= {"sha256": sha256_file(path)}
        write_json(sidecar_path(path), sidecar)
        for entry in (*manifest["shards"], *manifest["heldout"]):
            if root.path / entry["path"] == path:
                entry["sha256"] = sidecar["sha256"]
        for file in (path, sidecar_path(path), docs_path(path)):
            facts = {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
            stamp["outputs"][file.relative_to(root.path).as_posix()] = facts
    stamp.pop("facts_sha256", None)
    write_json(stamp_file, stamp)
    root.manifest.write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")


def changed(data, place, value):
    ids_ = np.frombuffer(data, "<u4").copy()
    ids_[place] = value
    return ids_.tobytes()


def with_column(shard, name, values):
    table = pq.read_table(docs_path(shard))
    index = table.schema.get_field_index(name)
    column = pa.array(values, table.schema.field(name).type)
    pq.write_table(table.set_column(index, table.schema.field(name), column), docs_path(shard))


def _first(root):
    return root.tokens / f"{SOURCE}-00000-00.bin"


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def _ids(root):
    _first(root).write_bytes(changed(_first(root).read_bytes(), 7, 400))
    restamp(root, SOURCE, _first(root))


def _end_of_text(root):
    ids_ = np.frombuffer(_first(root).read_bytes(), "<u4")
    eos = read_json(root.manifest)["tokenizer"]["eos_id"]
    _first(root).write_bytes(changed(_first(root).read_bytes(), int(np.flatnonzero(ids_ == eos)[0]), 0))
    restamp(root, SOURCE, _first(root))


def _counts(root):
    lengths = pq.read_table(docs_path(_first(root))).column("text_bytes").to_pylist()
    with_column(_first(root), "text_bytes", [lengths[0] + 3, *lengths[1:]])
    restamp(root, SOURCE, _first(root))


def _unique(root):
    digests = pq.read_table(docs_path(_first(root))).column("digest").to_pylist()
    with_column(_first(root), "digest", [*digests[:-1], digests[2]])
    restamp(root, SOURCE, _first(root))


def _heldout(root):
    held = pq.read_table(docs_path(root.heldout / _first(root).name)).column("digest")[0].as_py()
    digests = pq.read_table(docs_path(_first(root))).column("digest").to_pylist()
    with_column(_first(root), "digest", [held, *digests[1:]])
    restamp(root, SOURCE, _first(root))


def _budgets(root):
    manifest = read_json(root.manifest)
    manifest["sources"][SOURCE]["missing_tokens"] = 5
    root.manifest.write_text(json.dumps(manifest))


FAULTS = {
    "tokenizer": lambda root: _flip(root.tokenizer),
    "files": lambda root: (root.tokens / "stray.bin").write_bytes(b"1234"),
    "hashes": lambda root: _flip(_first(root)),
    "counts": _counts,
    "ids": _ids,
    "end_of_text": _end_of_text,
    "unique": _unique,
    "heldout": _heldout,
    "budgets": _budgets,
    "manifest": lambda root: card_path(root).write_text("# mine"),
}
"""Breaks the promise of that name, by the run root; all but the last two also when the manifest is folded anew."""
