from rqwen3_pipeline.progress import Progress


def test_progress_in_a_log_is_plain_lines_at_each_tenth(capsys):
    with Progress("filtered wikipedia", 100, "files") as progress:
        for _ in range(100):
            progress.advance()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("  filtered wikipedia: 100/100 files")
    assert not any("\r" in line for line in lines)


def test_progress_over_nothing_says_nothing_and_does_not_divide_by_zero(capsys):
    with Progress("empty", 0):
        pass
    assert capsys.readouterr().err == ""
