"""What a built corpus promises: each promise has a name and a sentence, and `verify` checks it.

Apart from the checks themselves, so that the asset checks can be listed without reading a byte.
"""

PROMISES = {
    "tokenizer": "The tokenizer in the run root is the one that the manifest names and that made every shard.",
    "files": "Every shard has its sidecar and its table, every sidecar and table its shard, and all are listed.",
    "hashes": "Every shard, sidecar and table has the bytes that were promised.",
    "counts": "Shard, sidecar, table and manifest agree on tokens, documents and bytes of text.",
    "ids": "Every id is below the tokenizer's size.",
    "end_of_text": "Every whole shard has one end-of-text id a document, each where the table says it ends.",
    "unique": "No digest is there twice among the sources that are deduplicated together.",
    "heldout": "Held-out documents are those that their digest holds out, and none of them is in training.",
    "budgets": "Each source fills its token budget.",
    "manifest": "The manifest and its card are, byte for byte, what the pieces give.",
}
