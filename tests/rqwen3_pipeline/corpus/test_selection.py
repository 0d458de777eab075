import pytest

from model.errors import ConfigError
from rqwen3_pipeline.corpus.lock import lock_folder
from rqwen3_pipeline.corpus.selection import file_numbers, select_files, select_sources
from rqwen3_pipeline.settings import SOURCES


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("3", [3]), ("3-7", [3, 4, 5, 6, 7]), ("0, 3-4", [0, 3, 4]), ("2,1,1-2", [1, 2]), ("00007", [7]), ("5-5", [5])],
)
def test_file_numbers_are_read_in_every_form(text, numbers):
    assert file_numbers(text) == numbers


@pytest.mark.parametrize("text", ["", "a", "7-3", "-3", "3-", "1;2", "1.5"])
def test_file_numbers_of_anything_else_are_refused(text):
    with pytest.raises(ConfigError, match="--files"):
        file_numbers(text)


def test_sources_unknown_or_not_in_use_are_refused_with_the_valid_ones(config, one_source):
    assert select_sources(config, []) == list(SOURCES)
    assert select_sources(config, ["pes2o", "wikipedia"]) == ["wikipedia", "pes2o"]
    with pytest.raises(ConfigError, match=r"--source wiki: there is no such source. Valid: fineweb_edu, wikipedia"):
        select_sources(config, ["wiki"])
    reduced, _ = one_source("pes2o", [{"content": "x"}])
    with pytest.raises(ConfigError, match=r"--source wikipedia: the profile does not use it. Valid: pes2o\."):
        select_sources(reduced, ["wikipedia"])


def test_files_of_a_named_source_must_all_be_there(root, config, folder):
    lock = lock_folder(root, config, folder)
    assert select_files(config, lock, ["fineweb_edu"], "0-1") == [("fineweb_edu", "00000"), ("fineweb_edu", "00001")]
    with pytest.raises(ConfigError, match="fineweb_edu has 2 files, 0 to 1, no 2"):
        select_files(config, lock, ["fineweb_edu"], "1-3")


def test_files_without_a_named_source_are_those_that_each_has(root, config, folder):
    lock = lock_folder(root, config, folder)
    assert select_files(config, lock, [], "1-9") == [("fineweb_edu", "00001"), ("openwebmath", "00001")]
    assert len(select_files(config, lock, [], None)) == 8
    with pytest.raises(ConfigError, match="no source has such a file"):
        select_files(config, lock, [], "9")
