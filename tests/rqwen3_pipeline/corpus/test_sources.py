import pytest

from model.errors import ConfigError
from rqwen3_pipeline.corpus.sources import corpus_config, required_columns

from .made import run_config


def test_rounded_score_is_refused_and_any_other_column_taken():
    with pytest.raises(ConfigError, match=r'data\.fineweb_edu\.score_column = "int_score" is the score rounded'):
        corpus_config(run_config(fineweb_edu={"score_column": "int_score"}))
    config = corpus_config(run_config(fineweb_edu={"score_column": "quality"}))
    assert required_columns(config, "fineweb_edu") == ("text", "quality")


@pytest.mark.parametrize("key", ["min_score", "score_column"])
def test_score_of_a_source_that_has_none_is_refused(key):
    with pytest.raises(ConfigError, match=f"data.pes2o.{key}: only fineweb_edu has a score"):
        corpus_config(run_config(pes2o={key: "int_score"}))
