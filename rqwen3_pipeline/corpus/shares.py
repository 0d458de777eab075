"""What part of the run each source and each StackExchange site really has, and what is missing of it.

Sites come from the addresses in the tables beside the shards: one column of StackExchange's tables is
all that is read.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
# (pyarrow ships no types)

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from model.shard_format import docs_path
from rqwen3_pipeline.settings import RunRoot

NO_SITE = "(no address)"
_HOST = r"^[a-z]+://(?P<host>[^/]+)"


def site_tokens(root: RunRoot, entries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Tokens of the corpus by the host of their document's address, the largest first.

    Args:
        root: the run root.
        entries: shards as the manifest lists them; `tokens_used` says where the budget ends.
    """
    tokens: Counter[str] = Counter()
    for entry in entries:
        table = pq.read_table(docs_path(root.path / entry["path"]), columns=["end", "tokens", "url"])
        length_ = table.column("tokens").to_numpy().astype(np.int64)
        begin_ = table.column("end").to_numpy().astype(np.int64) - length_
        used_ = np.clip(entry["tokens_used"] - begin_, 0, length_)
        host = pc.struct_field(pc.extract_regex(table.column("url").combine_chunks(), _HOST), "host")
        grouped = (
            pa.table({"host": pc.fill_null(host, NO_SITE), "used": used_}).group_by("host").aggregate([("used", "sum")])
        )
        tokens.update(dict(zip(grouped["host"].to_pylist(), grouped["used_sum"].to_pylist(), strict=True)))
    found = {name: count for name, count in tokens.items() if count}
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def realised_shares(sources: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One record a source, and one for each of its sites: the wanted and the realised part of the run's tokens.

    Args:
        sources: as in the manifest.
    """
    wanted = sum(facts["share"] for facts in sources.values())
    used = max(sum(facts["tokens_used"] for facts in sources.values()), 1)
    records: list[dict[str, Any]] = []
    for name, facts in sources.items():
        record = {"source": name, "site": "", "tokens_used": facts["tokens_used"]}
        record |= {"wanted_percent": round(100 * facts["share"] / wanted, 3)}
        records.append(record | {"realised_percent": round(100 * facts["tokens_used"] / used, 3)})
        for site, tokens in facts.get("sites", {}).items():
            share = {"wanted_percent": None, "realised_percent": round(100 * tokens / used, 3)}
            records.append({"source": name, "site": site, "tokens_used": tokens} | share)
    return records


def shortfalls(sources: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """For each source that does not fill its budget: how much there is, and what to add.

    Args:
        sources: as in the manifest.
    """
    return {name: _shortfall(name, facts) for name, facts in sources.items() if facts["missing_tokens"] > 0}


def _shortfall(name: str, facts: Mapping[str, Any]) -> str:
    budget, there, files = facts["budget_tokens"], facts["tokens"], facts["files"]
    seen = (
        f"{name}: the run wants {budget:,} tokens, the corpus has {there:,}, in {files} files: "
        f"{facts['missing_tokens']:,} are missing. "
    )
    more = f"about {math.ceil(facts['missing_tokens'] * files / there)} more files of that size" if there else "files"
    if facts.get("pin") is None:
        add = f"Add {more} to the folder, then: rqwen3 sources lock --folder DIR, rqwen3 corpus build"
    else:
        factor = f"{math.ceil(105 * budget / there) / 100} times what it is" if there else "more"
        add = (
            f"Add {more}: raise data.budget_margin to {factor}, or name a larger config in [data.{name}]; then: "
            "rqwen3 sources lock --update, rqwen3 sources fetch, rqwen3 corpus build"
        )
    return (
        f"{seen}{add}. Or want less of it (training.max_steps, or share in [data.{name}]), or let the run read "
        "documents again: data.allow_repeats = true"
    )
