"""Fitting a `linear` fuser: planted maps are found, one model between its two roles is itself, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import transformers

from tests import tiny as real
from tests.workers.tiny import tiny, tiny_pair
from workers.errors import LoadFailed
from workers.fit_linear import Fitted, Progress, Recipe, encoded, fit, turns_plainly
from workers.greedy import answers, read
from workers.loader import Loaded, kv_shape

RECIPE = Recipe(tokens=1500, scout=400, held_out=200)
RESTS = [[5, 9, 2], [1], [30, 31, 32, 33]]


def stream(texts: int = 80, tokens: int = 48, seed: int = 0) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(texts):
        yield torch.randint(1, 38, (tokens,), generator=generator).tolist()


def planted(model: Loaded, seed: int = 0) -> tuple[Loaded, torch.Tensor]:
    """The same function with other KV: each head's values through a random matrix, which its output takes back, and
    its keys scaled and turned in their planes, as its queries are the other way. Also the maps of V, by layer.
    """
    twin = copy.deepcopy(model.model)
    generator = torch.Generator().manual_seed(seed)
    heads, size, width = model.shape.heads, model.shape.head_size, model.model.config.hidden_size
    asking = model.model.config.num_attention_heads // heads
    maps = torch.eye(size) + 0.3 * torch.randn(model.shape.layers, heads, size, size, generator=generator)
    for layer, mine in zip(twin.model.layers, maps, strict=True):
        attention = layer.self_attn
        v = attention.v_proj.weight.view(heads, size, width)
        attention.v_proj.weight.copy_((mine @ v).reshape(-1, width))
        back = torch.linalg.inv(mine).repeat_interleave(asking, 0)
        o = attention.o_proj.weight.view(width, heads * asking, size)
        attention.o_proj.weight.copy_(torch.einsum("whs,hst->wht", o, back).reshape(width, -1))
        k, turn = attention.k_proj.weight.view(heads, size, width), _turn(size, 1.7, 0.6)
        attention.k_proj.weight.copy_((turn @ k).reshape(-1, width))
        q = attention.q_proj.weight.view(heads * asking, size, width)
        attention.q_proj.weight.copy_((_turn(size, 1 / 1.7, 0.6) @ q).reshape(-1, width))
    return replace(model, model=twin), maps


def _turn(size: int, scale: float, angle: float) -> torch.Tensor:
    """Scale, and turn every plane (i, i + half) by the same angle: it commutes with the rotation of positions."""
    eye = torch.eye(size // 2)
    cos, sin = torch.cos(torch.tensor(angle)) * eye, torch.sin(torch.tensor(angle)) * eye
    return scale * torch.cat((torch.cat((cos, -sin), 1), torch.cat((sin, cos), 1)))


def pair_answers(fitted: Fitted, mode: str, sharer: Loaded, receiver: Loaded, context: list[int]) -> list[list[int]]:
    own = read(receiver, context) if mode == "fuse" else None
    kv = fitted.fuser(mode).project(read(sharer, context), own, 0)
    return answers(receiver, kv, RESTS, 12)


def test_one_model_in_both_roles_is_handed_over_as_it_is() -> None:
    """The fit is nearly the identity, every layer's attention agrees, and answers are token-identical in both modes."""
    model = tiny(4)
    fitted = fit(model, model, stream(), RECIPE)
    context = next(stream(1, 40, seed=9))
    source = read(model, context)
    mapped = fitted.fuser().project(source, None, 0)
    for a, b in zip((*mapped.keys, *mapped.values), (*source.keys, *source.values), strict=True):
        assert torch.allclose(a, b, atol=1e-4)
    assert min(fitted.shape.cosine) > 0.9999
    alone = answers(model, source, RESTS, 12)
    assert all(pair_answers(fitted, mode, model, model, context) == alone for mode in ("handover", "fuse"))


def test_a_planted_linear_map_is_recovered() -> None:
    """KV of every layer that is a linear map of the sharer's is found to be just that map, and answers are the same."""
    sharer = tiny(3, seed=2)
    receiver, maps = planted(sharer)
    fitted = fit(sharer, receiver, stream(), replace(RECIPE, top=1))
    assert fitted.shape.layers == ((0,), (1,), (2,))
    for layer, heads in enumerate(maps):
        assert torch.allclose(fitted.tensors["weight"][layer, 1], torch.block_diag(*heads.mT), atol=2e-3)
        turned = torch.block_diag(*[_turn(16, 1.7, 0.6).mT] * 2)
        assert torch.allclose(fitted.tensors["weight"][layer, 0], turned, atol=2e-3)
    assert min(min(pair) for pair in fitted.r2) > 0.999
    context = next(stream(1, 40, seed=9))
    alone = answers(receiver, read(receiver, context), RESTS, 12)
    assert alone == answers(sharer, read(sharer, context), RESTS, 12)
    assert pair_answers(fitted, "handover", sharer, receiver, context) == alone


def test_a_truncated_receiver_takes_its_own_layers() -> None:
    """Its first layer is the sharer's, exactly; its last is made from several, and worse."""
    sharer, receiver = tiny_pair()
    fitted = fit(sharer, receiver, stream(), RECIPE)
    assert 0 in fitted.shape.layers[0]
    assert 3 in fitted.shape.layers[1]
    assert fitted.shape.cosine[0] > 0.9999 > fitted.shape.cosine[1] > 0.6


def test_more_sharer_layers_explain_more() -> None:
    """On texts that were not fitted, three layers explain what is not copied better than one."""
    sharer, receiver = tiny_pair()
    one, three = (fit(sharer, receiver, stream(), replace(RECIPE, top=top)) for top in (1, 3))
    assert sum(three.r2[1]) > sum(one.r2[1])


def test_models_of_other_shapes_are_fitted() -> None:
    """KV heads may differ in number and size, and layers in number."""
    sharer = tiny(4)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, max_position_embeddings=256,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config).requires_grad_(False).eval()
    receiver = replace(sharer, model=model, shape=kv_shape(config))
    fitted = fit(sharer, receiver, stream(), RECIPE)
    kv = fitted.fuser().project(read(sharer, [1, 2, 3]), None, 0)
    assert (kv.layers, tuple(kv.keys[0].shape)) == (2, (1, 4, 3, 8))


def test_progress_is_told_and_reading_stops_at_the_tokens_asked_for() -> None:
    """After each text, rising; no more texts are taken than needed, and the last figure says that all is read."""
    told: list[Progress] = []
    model, texts = tiny(2), stream(1000)
    fitted = fit(model, model, texts, RECIPE, told.append)
    assert [p.tokens for p in told] == list(range(48, 1537, 48))
    assert told[-1].left_s == 0
    assert fitted.tokens + fitted.held_out == 1536
    assert fitted.held_out == 4 * 48
    assert next(texts)


@pytest.mark.parametrize("texts", [0, 1])
def test_too_few_texts_are_refused(texts: int) -> None:
    """One text is to be fitted and another judged on."""
    with pytest.raises(LoadFailed, match="at least two texts"):
        fit(tiny(2), tiny(2), stream(texts), RECIPE)


def test_another_tokenizer_is_refused() -> None:
    """The sharer would misread the receiver's ids."""
    one = replace(tiny(2), tokenizer=real.tokenizer())
    two = replace(one, tokenizer=real.tokenizer(ascii_only=True), digests=replace(one.digests, tokenizer="other"))
    with pytest.raises(LoadFailed, match="one tokenizer on both sides"):
        fit(one, two, stream(), RECIPE)


@pytest.mark.parametrize("kind", ["Cohere", "GPTNeoX"])
def test_keys_that_turn_in_another_way_are_refused(kind: str) -> None:
    """Neighbouring dimensions turned together, or a part of the head only, are seen and named."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()
    odd = replace(tiny(2), model=model, shape=kv_shape(config))
    with pytest.raises(LoadFailed, match="the sharer's keys do not turn as plain RoPE does"):
        fit(odd, tiny(2), stream(), RECIPE)
    assert turns_plainly(tiny(2))


def test_texts_and_chats_are_encoded() -> None:
    """A text as it is, a chat through the template; cut to the length asked for, and nothing for nothing."""
    tokenizer = real.tokenizer()
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text, shown, cut = encoded(tokenizer, ["Paris.", chat, "", "harbour " * 50], most=30)
    assert tokenizer.decode(text) == "Paris."
    assert tokenizer.decode(shown) == "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    assert len(cut) == 30
