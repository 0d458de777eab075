import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rqwen3_pipeline.cli import main
from rqwen3_pipeline.selfcheck import claims

CONFIG = str(Path(__file__).resolve().parents[2] / "configs" / "rqwen3_751m.toml")
REFERENCE = ("--micro-batch-size", "4", "--eager", "--head", "full", "--dropout", "0.1")


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", "--config", CONFIG, *arguments])


def test_plan_of_the_production_run_fits_and_says_all_it_should() -> None:
    result = plan("--gpu", "l40s", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    parts = found["parameters"]
    names = ("embedding", "attention", "feed_forward", "norms", "head")
    assert sum(parts[name] for name in names) == parts["total"] == 751_632_384
    assert found["flops"]["convention"] == "6·(N − embedding) + 12·L·H·hd·T"
    assert abs(found["flops"]["per_token"] / 4.985e9 - 1) < 1e-3
    on = found["gpus"]["l40s"]
    assert on["fits"]
    assert on["largest_micro_batch"]["recomputing"] > on["largest_micro_batch"]["this_trainer"] >= 8
    assert abs(on["mfu"]["0.4"]["tokens_per_s"] / 29_050 - 1) < 1e-3
    assert on["mfu"]["0.4"]["submissions"] == 6
    assert found["disk_bytes"]["checkpoints_kept"] == 13  # step 1,000, ten of 5,000, and two of the last three
    assert found["disk_bytes"]["shards"] == 4 * 13_107_200_000


@pytest.mark.parametrize(("limit", "submissions"), [("time_limit_s = 0", 1), ("", 1), ("time_limit_s = 43_200", 11)])
def test_plan_without_a_time_limit_is_of_one_submission(tmp_path: Path, limit: str, submissions: int) -> None:
    path = tmp_path / "run.toml"
    path.write_text(Path(CONFIG).read_text().replace("time_limit_s = 86400.0", limit))
    result = CliRunner().invoke(main, ["plan", "--config", str(path), "--gpu", "l40s", "--json"])
    assert json.loads(result.stdout)["gpus"]["l40s"]["mfu"]["0.4"]["submissions"] == submissions
    refused = CliRunner().invoke(main, ["plan", "--config", str(path), "--gpu", "4090", *REFERENCE])
    assert "What fits: " in refused.stderr


def test_plan_of_an_impossible_time_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(Path(CONFIG).read_text().replace("time_limit_s = 86400.0", "time_limit_s = -1"))
    result = CliRunner().invoke(main, ["plan", "--config", str(path)])
    assert result.exit_code == 2
    assert "submissions.time_limit_s = -1.0 must not be negative" in result.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--precision", "fp32", "--attention", "scores"), ("attention scores", "1.00 GiB asked")),
        (("--precision", "fp32"), ("gradient of the logits", "4.64 GiB asked")),
        ((), ("gradient of the logits", "4.64 GiB asked")),
    ],
)
def test_reference_runs_configurations_are_refused_with_what_would_fit(
    options: tuple[str, ...], named: tuple[str, str]
) -> None:
    result = plan("--gpu", "l40s", *REFERENCE, *options)
    assert result.exit_code == 2
    assert all(part in result.stderr for part in named)
    assert "compiled blocks: micro-batch 8 × accumulation 16" in result.stderr


def test_plan_without_a_gpu_lists_them_all_and_refuses_nothing() -> None:
    result = plan("--micro-batch-size", "32")
    assert result.exit_code == 0
    for name in ("l40s", "a100-40", "a100-80", "h100", "h200", "4090"):
        assert name in result.stdout
    assert "does not fit" in result.stdout


def test_unknown_gpu_is_refused_with_the_valid_ones() -> None:
    result = plan("--gpu", "k80")
    assert result.exit_code == 2
    assert "Valid: l40s, a100-40, a100-80, h100, h200, 4090" in result.stderr


def test_shape_that_nothing_can_hold_is_said_to_fit_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "big.toml"
    path.write_text(Path(CONFIG).read_text().replace("n_layer = 28", "n_layer = 280"))
    result = CliRunner().invoke(main, ["plan", "--config", str(path), "--gpu", "4090"])
    assert result.exit_code == 2
    assert "Nothing fits" in result.stderr


def test_plan_takes_a_second_and_no_torch() -> None:
    code = (
        "import sys; from rqwen3_pipeline.cli import main; "
        f"main(['plan', '--config', {CONFIG!r}], standalone_mode=False); "
        "print({'torch', 'dagster', 'numpy', 'transformers'} & set(sys.modules), file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_selfcheck_agrees_on_every_figure_and_tells() -> None:
    result = CliRunner().invoke(main, ["selfcheck"])
    assert result.exit_code == 0
    assert "751,632,384" in result.stdout
    assert f"{len(claims())} of {len(claims())} figures agree" in result.stdout


def test_selfcheck_with_a_wrong_figure_fails_and_marks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from rqwen3_pipeline import selfcheck

    monkeypatch.setattr(selfcheck, "PRODUCTION", dataclasses.replace(selfcheck.PRODUCTION, n_layer=27))
    result = CliRunner().invoke(main, ["selfcheck"])
    assert result.exit_code == 1
    assert "WRONG" in result.stdout
