"""What the corpus is made of: the six sources, their columns, rules and shares, from `[data]`.

A rule's default stands here, beside its source; a TOML file overrides it. `settings_for` names the
settings that shape a stage's output and no others, so that a changed share does not make anybody
filter again. Costs nothing: plain tables and frozen dataclasses.
"""

import dataclasses
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, cast

from model.benchmarks import GROUPS as GROUPS_OF_BENCHMARKS
from model.benchmarks import members
from model.config import RunConfig, TrainConfig, naming_the_file
from model.config_build import build
from model.errors import ConfigError
from rqwen3_pipeline.corpus.hub_sources import HubSource, split_table
from rqwen3_pipeline.settings import SOURCES

STAGES = ("raw", "filtered", "digests", "survivors", "tokens", "manifest")
"""The stages in the order the data flows."""

QWEN3_SHA256 = "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"
"""SHA-256 of Qwen3's tokenizer.json."""

ORIGINS = ("python", "folder", "hub")
"""Where source files may come from."""

RULES_VERSION = {"raw": 1, "filtered": 2, "digests": 1, "survivors": 1, "tokenizer": 1, "tokens": 1, "manifest": 1}
"""Raised when the code of a stage changes what it writes; pieces of an older version are refused."""

GROUPS: dict[str, tuple[str, ...]] = {
    "wikipedia_fineweb_edu": ("wikipedia", "fineweb_edu"),
    "openwebmath": ("openwebmath",),
    "stackexchange": ("stackexchange",),
    "pes2o": ("pes2o",),
    "textbooks": ("textbooks",),
}
"""Sources that are deduplicated together; of equal documents the first source's copy stays."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Names of a source's columns. `id` and `url` are taken where a file has them."""

    text: str
    """Holds the document; `question` for StackExchange."""
    required: tuple[str, ...]
    """Without these a file is refused."""
    id: str = ""
    """Empty where the source has none: then `<file>#<row>` is the id."""
    url: str = ""
    """Empty where the source has none."""


COLUMNS = {
    "fineweb_edu": Columns(text="text", required=("text",), id="id", url="url"),
    "wikipedia": Columns(text="text", required=("text", "title"), id="id", url="url"),
    "openwebmath": Columns(text="text", required=("text",), url="url"),
    "stackexchange": Columns(text="question", required=("question", "answers"), id="qid", url="metadata"),
    "pes2o": Columns(text="content", required=("content",)),
    "textbooks": Columns(text="text", required=("text",)),
}
"""FineWeb-Edu's score column is required too; the configuration names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """One source: its share of the budget and the limits of its filter."""

    share: float
    """Part of the run's tokens, relative to the other sources' shares."""
    min_chars: int
    """Fewest code points of a document's NFC text."""
    max_chars: int = 0
    """Most code points; 0 for no limit."""
    min_score: float | None = None
    """Lowest score that is kept; FineWeb-Edu only."""
    score_column: str | None = None
    """The column that `min_score` looks at; FineWeb-Edu only."""


DEFAULTS: dict[str, dict[str, Any]] = {
    "fineweb_edu": {
        "share": 7.0,
        "min_chars": 100,
        "max_chars": 100_000,
        "min_score": 3.0,
        "score_column": "score",
    },
    "wikipedia": {"share": 2.0, "min_chars": 500},
    "openwebmath": {"share": 1.5, "min_chars": 200},
    "stackexchange": {"share": 1.0, "min_chars": 100},
    "pes2o": {"share": 1.0, "min_chars": 1000},
    "textbooks": {"share": 0.5, "min_chars": 100},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """Where the tokenizer comes from."""

    kind: str = "pinned"
    """`pinned`: a given tokenizer.json, known by its hash; `train`: made from the filtered documents."""
    vocab_size: int | None = None
    """Ids of the tokenizer to train, the end-of-text id included; `train` only."""
    sha256: str | None = None
    """SHA-256 of the tokenizer.json; `pinned` only, Qwen3's by default."""

    def __post_init__(self) -> None:
        if self.kind == "train":
            if self.vocab_size is None or self.vocab_size < 257:
                raise ConfigError(
                    f"data.tokenizer.vocab_size = {self.vocab_size}: training a tokenizer needs at least 257 ids "
                    "(256 bytes and the end-of-text token). Set vocab_size."
                )
            if self.sha256 is not None:
                raise ConfigError('data.tokenizer.sha256 belongs to kind = "pinned"; leave it out to train one')
        elif self.kind == "pinned":
            if self.vocab_size is not None:
                raise ConfigError('data.tokenizer.vocab_size belongs to kind = "train"; a pinned file has its own')
        else:
            raise ConfigError(f"data.tokenizer.kind = {self.kind!r} is none of pinned, train")

    @property
    def pinned_sha256(self) -> str:
        """The hash a pinned tokenizer must have."""
        return self.sha256 or QWEN3_SHA256


@dataclass(frozen=True, kw_only=True, slots=True)
class DecontaminationConfig:
    """Whether documents that hold benchmark questions are removed."""

    enabled: bool = False
    """Remove them, with the reason `contaminated`; else they are only counted."""
    benchmarks: tuple[str, ...] = GROUPS_OF_BENCHMARKS
    """Whose questions."""

    def __post_init__(self) -> None:
        if not self.benchmarks:
            raise ConfigError("data.decontamination.benchmarks is empty. Name some, or leave it out for all.")
        for name in self.benchmarks:
            members(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class _DataSection:
    origin: str = "hub"
    """`hub`, `folder`, or `python` for the demo's prose from the Python installation."""
    heldout_one_in: int = 1000
    """One of so many documents is held out, by its digest."""
    shard_max_tokens: int = 250_000_000
    """A shard is closed before the document that would take it above this."""
    min_share_kept: float = 0.01
    """A source of which the filter keeps less than this share of the rows is refused."""
    oracle_documents: int = 20
    """Documents per partition that the reference tokenizer encodes again, 0.1 % if that is more."""
    lock_seed: int = 1234
    """Order of a source's files in the lock."""
    budget_margin: float = 1.15
    """From the Hub so many times the tokens that a source needs are locked, since the yield is an estimate."""
    allow_repeats: bool = False
    """Whether the run may read documents again where a source does not fill its budget; else that is refused."""

    def __post_init__(self) -> None:
        for name, least in (("heldout_one_in", 2), ("shard_max_tokens", 1), ("oracle_documents", 1), ("lock_seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"data.{name} = {getattr(self, name)} must be at least {least}")
        if self.origin not in ORIGINS:
            raise ConfigError(f"data.origin = {self.origin!r} is none of {', '.join(ORIGINS)}")
        if not 0.0 < self.min_share_kept <= 1.0:
            raise ConfigError(f"data.min_share_kept = {self.min_share_kept} must lie in (0, 1]")
        if not 1.0 <= self.budget_margin <= 100.0:
            raise ConfigError(f"data.budget_margin = {self.budget_margin} must lie in [1, 100]")


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusConfig:
    """All that shapes the corpus."""

    sources: dict[str, SourceConfig]
    """By name, in the manifest's order."""
    tokenizer: TokenizerConfig
    """Where the tokenizer comes from."""
    embedding_rows: int
    """`model.vocab_size`: every token id must be below it."""
    data: _DataSection = field(default_factory=_DataSection)
    """The plain keys of `[data]`."""
    decontamination: DecontaminationConfig = field(default_factory=DecontaminationConfig)
    """Whether benchmark questions are removed."""
    hub: dict[str, HubSource] = field(default_factory=dict[str, HubSource])
    """Where each source lives on the Hub."""

    @property
    def origin(self) -> str:
        """Where the source files come from: one of `ORIGINS`."""
        return self.data.origin

    @property
    def heldout_one_in(self) -> int:
        """One of so many documents is held out."""
        return self.data.heldout_one_in

    @property
    def shard_max_tokens(self) -> int:
        """Most tokens of a shard, unless a single document has more."""
        return self.data.shard_max_tokens

    @property
    def min_share_kept(self) -> float:
        """Smallest share of its rows that a source may keep."""
        return self.data.min_share_kept

    @property
    def oracle_documents(self) -> int:
        """Fewest documents per partition that are encoded a second time."""
        return self.data.oracle_documents

    @property
    def lock_seed(self) -> int:
        """Seed of the order of files."""
        return self.data.lock_seed

    def groups(self) -> dict[str, tuple[str, ...]]:
        """The groups of deduplication, reduced to the sources in use."""
        used = {name: tuple(s for s in members if s in self.sources) for name, members in GROUPS.items()}
        return {name: members for name, members in used.items() if members}

    def group_of(self, source: str) -> str:
        """The group that deduplicates `source`."""
        return next(name for name, members in GROUPS.items() if source in members)

    def settings_for(self, stage: str, source: str | None = None) -> dict[str, Any]:
        """The settings that shape a stage's output, fit for hashing.

        Args:
            stage: one of `STAGES`, or `tokenizer`.
            source: for `filtered`, the source; None gives all of them, by name.
        """
        settings: dict[str, Any] = {"rules": RULES_VERSION[stage]}
        if stage == "filtered":
            names = list(self.sources) if source is None else [source]
            limits = {name: _limits(self.sources[name]) for name in names}
            if self.decontamination.enabled:  # which rows are looked for is an input, not a setting
                settings["decontamination"] = list(self.decontamination.benchmarks)
            return settings | (limits if source is None else limits[source])
        if stage == "tokenizer":
            tokenizer = self.tokenizer
            settings["kind"] = tokenizer.kind
            if tokenizer.kind == "pinned":
                return settings | {"sha256": tokenizer.pinned_sha256}
            shares = {name: item.share for name, item in self.sources.items()}
            return settings | {
                "vocab_size": tokenizer.vocab_size,
                "heldout_one_in": self.heldout_one_in,
                "shares": shares,
            }
        if stage == "tokens":
            return settings | {"heldout_one_in": self.heldout_one_in, "shard_max_tokens": self.shard_max_tokens}
        if stage == "manifest":
            return settings | {
                "shares": {name: item.share for name, item in self.sources.items()},
                "min_share_kept": self.min_share_kept,
                "oracle_documents": self.oracle_documents,
                "lock_seed": self.lock_seed,
            }
        return settings


def _limits(source: SourceConfig) -> dict[str, Any]:
    values = dataclasses.asdict(source)
    del values["share"]
    return {key: value for key, value in values.items() if value is not None}


@naming_the_file
def corpus_config(run: RunConfig) -> CorpusConfig:
    """Parse the section `[data]` of a run.

    Without any source's table all six are used, with the defaults; else exactly those that have one.

    Raises:
        ConfigError: a key or a source is unknown (the valid ones are listed), or a value unusable.
    """
    data: Any = run.sections.get("data", {})
    if not isinstance(data, dict):
        raise ConfigError(f"[data] must be a table, not {data!r}")
    table = cast(dict[str, Any], data)
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    tables: dict[str, Any] = {key: table[key] for key in table if key not in plain}
    tokenizer = build(TokenizerConfig, tables.pop("tokenizer", {}), "data.tokenizer")
    cleaning = build(DecontaminationConfig, tables.pop("decontamination", {}), "data.decontamination")
    unknown = [name for name in tables if name not in SOURCES]
    if unknown:
        raise ConfigError(
            f"[data.{unknown[0]}] is no source. Valid: {', '.join(SOURCES)}; and the tables tokenizer, decontamination."
        )
    named: dict[str, Any] = tables or {name: {} for name in SOURCES}
    split = {name: split_table(name, named[name]) for name in SOURCES if name in named}
    return CorpusConfig(
        sources={name: _source(name, rest) for name, (_, rest) in split.items()},
        hub={name: hub for name, (hub, _) in split.items()},
        tokenizer=tokenizer,
        decontamination=cleaning,
        embedding_rows=run.model.vocab_size,
        data=build(_DataSection, plain, "data"),
    )


def _source(name: str, values: Any) -> SourceConfig:
    where = f"data.{name}"
    for key in ("min_score", "score_column"):
        if key in values and name != "fineweb_edu":
            raise ConfigError(f"{where}.{key}: only fineweb_edu has a score. Remove it.")
    source = build(SourceConfig, DEFAULTS[name] | values, where)
    if source.score_column == "int_score":
        raise ConfigError(
            f'{where}.score_column = "int_score" is the score rounded, so a least score of 3 would let 2.5 pass. '
            'Write "score", or leave the key out.'
        )
    if not source.share > 0.0:
        raise ConfigError(f"{where}.share = {source.share} must be above 0; to leave a source out, remove its table")
    if source.min_chars < 0 or source.max_chars < 0:
        raise ConfigError(f"{where}: min_chars and max_chars must not be negative")
    if 0 < source.max_chars < source.min_chars:
        raise ConfigError(f"{where}.max_chars = {source.max_chars} is below min_chars = {source.min_chars}")
    return source


def required_columns(config: CorpusConfig, source: str) -> tuple[str, ...]:
    """Columns without which a file of `source` is refused."""
    score = config.sources[source].score_column
    return COLUMNS[source].required + ((score,) if score else ())


def budgets(config: CorpusConfig, training: TrainConfig) -> dict[str, int]:
    """Tokens that the run wants of each source: its share of all steps, and one window more.

    The window more makes up for the tail of each source that fills none, so that the windows of all
    sources together reach `max_steps` steps.
    """
    run_tokens = training.max_steps * training.tokens_per_step
    shares = {name: Fraction(str(source.share)) for name, source in config.sources.items()}
    whole = sum(shares.values())
    return {name: -(-(run_tokens * share) // whole) + training.seq_len + 1 for name, share in shares.items()}
