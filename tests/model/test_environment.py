"""The record of what a submission ran on."""

import pytest
import torch

from model.environment import write_environment
from model.metrics import Attempt


@pytest.fixture
def threads():
    """Sets the number of threads; the old one is back after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_other_number_of_threads_than_the_submission_before_is_told_on_a_cpu(tmp_path, capsys, threads):
    for number, count in ((1, 2), (2, 2), (3, 1)):
        threads(count)
        write_environment(tmp_path, Attempt(submission=number, attempt=1), torch.device("cpu"))
        assert ("last bits differ" in capsys.readouterr().err) is (count == 1)


def test_damaged_record_of_the_submission_before_stops_nothing(tmp_path, capsys, threads):
    threads(1)
    (tmp_path / "environments").mkdir()
    (tmp_path / "environments" / "01-a1.json").write_text("{")
    write_environment(tmp_path, Attempt(submission=2, attempt=1), torch.device("cpu"))
    assert capsys.readouterr().err == ""
