import pytest

from model.errors import ConfigError
from rqwen3_pipeline.corpus.hub_sources import DEFAULTS, SITES, split_table
from rqwen3_pipeline.corpus.sources import corpus_config
from rqwen3_pipeline.settings import SOURCES

from .made import only, run_config


def test_every_source_has_a_data_set():
    assert set(DEFAULTS) == set(SOURCES)
    config = corpus_config(run_config())
    assert config.hub["fineweb_edu"].dataset == "HuggingFaceFW/fineweb-edu"
    assert config.hub["fineweb_edu"].config == "sample-100BT"
    assert config.hub["stackexchange"].sites == SITES
    assert config.hub["wikipedia"].sites == {}


def test_split_table_takes_the_hubs_keys_and_leaves_the_rest():
    hub, rest = split_table("pes2o", {"share": 2.0, "dataset": "a/b", "revision": "v1", "tokens_per_byte": 1})
    assert (hub.dataset, hub.revision, hub.tokens_per_byte) == ("a/b", "v1", 1.0)
    assert rest == {"share": 2.0}


def test_the_hubs_keys_make_nobody_filter_again():
    here = corpus_config(only("pes2o", {}, {}))
    there = corpus_config(only("pes2o", {"dataset": "a/b", "revision": "v1"}, {}))
    assert here.settings_for("filtered") == there.settings_for("filtered")


@pytest.mark.parametrize(
    ("source", "table", "said"),
    [
        ("pes2o", {"dataset": "nameonly"}, r"data\.pes2o\.dataset = 'nameonly' must be <owner>/<name>"),
        ("pes2o", {"dataset": "/b"}, r"must be <owner>/<name>"),
        ("pes2o", {"dataset": 3}, r"must be of type str"),
        ("pes2o", {"revision": ""}, r"revision must not be empty"),
        ("pes2o", {"tokens_per_byte": -0.1}, r"tokens_per_byte = -0\.1 must lie in"),
        ("pes2o", {"tokens_per_byte": float("nan")}, r"tokens_per_byte = nan must be a finite number"),
        ("pes2o", {"sites": {"x": 1}}, r"only stackexchange has sites"),
        ("stackexchange", {"sites": {}}, r"must be a table of weights"),
        ("stackexchange", {"sites": ["x"]}, r"must be a table of weights"),
        ("stackexchange", {"sites": {"x": 0}}, r"must be a number above 0"),
        ("stackexchange", {"sites": {"x": True}}, r"must be a number above 0"),
        ("stackexchange", {"sites": {"x": float("inf")}}, r"must be a number above 0"),
        ("stackexchange", 3, r"\[data\.stackexchange\] must be a table"),
    ],
)
def test_unusable_values_are_refused_by_name(source, table, said):
    with pytest.raises(ConfigError, match=said):
        split_table(source, table)


def test_budget_margin_below_one_is_refused():
    with pytest.raises(ConfigError, match="budget_margin"):
        corpus_config(run_config(budget_margin=0.9))
