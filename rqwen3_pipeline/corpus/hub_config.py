"""What a data set on the Hub consists of: a configuration's parquet files, pinned to a commit.

`datasets` resolves the configuration as it would for anybody who loads the data set, and loads nothing;
sizes and SHA-256 come from the Hub's file list. Costs some ten requests a source (more where the
listing has many pages), once per lock.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (datasets ships no complete types)

import difflib
import logging
import re
import tempfile
from dataclasses import dataclass
from typing import Any

from model.errors import RQwen3Error, SourceError
from rqwen3_pipeline.corpus.hub import Pin, explain, first_line
from rqwen3_pipeline.corpus.hub_sources import HubSource

PATHS_PER_REQUEST = 500
_URL = re.compile(r"hf://datasets/(?P<dataset>[^/]+/[^/@]+)@(?P<commit>[0-9a-f]{40})/(?P<path>.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedFile:
    """A file as the Hub lists it."""

    path: str
    """In the data set."""
    size_bytes: int
    """Its size."""
    sha256: str
    """Of its bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """A configuration's files at one commit."""

    pin: Pin
    """The data set and its commit."""
    files: tuple[ListedFile, ...]
    """Those of the training split (or of the only one), by path."""
    missing_sites: tuple[str, ...] = ()
    """Default sites that the data set has no folder of."""


def list_source(source: str, hub: HubSource) -> Listing:
    """Resolve a source's configuration and list its files.

    Raises:
        SourceError: the data set, revision or configuration is not there or can't be read, or its files are
            no parquet files with a known SHA-256; the message says the way out.
    """
    pin, paths = _resolve(source, hub)
    kept, missing = _of_sites(source, hub, paths)
    return Listing(pin=pin, files=tuple(_facts(pin, kept)), missing_sites=missing)


def _resolve(source: str, hub: HubSource) -> tuple[Pin, list[str]]:
    from rqwen3_pipeline.corpus.patience import install

    install()
    import datasets
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi

    datasets.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub.repocard").setLevel(logging.ERROR)  # a data set without a card is no news
    asked = hub.revision
    try:
        commit = str(HfApi().dataset_info(hub.dataset, revision=hub.revision).sha)
        asked = commit
        with tempfile.TemporaryDirectory() as empty:  # else an older copy in the cache of datasets would stand in
            builder: Any = load_dataset_builder(hub.dataset, hub.config or None, revision=commit, cache_dir=empty)
        splits: dict[str, list[str]] = {str(name): list(urls) for name, urls in builder.config.data_files.items()}
    except Exception as error:  # datasets and the Hub's client raise a dozen types
        raise _explain_config(error, source, hub, asked) from error
    split = "train" if "train" in splits else next(iter(splits)) if len(splits) == 1 else ""
    if not split:
        raise SourceError(
            f"{hub.dataset}: has the splits {', '.join(splits)}, none of which is train. {_other(source)}"
        )
    found = [_URL.fullmatch(url) for url in splits[split]]
    paths = [match["path"] for match in found if match]
    if len(paths) != len(splits[split]) or {match["commit"] for match in found if match} != {commit}:
        raise SourceError(f"{hub.dataset}: its files are not all in the data set itself. {_other(source)}")
    foreign = [path for path in paths if not path.endswith(".parquet")]
    if foreign:
        raise SourceError(f"{hub.dataset}/{foreign[0]}: no parquet file; only those are read. {_other(source)}")
    return Pin(dataset=hub.dataset, config=hub.config, revision=commit), sorted(paths)


def _other(source: str) -> str:
    return f"Name another one: dataset and config in [data.{source}]; or a folder: rqwen3 sources lock --folder DIR"


def _explain_config(error: Exception, source: str, hub: HubSource, revision: str) -> RQwen3Error:
    words = str(error)
    if isinstance(error, ValueError) and "onfig" in words:
        seen = " ".join(words.split())[:600]
        return SourceError(f"{hub.dataset}: configuration {hub.config!r} can't be used ({seen}). {_other(source)}")
    if "scripts are no longer supported" in words:
        return SourceError(f"{hub.dataset}: is a loader script ({first_line(error)}), not files. {_other(source)}")
    if type(error).__name__ in ("EmptyDatasetError", "DataFilesNotFoundError"):
        return SourceError(f"{hub.dataset}: holds no data files ({first_line(error)}). {_other(source)}")
    return explain(error, hub.dataset, revision)


def _of_sites(source: str, hub: HubSource, paths: list[str]) -> tuple[list[str], tuple[str, ...]]:
    if not hub.sites:
        return paths, ()
    there = {path.split("/")[-2] for path in paths if "/" in path}
    missing = tuple(site for site in hub.sites if site not in there)
    if len(missing) == len(hub.sites) or (missing and hub.sites_must_exist):
        near = difflib.get_close_matches(missing[0], sorted(there), n=3, cutoff=0.4) or sorted(there)[:3]
        raise SourceError(
            f"{hub.dataset}: has no folder of the site {missing[0]!r}; of its {len(there)} folders the nearest are "
            f"{', '.join(near)}. Correct [data.{source}.sites]."
        )
    return [path for path in paths if "/" in path and path.split("/")[-2] in hub.sites], missing


def _facts(pin: Pin, paths: list[str]) -> list[ListedFile]:
    from rqwen3_pipeline.corpus.patience import install

    install()
    from huggingface_hub import HfApi

    facts: dict[str, ListedFile] = {}
    try:
        for first in range(0, len(paths), PATHS_PER_REQUEST):
            part = paths[first : first + PATHS_PER_REQUEST]
            for item in HfApi().get_paths_info(pin.dataset, part, revision=pin.revision, repo_type="dataset"):
                lfs = getattr(item, "lfs", None)
                if lfs is not None:
                    facts[item.path] = ListedFile(path=item.path, size_bytes=int(lfs.size), sha256=str(lfs.sha256))
    except Exception as error:
        raise explain(error, pin.dataset, pin.revision) from error
    unknown = [path for path in paths if path not in facts]
    if unknown:
        raise SourceError(
            f"{pin.dataset}/{unknown[0]}: the Hub lists no SHA-256 of it, so it could not be verified. Download it by "
            "hand, and lock the folder: rqwen3 sources lock --folder DIR"
        )
    return [facts[path] for path in paths]
