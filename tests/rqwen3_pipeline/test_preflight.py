"""Each check turns red by its own fault, and a red preflight says so where it is looked for."""

import dataclasses

import pytest

from model.errors import EXIT_CODES, ConfigError
from rqwen3_pipeline import preflight
from rqwen3_pipeline.preflight import Asked, PreflightError, preflight_problem, run_preflight
from rqwen3_pipeline.slurm.client import Slurm
from rqwen3_pipeline.slurm.cluster import Cluster
from tests.rqwen3_pipeline.slurm.fake import calls, programs


@pytest.fixture
def asked(corpus_run) -> Asked:
    """Everything but the dry step, which has tests of its own."""
    return Asked(root=corpus_run.root, run=corpus_run.run, config_path=corpus_run.config_path, here=False)


def red(asked: Asked) -> str:
    with pytest.raises(PreflightError) as caught:
        run_preflight(asked)
    assert preflight_problem(asked.folder) == str(caught.value)
    return str(caught.value)


def shard_of(asked: Asked):
    return asked.root.path / asked.manifest.shards[0].path


def test_preflight_of_a_sound_run_is_green_and_names_every_check(asked):
    assert "has not run" in str(preflight_problem(asked.folder))
    report = run_preflight(asked)
    assert preflight_problem(asked.folder) is None
    assert [check["check"] for check in report["checks"]] == [
        *(function.__name__ for function in preflight.CHECKS),
        "dry_step",
    ]
    assert report["tokens"] == sum(shard.tokens_used for shard in asked.manifest.shards)


def test_preflight_takes_the_dry_step_of_the_real_trainer(corpus_run):
    report = run_preflight(Asked(root=corpus_run.root, run=corpus_run.run, config_path=corpus_run.config_path))
    assert report["step_s"] > 0
    assert report["checkpoint_bytes"] > 0


def wanting(asked: Asked, max_steps: int, **data: object) -> Asked:
    """The same, by a run of other steps and keys of [data]."""
    training = dataclasses.replace(asked.run.training, max_steps=max_steps)
    sections = asked.run.sections | {"data": asked.run.sections["data"] | data}
    return dataclasses.replace(asked, run=dataclasses.replace(asked.run, training=training, sections=sections))


@pytest.mark.parametrize(
    ("max_steps", "data", "expected"),
    [
        (2000, {"allow_repeats": False}, "tokens of fineweb_edu, the configuration wants "),
        (200, {"heldout_one_in": 9}, "heldout_one_in = 8, the configuration gives 9"),
        (200, {"allow_repeats": False}, "wikipedia: the run wants 7,713 tokens, the corpus has"),
    ],
)
def test_preflight_of_a_run_that_wants_another_corpus_is_red(asked, max_steps, data, expected):
    said = red(wanting(asked, max_steps, **data))
    assert said.startswith("corpus: ")
    assert expected in said


@pytest.mark.parametrize(("max_steps", "repeats"), [(60, False), (2000, True)])
def test_preflight_of_a_run_that_wants_less_or_may_read_again_is_green(asked, max_steps, repeats):
    assert run_preflight(wanting(asked, max_steps, allow_repeats=repeats))["passed"]


def test_preflight_with_a_short_shard_is_red(asked):
    path = shard_of(asked)
    path.write_bytes(path.read_bytes()[:-4])
    assert "shard_sizes: " in red(asked)


def test_preflight_with_a_shard_altered_by_one_byte_is_red(asked):
    path = shard_of(asked)
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    said = red(asked)
    assert said.startswith("shard_hashes: ")
    assert str(path) in said


def test_preflight_hashes_the_shards_of_a_manifest_once(asked, monkeypatch):
    run_preflight(asked)
    monkeypatch.setattr(preflight, "sha256_file", lambda path: pytest.fail("hashed again"))
    assert "read before" in str(run_preflight(asked)["checks"])


def test_preflight_with_a_vocabulary_smaller_than_the_tokenizers_is_red(asked):
    model = dataclasses.replace(asked.run.model, vocab_size=asked.manifest.vocab_size - 1)
    assert "tokenizer_fits: " in red(dataclasses.replace(asked, run=dataclasses.replace(asked.run, model=model)))


def test_preflight_of_a_step_that_does_not_fit_the_gpu_is_red_and_a_gpu_nobody_knows_too(asked):
    training = dataclasses.replace(asked.run.training, micro_batch_size=40_000_000, accumulation=1)
    big = dataclasses.replace(asked, run=dataclasses.replace(asked.run, training=training), gpu="l40s")
    assert "memory_plan: micro-batch 40000000" in red(big)
    assert "memory_plan: " in red(dataclasses.replace(asked, gpu="abacus"))
    with pytest.raises(ConfigError):
        preflight.memory_plan(dataclasses.replace(asked, gpu="abacus"))


def test_preflight_without_room_for_the_checkpoints_is_red(asked):
    training = dataclasses.replace(asked.run.training, keep_last=10**10)
    full = dataclasses.replace(asked, run=dataclasses.replace(asked.run, training=training))
    assert "free_space: " in red(full)
    with pytest.raises(PreflightError) as caught:
        run_preflight(full)
    assert caught.value.code == EXIT_CODES["disk_full"]


def test_preflight_whose_dry_step_fails_says_why_on_its_first_line_and_by_its_code(corpus_run):
    training = dataclasses.replace(corpus_run.run.training, device="cuda")
    corpus_run.config_path.write_text(corpus_run.config_path.read_text() + '\ndevice = "cuda"\n')
    run = dataclasses.replace(corpus_run.run, training=training)
    with pytest.raises(PreflightError) as caught:
        run_preflight(Asked(root=corpus_run.root, run=run, config_path=corpus_run.config_path))
    first = str(caught.value).splitlines()[0]
    assert first.startswith("dry_step: python -m model.pretrain ended with exit code 2: training.device = 'cuda'")
    assert caught.value.code == 2


def test_preflight_with_several_faults_names_them_all_and_takes_no_dry_step(asked):
    shard_of(asked).unlink()
    said = red(dataclasses.replace(asked, gpu="abacus", here=True))
    assert "shard_sizes: " in said
    assert "memory_plan: " in said
    assert not (asked.folder / "dry_step.json").exists()


def test_preflight_that_was_red_and_is_mended_turns_green(asked):
    path = shard_of(asked)
    content = path.read_bytes()
    path.write_bytes(content[:-4])
    red(asked)
    path.write_bytes(content)
    run_preflight(asked)
    assert preflight_problem(asked.folder) is None


@pytest.mark.parametrize(
    ("answer", "red_by", "said"),
    [
        ({"err": "sbatch: Job 3 to start at 2026-03-01T10:00:00\n"}, False, "to start at 2026-03-01"),
        ({"err": "sbatch: error: Unable to contact slurm controller\n", "rc": 1}, False, "could not be asked"),
        ({"err": "allocation failure: Invalid qos specification\n", "rc": 1}, True, "Invalid qos specification"),
    ],
)
def test_preflight_asks_slurm_whether_it_would_take_such_a_job(asked, tmp_path, answer, red_by, said):
    folder = programs(tmp_path / "bin", sbatch=answer)
    site = Cluster(kinds={"gpu": {"qos": "gpu-long", "time": "00:02:00"}})
    asked = dataclasses.replace(asked, cluster=site, slurm=Slurm())
    told = red(asked) if red_by else str(run_preflight(asked)["checks"])
    assert said in told
    assert ("qos=gpu-long" in told) is red_by
    (call,) = calls(folder)
    assert {"--test-only", "--qos=gpu-long", "--signal=B:USR1@40"} <= set(call["argv"])
