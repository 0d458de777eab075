"""What `rqwen3 experiment status` says before there is an instance, an attempt, or anything at all."""

import json

from model.files import write_json
from rqwen3_pipeline.experiment_commands import show
from rqwen3_pipeline.settings import Settings


def next_of(sample, capsys) -> tuple[str, str]:
    show(Settings(profile=str(sample.config_path), home=sample.root.path), None, as_json=True)
    step = json.loads(capsys.readouterr().out)["next"]
    return step["action"], step["reason"]


def test_show_of_an_empty_root_names_the_lock_and_its_command(empty_run, capsys):
    action, reason = next_of(empty_run, capsys)
    assert action == "stop"
    assert reason.startswith(f"{empty_run.root.lock} is not there")
    assert reason.endswith("rqwen3 sources lock")


def test_show_goes_through_corpus_and_preflight_to_the_first_submission(corpus_run, capsys):
    manifest = corpus_run.root.manifest.read_bytes()
    corpus_run.root.manifest.unlink()
    assert next_of(corpus_run, capsys)[1].endswith("the corpus is not made yet. The next step is in: rqwen3 status")
    corpus_run.root.manifest.write_bytes(manifest)
    assert next_of(corpus_run, capsys)[1].startswith("preflight: it has not run. Materialize preflight in the UI")
    write_json(corpus_run.folder / "preflight.json", {"passed": True})
    corpus_run.root.lock.unlink()  # a corpus that came from elsewhere
    assert next_of(corpus_run, capsys) == ("submit", "the first submission")
