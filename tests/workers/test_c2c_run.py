"""workers.c2c_run: the official method section by section, on the tiny models of the golden vectors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from workers.align import Aligner
from workers.c2c_run import (
    Example,
    Prompt,
    Section,
    Sharer,
    aligned_prompt,
    batch_loss,
    collate,
    decode,
    forward,
    greedy,
    layers_of,
    prefill,
    same_tokenizer_sections,
    sections_of,
)
from workers.cache import KVCache
from workers.errors import BadPrompt
from workers.fusers.c2c import load_official

E2E = Path(__file__).parents[1] / "golden" / "e2e"
IDS = torch.tensor([[46, 60, 72, 77, 112, 9, 8, 51, 73, 133, 1, 84, 140]])


def model(folder: Path) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def receiver() -> Any:
    return model(E2E / "same_tokenizer" / "receiver")


@pytest.fixture
def sharer() -> Sharer:
    folder = E2E / "same_tokenizer"
    return Sharer(model(folder / "sharer"), load_official(folder / "fuser").fuser)


def closed(sharer: Sharer) -> Sharer:
    with torch.no_grad():
        for projector in sharer.fuser.projectors.values():
            projector.get_parameter("key_gate_logit").fill_(0.0)
            projector.get_parameter("value_gate_logit").fill_(-1.0)
    sharer.fuser.refresh()
    return sharer


def never(**_: Any) -> Any:
    raise AssertionError("this model must not run")


def kv_of(cache: DynamicCache) -> KVCache:
    return KVCache([layer.keys for layer in layers_of(cache)], [layer.values for layer in layers_of(cache)])


def unfused(prompt: Prompt) -> Prompt:
    return replace(prompt, sections=tuple(Section(-1, s.length) for s in prompt.sections))


def alone(receiver: Any, ids: Tensor) -> Tensor:
    return forward(receiver, ids, DynamicCache(), None, torch.arange(ids.shape[1])[None], all_logits=True)


def test_a_run_is_what_the_fuser_protocol_gives(receiver: Any, sharer: Sharer) -> None:
    """Prefill over two sections equals: read both, project through the fuser, read the last token over the result."""
    run = prefill(receiver, [sharer], Prompt(IDS, same_tokenizer_sections(IDS.shape[1])))
    own, source = DynamicCache(), DynamicCache()
    places = torch.arange(IDS.shape[1])[None]
    forward(receiver, IDS[:, :-1], own, None, places[:, :-1])
    forward(sharer.model, IDS[:, :-1], source, None, places[:, :-1])
    fused = DynamicCache()
    for index, (key, value) in enumerate(sharer.fuser.project(kv_of(source), kv_of(own), 0).tensors()):
        fused.update(key, value, index)
    logits = forward(receiver, IDS[:, -1:], fused, None, places[:, -1:])
    torch.testing.assert_close(run.logits, logits)


def test_closed_gates_leave_the_receiver_as_it_is(receiver: Any, sharer: Sharer) -> None:
    """With every gate closed the answer is the receiver's own, bit for bit, in both modes that fuse the prompt."""
    prompt = Prompt(IDS, same_tokenizer_sections(IDS.shape[1]))
    tokens, logits = greedy(prefill(receiver, (), unfused(prompt)), 6)
    fused_tokens, fused_logits = greedy(prefill(receiver, [closed(sharer)], prompt), 6)
    assert torch.equal(tokens, fused_tokens)
    assert torch.equal(logits, fused_logits)
    _, with_response = greedy(prefill(receiver, [sharer], prompt, include_response=True), 6)
    torch.testing.assert_close(with_response, logits)


def test_a_sharer_that_no_section_selects_does_not_run(receiver: Any, sharer: Sharer) -> None:
    """A sharer outside every section's code costs nothing; the prompt is read as if it were not there."""
    idle = Sharer(never, sharer.fuser)
    sections = same_tokenizer_sections(IDS.shape[1], code=1)
    both = prefill(receiver, [sharer, idle], Prompt(IDS, sections))
    torch.testing.assert_close(both.logits, prefill(receiver, [sharer], Prompt(IDS, sections)).logits)
    assert prefill(receiver, [idle], Prompt(IDS, (Section(1, IDS.shape[1]),))).logits.isfinite().all()


def test_a_sharer_stops_after_the_last_section_that_selects_it(receiver: Any, sharer: Sharer) -> None:
    """What follows the last fused section is read by the receiver only."""
    sections = (Section(1, 5), Section(-1, 7), Section(-1, 1))
    run = prefill(receiver, [sharer], Prompt(IDS, sections))
    assert run.sharer_caches[0].get_seq_length() == 5
    official = prefill(receiver, [sharer], Prompt(IDS, sections), idle_sharers=True)
    assert official.sharer_caches[0].get_seq_length() == 12
    assert torch.equal(run.logits, official.logits)


def test_the_sharers_kv_is_never_changed(receiver: Any, sharer: Sharer) -> None:
    """Fusing and decoding leave the sharer's KV what its own reading of the prompt gives."""
    run = prefill(receiver, [sharer], Prompt(IDS, same_tokenizer_sections(IDS.shape[1])))
    greedy(run, 4)
    plain = DynamicCache()
    forward(sharer.model, IDS[:, :-1], plain, None, torch.arange(12)[None])
    for got, want in zip(kv_of(run.sharer_caches[0]).keys, kv_of(plain).keys, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("sections", [(), (Section(1, 12),), (Section(1, 13), Section(-1, 0)), (Section(-1, 14),)])
def test_sections_that_do_not_cover_the_prompt_are_refused(sections: tuple[Section, ...]) -> None:
    """Sections that are empty, or cover fewer or more tokens than there are, raise BadPrompt."""
    with pytest.raises(BadPrompt):
        Prompt(IDS, sections)


def test_a_code_without_its_sharer_is_refused(receiver: Any, sharer: Sharer) -> None:
    """A bitmask that names a sharer which is not there raises BadPrompt, never a run with fewer sharers."""
    with pytest.raises(BadPrompt, match="code 2"):
        prefill(receiver, [sharer], Prompt(IDS, same_tokenizer_sections(IDS.shape[1], code=2)))


def test_include_response_needs_the_receivers_own_ids(receiver: Any, sharer: Sharer) -> None:
    """Include-response without a sharer, or with ids of another tokenizer, is refused."""
    prompt = Prompt(IDS, same_tokenizer_sections(IDS.shape[1]))
    for sharers, given in (((), prompt), ([sharer], replace(prompt, sharer_ids=(IDS,)))):
        with pytest.raises(BadPrompt):
            prefill(receiver, sharers, given, include_response=True)


def test_include_response_feeds_all_tokens_at_once_as_one_by_one(receiver: Any, sharer: Sharer) -> None:
    """A last section of several tokens gives what reading its tokens one at a time gives, up to the fused past."""
    sections = (Section(1, 9), Section(-1, 4))
    at_once = prefill(receiver, [sharer], Prompt(IDS, sections), include_response=True)
    stepwise = prefill(receiver, [sharer], Prompt(IDS[:, :10], (Section(1, 9), Section(-1, 1))), include_response=True)
    for i in range(10, 13):
        logits = decode(stepwise, IDS[:, i : i + 1])
    torch.testing.assert_close(at_once.logits[:, -1], logits, rtol=1e-4, atol=1e-5)


def test_padding_stays_hidden_while_decoding() -> None:
    """With padding in the prompt, decoded tokens never see it; the official compatible switch lets them."""
    folder = E2E / "same_tokenizer"
    receiver = model(folder / "receiver")
    ids, mask = torch.cat([IDS[:, :6], torch.zeros(1, 3, dtype=torch.long), IDS[:, 6:]], dim=1), torch.ones(1, 16)
    mask[:, 6:9] = 0
    positions = torch.tensor([[*range(6), 0, 0, 0, *range(6, 13)]])
    prompt = Prompt(ids, (Section(-1, 15), Section(-1, 1)), mask=mask, positions=positions)
    want, _ = greedy(prefill(receiver, (), Prompt(IDS, (Section(-1, 13),))), 8)
    got, logits = greedy(prefill(receiver, (), prompt), 8)
    assert got.tolist() == want.tolist()
    _, seen = greedy(prefill(receiver, (), prompt), 8, official_mask=True)
    assert (logits[:, 1:] - seen[:, 1:]).abs().max() > 1e-3


def test_an_aligned_chat_runs() -> None:
    """A chat aligned for two tokenizers runs through prefill and decoding, and fuses message text only."""
    from transformers import AutoTokenizer

    folder = E2E / "aligned"
    receiver, sharer = model(folder / "receiver"), model(folder / "sharer")
    aligner = Aligner(
        AutoTokenizer.from_pretrained(folder / "receiver"), AutoTokenizer.from_pretrained(folder / "sharer")
    )
    aligned = aligner.align([{"role": "user", "content": "Explain why the sky looks blue."}])
    prompt = aligned_prompt(aligned)
    assert [s.code for s in prompt.sections] == [-1, 1, -1]
    run = prefill(receiver, [Sharer(sharer, load_official(folder / "fuser").fuser)], prompt)
    plain = prefill(receiver, (), unfused(prompt))
    first, stop = prompt.sections[0].length, prompt.sections[0].length + prompt.sections[1].length
    changed = [
        layer for layer in range(4) if not torch.equal(kv_of(run.cache).keys[layer], kv_of(plain.cache).keys[layer])
    ]
    assert changed
    for got, want in zip(kv_of(run.cache).keys, kv_of(plain.cache).keys, strict=True):
        assert torch.equal(got[:, :, :first], want[:, :, :first])
    assert not torch.equal(
        kv_of(run.cache).keys[changed[0]][:, :, :stop], kv_of(plain.cache).keys[changed[0]][:, :, :stop]
    )
    assert greedy(run, 5)[1].isfinite().all()


EXAMPLES = [
    Example([4, 91, 138, 36, 103, 141, 109, 105], [-100] * 5 + [141, 109, 105], [1] * 4 + [-1] * 4),
    Example([127, 71, 78, 83, 12, 49], [-100] * 4 + [12, 49], [1] * 3 + [-1] * 3),
]


def test_a_batch_is_the_mean_over_its_tokens(receiver: Any, sharer: Sharer) -> None:
    """The loss of a padded batch is the token-weighted mean of its examples' own losses: no example sees another."""
    together = batch_loss(receiver, [sharer], collate(EXAMPLES, pad=0))
    single = [batch_loss(receiver, [sharer], collate([e], pad=0)).loss for e in EXAMPLES]
    torch.testing.assert_close(together.loss, (3 * single[0] + 2 * single[1]) / 5, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("include_response", [False, True])
def test_the_loss_teaches_gates_and_projectors(receiver: Any, sharer: Sharer, include_response: bool) -> None:
    """In training the loss has a finite gradient in every projector tensor, and none in either model."""
    sharer.fuser.train()
    sharer.fuser.anneal(0)
    for projector in sharer.fuser.projectors.values():
        projector.requires_grad_(True)
    torch.manual_seed(0)
    batch = collate(EXAMPLES, pad=0)
    batch_loss(receiver, [sharer], batch, include_response=include_response).loss.backward()  # type: ignore[no-untyped-call]
    for index, projector in sharer.fuser.projectors.items():
        for name, parameter in projector.named_parameters():
            assert parameter.grad is not None, (index, name)
            assert parameter.grad.isfinite().all()
        assert projector.get_parameter("key_gate_logit").grad != 0
    assert all(p.grad is None for p in (*receiver.parameters(), *sharer.model.parameters()))


def test_training_on_one_example_lowers_its_loss(receiver: Any, sharer: Sharer) -> None:
    """A few steps on the projectors alone lower the loss that evaluation then measures."""
    fuser = sharer.fuser
    batch = collate(EXAMPLES, pad=0)
    before = batch_loss(receiver, [sharer], batch).loss
    parameters = [p.requires_grad_(True) for m in fuser.projectors.values() for p in m.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    for _ in range(15):
        optimizer.zero_grad()
        batch_loss(receiver, [sharer], batch).loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    fuser.train(False)
    assert batch_loss(receiver, [sharer], batch).loss < before - 0.1


def test_examples_with_other_sections_are_refused() -> None:
    """Examples whose sections differ in number or code are not put into one batch, to be fused wrongly."""
    other = Example([1, 2, 3, 4], [-100, -100, 3, 4], [-1, 1, -1, -1])
    with pytest.raises(BadPrompt, match="sections"):
        collate([EXAMPLES[0], other], pad=0)


def test_sections_are_runs_of_equal_codes() -> None:
    """Per-token codes become one section per run; a prompt of one token has nothing to fuse."""
    assert sections_of([1, 1, -1, 1]) == (Section(1, 2), Section(-1, 1), Section(1, 1))
    assert same_tokenizer_sections(1) == (Section(-1, 1),)


def test_the_receiver_alone_is_a_plain_forward(receiver: Any) -> None:
    """Without sharers, sections do not matter: the logits are those of one plain forward."""
    run = prefill(receiver, (), Prompt(IDS, (Section(0, 4), Section(-1, 6), Section(0, 3))))
    torch.testing.assert_close(run.logits[:, -1], alone(receiver, IDS)[:, -1], rtol=1e-4, atol=1e-5)
