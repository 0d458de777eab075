import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model import checkpoint, generate, huggingface, pretrain
from model.checkpoint import load_model
from model.files import sha256_file
from model.published import load_published

PROMPT = "the cat sees "


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    from conftest import CONFIG, TinyRun, write_corpus

    root = tmp_path_factory.mktemp("trained")
    write_corpus(root)
    (root / "tiny.toml").write_text(CONFIG)
    run = TinyRun(root)
    run.set(max_steps=5)
    assert pretrain.main(run.arguments()) == 0
    return run


def arguments(run, out: Path, *more: str) -> list[str]:
    return [
        *("--checkpoint", str(run.checkpoints / "final.pt"), "--config", str(run.config_path)),
        *("--tokenizer", str(run.root / "tokenizer.json"), "--out", str(out), *more),
    ]


def test_export_gives_transformers_the_same_logits_and_text(trained, tmp_path: Path, capsys) -> None:
    out = tmp_path / "export"
    assert huggingface.main(arguments(trained, out)) == 0
    ours = load_model(trained.checkpoints / "final.pt", trained.config.model)
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert theirs.config.rope_parameters["rope_theta"] == 1e6
    ids_BT = tokenizer(PROMPT, return_tensors="pt").input_ids
    mine = generate.load_tokenizer(trained.root / "tokenizer.json")
    assert ids_BT[0].tolist() == mine.encode(PROMPT).ids  # and no token is put in front
    with torch.no_grad():
        assert (theirs(ids_BT).logits - ours(ids_BT)).abs().max() < 1e-5
    new = theirs.generate(ids_BT, max_new_tokens=12)[0, ids_BT.shape[1] :]
    capsys.readouterr()
    options = [*arguments(trained, out)[:6], "--prompt", PROMPT, "--new-tokens", "12"]
    assert generate.main(options) == 0
    assert capsys.readouterr().out == PROMPT + tokenizer.decode(new, skip_special_tokens=True) + "\n"


def test_export_twice_is_the_same_and_anything_else_is_refused(trained, tmp_path: Path, capsys) -> None:
    out = tmp_path / "export"
    assert huggingface.main(arguments(trained, out)) == 0
    before = {path.name: (sha256_file(path), path.stat().st_mtime_ns) for path in out.iterdir()}
    assert huggingface.main(arguments(trained, out)) == 0
    assert {path.name: (sha256_file(path), path.stat().st_mtime_ns) for path in out.iterdir()} == before
    assert huggingface.main(arguments(trained, out, "--dtype", "bf16")) == 1
    assert "exists and is not this export (dtype)" in capsys.readouterr().err
    (out / "config.json").write_text("{}")
    assert huggingface.main(arguments(trained, out)) == 1
    assert "config.json" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    assert huggingface.main(arguments(trained, tmp_path / "other")) == 1
    assert [path.name for path in (tmp_path / "other").iterdir()] == []


def test_export_of_the_same_checkpoint_gives_the_same_bytes(trained, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert huggingface.main(arguments(trained, tmp_path / name)) == 0
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert set(names) == {
        "README.md",
        "config.json",
        "export.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6
    assert config["vocab_size"] == 272
    card = (tmp_path / "a" / "README.md").read_text()
    assert "272; 257" in card
    assert "36,032" in card
    assert (tmp_path / "a" / "model.safetensors").stat().st_mode & 0o044 == 0o044


def test_export_with_more_rows_than_ids_keeps_the_rows_and_samples_only_ids(trained, tmp_path: Path, capsys) -> None:
    out = tmp_path / "export"
    assert huggingface.main(arguments(trained, out)) == 0
    capsys.readouterr()
    model, tokenizer = load_published(out), AutoTokenizer.from_pretrained(out)
    assert (model.config.vocab_size, len(tokenizer)) == (272, 257)
    with torch.no_grad():
        model.lm_head.weight[257:] *= 1000  # rows without text, made as likely as can be
    sampling = generate.Sampling(new_tokens=40, temperature=30.0)
    new_ids = generate.generate(model, [1], len(tokenizer), 256, sampling)
    assert max(new_ids) < 257
    tokenizer.save_pretrained(tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again(PROMPT).input_ids == tokenizer(PROMPT).input_ids
    assert tokenizer.decode([256, 257, 271]) is not None  # an id without text does not crash the decoding
    record = json.loads((out / "export.json").read_text())
    assert record["tokenizer_ids"] == 257
    assert generate.main(["--weights", str(out), "--prompt", PROMPT, "--new-tokens", "5"]) == 0


def test_export_as_bf16_holds_the_rounded_weights(trained, tmp_path: Path) -> None:
    assert huggingface.main(arguments(trained, tmp_path / "b", "--dtype", "bf16")) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype="auto")
    ours = load_model(trained.checkpoints / "final.pt", trained.config.model)
    assert theirs.dtype == torch.bfloat16
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name].bfloat16()), name


@pytest.mark.parametrize(("line", "kind"), [("tie_embeddings = true", "qwen3"), ("qk_norm = false", "llama")])
def test_export_of_a_variant_is_read_as_that(trained, tmp_path: Path, line: str, kind: str) -> None:
    from model.config import load_run_config
    from model.rqwen3 import RQwen3

    config = tmp_path / "variant.toml"
    config.write_text(trained.config_path.read_text().replace("max_seq_len = 64", f"max_seq_len = 64\n{line}"))
    run = load_run_config(config)
    ours = RQwen3(run.model).eval()
    ours.initialise(3)
    state = dict.fromkeys(checkpoint.KEYS, 0) | {"model_state_dict": ours.state_dict()}
    checkpoint.save(tmp_path / "step_1.pt", state, {})
    huggingface.export(tmp_path / "step_1.pt", run, trained.root / "tokenizer.json", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert theirs.config.model_type == kind
    ids_BT = torch.arange(40).unsqueeze(0)
    with torch.no_grad():
        assert (theirs(ids_BT).logits - ours(ids_BT)).abs().max() < 1e-5


def test_export_of_a_damaged_checkpoint_is_refused_and_leaves_nothing(trained, tmp_path: Path, capsys) -> None:
    for suffix in (".pt", ".json"):
        shutil.copyfile((trained.checkpoints / "final.pt").with_suffix(suffix), tmp_path / f"final{suffix}")
    data = bytearray((tmp_path / "final.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "final.pt").write_bytes(bytes(data))
    options = arguments(trained, tmp_path / "out")
    options[1] = str(tmp_path / "final.pt")
    assert huggingface.main(options) == 1
    assert "it is damaged" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final.json", "final.pt"]
