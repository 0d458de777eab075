"""The code location as a whole: it loads, quickly and without the heavy packages, and its names stay."""

import subprocess
import sys
import tomllib
from pathlib import Path

import dagster as dg
import pytest

from rqwen3_pipeline.definitions import assets, by_file, defs, jobs
from rqwen3_pipeline.launcher import SlurmRunLauncher
from rqwen3_pipeline.settings import SOURCES, shipped
from rqwen3_pipeline.slurm.cluster import KINDS, wish
from rqwen3_pipeline.slurm.parsing import duration_s

GROUPS = (
    *("sources", "raw_files", "filtered_documents", "digests", "survivors", "token_shards"),
    *("manifest", "training", "results"),
)
"""Collapsed, the groups read as the design draws the flow."""
ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "datasets", "transformers", "pandas", "lm_eval")


def modules_after(statement: str) -> set[str]:
    code = f"import sys, warnings; warnings.simplefilter('ignore')\n{statement}\nprint('MODULES', *sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in output.splitlines() if line.startswith("MODULES ")]
    return set(line.split())


def test_every_module_of_the_model_is_of_the_ground_floor_or_kept_from_the_pipeline():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    listed = {name for contract in contracts for name in contract.get("protected_modules", [])}
    listed |= {name for contract in contracts for name in contract.get("source_modules", [])}
    modules = {f"model.{path.stem}" for path in (ROOT / "model").iterdir() if not path.name.startswith("__")}
    assert modules - listed == set()


@pytest.mark.parametrize(
    "statement",
    [
        "import rqwen3_pipeline.definitions",
        "from rqwen3_pipeline.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
    ],
    ids=["definitions", "help"],
)
def test_loading_pulls_in_no_heavy_package(statement):
    loaded = modules_after(statement)
    assert not loaded & set(HEAVY)
    assert "rqwen3_pipeline" in loaded


def test_help_does_not_even_import_dagster():
    assert "dagster" not in modules_after(
        "from rqwen3_pipeline.cli import main\ntry: main(['-h'])\nexcept SystemExit: pass"
    )


def test_loading_costs_less_than_two_seconds_beyond_dagster():
    code = (
        "import time, warnings; warnings.simplefilter('ignore')\nimport dagster\nt = time.process_time()\n"
        "import rqwen3_pipeline.definitions\nprint(time.process_time() - t)"
    )
    cpu_s = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert cpu_s < 2.0


def test_definitions_are_loadable_as_a_whole():
    dg.Definitions.validate_loadable(defs)


def test_asset_keys_are_the_contract():
    expected = {
        "source_lock",
        "tokenizer",
        "manifest",
        "preflight",
        "submissions",
        "final_checkpoint",
        "comparison",
        "submission_scores",
    }
    expected |= {"export", "eval_scores", "evidence_report"}
    expected |= {
        f"{name}/{s}" for s in SOURCES for name in ("raw_files", "filtered_documents", "digests", "token_shards")
    }
    groups = ("wikipedia_fineweb_edu", "openwebmath", "stackexchange", "pes2o", "textbooks")
    expected |= {f"survivors/{group}" for group in groups}
    assert {asset.key.to_user_string() for asset in assets} == expected


def test_each_partitioned_step_has_a_job_of_its_own():
    names = {job.name for job in jobs}
    assert {"_".join(asset.key.path) for asset in by_file} <= names
    assert {"train_submission", "lock_sources", "find_survivors", "fold_manifest", "report_results"} <= names


def test_graph_reads_as_the_design_draws_it():
    graph = defs.resolve_asset_graph()

    def parents(name: str) -> set[str]:
        return {key.to_user_string() for key in graph.get(dg.AssetKey(name.split("/"))).parent_keys}

    assert parents("raw_files/pes2o") == {"source_lock"}
    assert parents("filtered_documents/pes2o") == {"raw_files/pes2o"}
    assert parents("digests/pes2o") == {"filtered_documents/pes2o"}
    assert parents("survivors/wikipedia_fineweb_edu") == {"digests/wikipedia", "digests/fineweb_edu"}
    assert parents("token_shards/fineweb_edu") == {
        "filtered_documents/fineweb_edu",
        "survivors/wikipedia_fineweb_edu",
        "tokenizer",
    }
    assert parents("manifest") == {f"token_shards/{source}" for source in SOURCES}
    assert parents("preflight") == {"manifest"}
    assert parents("submissions") == {"preflight"}
    assert parents("final_checkpoint") == {"submissions"}
    assert parents("evidence_report") == {"eval_scores", "export"}


def test_every_asset_has_a_description_group_owner_and_kind():
    for asset in assets:
        spec = next(iter(asset.specs))
        assert spec.description, spec.key
        assert spec.group_name in GROUPS
        assert list(spec.owners) == ["team:rqwen3"]
        assert spec.kinds
        assert spec.code_version


@pytest.mark.parametrize("site", sorted(shipped("sbatch/clusters").glob("*.toml")), ids=lambda path: path.stem)
def test_each_job_is_one_slurm_job_of_the_time_that_a_shipped_site_gives_its_jobs(site, tmp_path):
    launcher = SlurmRunLauncher(home=str(tmp_path), cluster=str(site))
    known = launcher.site()
    longest = {duration_s(known.options(kind).get("time", "0")) for kind in KINDS}
    with dg.DagsterInstance.ephemeral() as instance:
        launcher.register_instance(instance)
        for job in jobs:
            run = instance.create_run_for_job(defs.resolve_job_def(job.name))
            wanted = wish(launcher._step_tags(run), run.tags, known)
            assert wanted.local or duration_s(wanted.options["time"]) in longest, job.name
            needs_internet = job.name in ("lock_sources", "train_or_pin_tokenizer") or job.name.startswith("raw_files_")
            assert wanted.local == (needs_internet and known.options("transfer").get("where") == "local"), job.name


def test_back_fill_puts_no_assets_of_two_kinds_of_job_into_one_run():
    kinds = {asset.key: asset.op.tags["slurm/kind"] for asset in by_file}
    nodes = {key: defs.resolve_asset_graph().get(key) for key in kinds}
    fed = [(key, parent) for key, node in nodes.items() for parent in node.parent_keys & kinds.keys()]
    assert {kinds[key] == kinds[parent] for key, parent in fed} == {True, False}
    for key, parent in fed:  # those of one policy are made in the same run
        assert (nodes[key].backfill_policy == nodes[parent].backfill_policy) == (kinds[key] == kinds[parent])
