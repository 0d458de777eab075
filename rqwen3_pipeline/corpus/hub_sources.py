"""Where each source lives on the Hugging Face Hub: data set, configuration, revision, sites.

The defaults stand here; `[data.<source>]` of a profile overrides them key by key. StackExchange's
sites are folders of its data set, and their weights say how its budget is spent among them. Costs
nothing: plain tables.
"""

import math
from dataclasses import dataclass, field
from typing import Any, cast

from model.config_build import build
from model.errors import ConfigError

SITES = {
    "stackoverflow.com": 6.0,
    "math.stackexchange.com": 4.0,
    "stats.stackexchange.com": 2.0,
    "physics.stackexchange.com": 2.0,
    "cs.stackexchange.com": 1.0,
    "softwareengineering.stackexchange.com": 1.0,
    "unix.stackexchange.com": 1.0,
    "datascience.stackexchange.com": 1.0,
    "mathoverflow.net": 1.0,
    "chemistry.stackexchange.com": 1.0,
    "biology.stackexchange.com": 1.0,
    "economics.stackexchange.com": 1.0,
    "philosophy.stackexchange.com": 1.0,
    "psychology.stackexchange.com": 1.0,
    "cogsci.stackexchange.com": 1.0,
    "academia.stackexchange.com": 1.0,
    "english.stackexchange.com": 1.0,
}
"""Default weights: half of the budget on programming and mathematics, the rest on the sciences, psychology and
language. Psychology stands here under both names that it has had. A default site that the data set lacks is left
out, and the lock says so; one that a profile names must be there."""

DEFAULTS: dict[str, dict[str, str]] = {
    "fineweb_edu": {"dataset": "HuggingFaceFW/fineweb-edu", "config": "sample-100BT"},
    "wikipedia": {"dataset": "wikimedia/wikipedia", "config": "20231101.en"},
    "openwebmath": {"dataset": "open-web-math/open-web-math"},
    "stackexchange": {"dataset": "HuggingFaceH4/stack-exchange-preferences"},
    "pes2o": {"dataset": "MaLA-LM/peS2o-final"},
    "textbooks": {"dataset": "HuggingFaceTB/cosmopedia", "config": "stanford"},
}
"""FineWeb-Edu's 10BT sample was cut by the rounded score and may not fill 7 B tokens at score 3.0: hence 100BT."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HubSource:
    """One source on the Hub."""

    dataset: str
    """`<owner>/<name>`."""
    config: str = ""
    """A configuration that the data set's card names; empty where it has a single one."""
    revision: str = "main"
    """A branch, tag or commit; the lock pins the commit that it stands for."""
    tokens_per_byte: float = 0.0
    """Tokens that a byte of the parquet files yields after the filter; 0 to measure it on the first files."""
    sites: dict[str, float] = field(default_factory=dict[str, float])
    """StackExchange only: folders that are read, with their weights."""
    sites_must_exist: bool = False
    """Whether the profile named the sites itself."""


def split_table(name: str, values: Any) -> tuple[HubSource, Any]:
    """Take the Hub's keys out of a `[data.<source>]` table.

    Returns:
        The source on the Hub, and the rest of the table.

    Raises:
        ConfigError: a value is of a wrong type, or not usable.
    """
    where = f"data.{name}"
    if not isinstance(values, dict):
        raise ConfigError(f"[{where}] must be a table, not {values!r}")
    table = cast(dict[str, Any], values)
    own = {key: table[key] for key in ("dataset", "config", "revision", "tokens_per_byte") if key in table}
    rest = {key: value for key, value in table.items() if key not in own and key != "sites"}
    plain = build(HubSource, DEFAULTS[name] | own, where)
    if plain.dataset.count("/") != 1 or not all(plain.dataset.split("/")):
        raise ConfigError(f"{where}.dataset = {plain.dataset!r} must be <owner>/<name>, as on the Hub")
    if not plain.revision:
        raise ConfigError(f'{where}.revision must not be empty; "main" is the newest')
    if not 0.0 <= plain.tokens_per_byte < 100.0:
        raise ConfigError(f"{where}.tokens_per_byte = {plain.tokens_per_byte} must lie in [0, 100)")
    given = table.get("sites")
    return HubSource(
        dataset=plain.dataset,
        config=plain.config,
        revision=plain.revision,
        tokens_per_byte=plain.tokens_per_byte,
        sites=_sites(name, given),
        sites_must_exist=given is not None,
    ), rest


def _sites(name: str, given: Any) -> dict[str, float]:
    where = f"data.{name}.sites"
    if given is None:
        return dict(SITES) if name == "stackexchange" else {}
    if name != "stackexchange":
        raise ConfigError(f"{where}: only stackexchange has sites. Remove it.")
    if not isinstance(given, dict) or not given:
        raise ConfigError(f'{where} must be a table of weights, as "math.stackexchange.com" = 2.0, not {given!r}')
    weights: dict[str, float] = {}
    for site, weight in cast(dict[str, Any], given).items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0.0 < weight < math.inf:
            raise ConfigError(f"{where}.{site!r} = {weight!r} must be a number above 0; leave a site out by its name")
        weights[site] = float(weight)
    return weights
