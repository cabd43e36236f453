"""The sampler against a plain scalar account of its rules, and its independence of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m3stack.engine.choosing import rank_logits
from m3stack.engine.plan import Sampled
from m3stack.engine.sampler import Sampler, SampleRow
from m3stack.types import Failed, Sampling
from tests.worker.engine.history_model import CPU, sampling

VOCAB = 17


def logits_of(seed: int, *, rows: int = 1, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB, generator=generator) * scale


def sampler_for(
    *requests: Sampling, prompt: Sequence[int] = (), stops: frozenset[int] = frozenset()
) -> Sampler:
    sampler = Sampler(VOCAB, CPU)
    for handle, request in enumerate(requests):
        sampler.begin(handle, request, prompt_token_ids=prompt, stop_ids=stops)
    return sampler


def draw(request: Sampling, logits: torch.Tensor, index: int = 0) -> int:
    chosen = sampler_for(request).sample(logits, [SampleRow(0, index)])[0]
    assert isinstance(chosen, Sampled)
    return chosen.token_id


def plain_distribution(logits: Sequence[float], rules: Sampling) -> dict[int, float]:
    """What may be drawn, and how likely, step by step in float64."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    weight = {t: math.exp((logits[t] - logits[order[0]]) / rules.temperature) for t in order}
    if rules.top_k:
        order = order[: rules.top_k]
    total = sum(weight[t] for t in order)
    kept: list[int] = []
    mass = 0.0
    for token in order:
        if kept and mass >= rules.top_p:
            break
        kept.append(token)
        mass += weight[token] / total
    kept = [t for t in kept if weight[t] >= rules.min_p * weight[kept[0]]]
    total = sum(weight[t] for t in kept)
    return {t: weight[t] / total for t in kept}


RULES = st.builds(
    lambda temperature, top_p, top_k, min_p: sampling(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p
    ),
    st.sampled_from([0.01, 0.3, 0.7, 1.0, 2.0]),
    st.sampled_from([0.05, 0.5, 0.9, 0.95, 1.0]),
    st.sampled_from([0, 1, 2, 5, 40]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)


@given(rules=RULES, seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_draws_stay_inside_the_plain_distribution(rules: Sampling, seed: int) -> None:
    logits = logits_of(seed)
    allowed = plain_distribution(logits[0].double().tolist(), rules)
    for index in range(20):
        assert draw(rules, logits, index) in allowed


@pytest.mark.parametrize(
    "rules",
    [
        sampling(temperature=1.0),
        sampling(temperature=0.6, top_p=0.9),
        sampling(temperature=1.5, top_k=6),
        sampling(temperature=1.0, min_p=0.2),
        sampling(temperature=1.2, top_k=9, top_p=0.8, min_p=0.05),
    ],
)
def test_frequencies_follow_the_plain_distribution(rules: Sampling) -> None:
    logits = logits_of(5)
    expected = plain_distribution(logits[0].double().tolist(), rules)
    sampler = sampler_for(rules)
    draws = 4000
    counts = dict.fromkeys(expected, 0)
    for index in range(draws):
        chosen = sampler.sample(logits, [SampleRow(0, index)])[0]
        assert isinstance(chosen, Sampled)
        counts[chosen.token_id] += 1
    for token, share in expected.items():
        # 4.5 standard deviations; the draws are fixed by the seed, so this cannot flake
        slack = 4.5 * math.sqrt(share * (1 - share) / draws) + 1e-9
        assert abs(counts[token] / draws - share) <= slack, token


def test_temperature_zero_and_equal_logits_take_the_lower_id() -> None:
    tied = torch.zeros(1, VOCAB)
    tied[0, 4] = tied[0, 9] = 1.0
    assert draw(sampling(), tied) == 4
    assert draw(sampling(temperature=1.0, top_k=1, seed=3), tied) == 4
    zeros = torch.tensor([[-0.0, 0.0] + [-1.0] * (VOCAB - 2)])
    assert draw(sampling(), zeros) == 0
    assert draw(sampling(temperature=1.0, top_k=1), zeros) == 0


def test_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = logits_of(1, scale=1e4)
    assert draw(sampling(temperature=1e-6, seed=9), logits) == int(logits.argmax())


def test_same_seed_same_tokens_and_another_seed_others() -> None:
    logits = logits_of(2, scale=0.1)

    def run(seed: int) -> list[int]:
        return [draw(sampling(temperature=1.0, seed=seed), logits, index) for index in range(30)]

    assert run(2**64 - 1) == run(2**64 - 1)
    assert run(7) != run(8)
    assert len(set(run(7))) > 5, "the output index must change the draw"


@given(
    seeds=st.lists(st.integers(0, 50), min_size=2, max_size=9),
    kinds=st.lists(RULES, min_size=9, max_size=9),
    greedy=st.integers(0, 8),
)
@settings(max_examples=40, deadline=None)
def test_a_row_gets_what_it_gets_alone(
    seeds: list[int], kinds: list[Sampling], greedy: int
) -> None:
    rules = [
        sampling(
            temperature=0.0 if number == greedy else kind.temperature,
            top_p=kind.top_p,
            top_k=kind.top_k,
            min_p=kind.min_p,
            seed=seed,
            repetition_penalty=1.0 + (seed % 3) * 0.2,
            logprobs=seed % 2 == 0,
            top_logprobs=seed % 4,
        )
        for number, (seed, kind) in enumerate(zip(seeds, kinds, strict=False))
    ]
    logits = logits_of(sum(seeds), rows=len(seeds))
    together = sampler_for(*rules, prompt=[1, 2]).sample(
        logits, [SampleRow(handle, handle) for handle in range(len(seeds))]
    )
    for handle, rule in enumerate(rules):
        alone = sampler_for(rule, prompt=[1, 2]).sample(
            logits[handle : handle + 1], [SampleRow(0, handle)]
        )
        assert alone[0] == together[handle]


def test_penalties_follow_their_formulas() -> None:
    rules = sampling(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, max_tokens=9
    )
    sampler = sampler_for(rules, prompt=[0, 1])
    logits = torch.full((1, VOCAB), -10.0)
    logits[0, :4] = torch.tensor([4.0, -2.0, 3.0, 1.0])
    # prompt ids 0 and 1 are seen: 4 -> 2, -2 -> -4; the best is 2 with 3
    assert token(sampler, logits, 0) == 2
    # 2 seen once: 3 / 2 - 0.5 - 0.25 = 0.75; the best is 0 with 2
    assert token(sampler, logits, 1) == 0
    # 0 seen once in the output: 2 - 0.75 = 1.25; still the best
    assert token(sampler, logits, 2) == 0
    # 0 twice: 2 - 0.5 - 0.5 = 1.0, equal to 3's 1.0; the lower id wins
    assert token(sampler, logits, 3) == 0
    # 0 three times: 0.75, 3 has 1.0
    assert token(sampler, logits, 4) == 3


def token(sampler: Sampler, logits: torch.Tensor, index: int) -> int:
    chosen = sampler.sample(logits, [SampleRow(0, index)])[0]
    assert isinstance(chosen, Sampled)
    return chosen.token_id


def test_bias_is_added_and_the_model_logits_stay_as_they_were() -> None:
    logits = logits_of(3)
    before = logits.clone()
    assert draw(sampling(logit_bias={5: 100.0}), logits) == 5
    best = int(logits.argmax())
    assert draw(sampling(logit_bias={best: -100.0}), logits) != best
    assert torch.equal(logits, before)


@given(
    seed=st.integers(0, 999),
    allowed=st.frozensets(st.integers(0, VOCAB - 1), max_size=4),
    banned=st.frozensets(st.integers(0, VOCAB - 1), max_size=8),
    temperature=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_only_allowed_ids_are_drawn_and_banned_ones_never(
    seed: int, allowed: frozenset[int], banned: frozenset[int], temperature: float
) -> None:
    left = (allowed or frozenset(range(VOCAB))) - banned
    rules = sampling(
        temperature=temperature,
        seed=seed,
        allowed_token_ids=allowed,
        banned_token_ids=banned,
        # a bias does not lift a ban
        logit_bias=dict.fromkeys(banned, 100.0),
        logprobs=True,
        top_logprobs=2,
    )
    logits = logits_of(seed)
    chosen = sampler_for(rules).sample(logits, [SampleRow(0, 0)])[0]
    if not left:
        assert isinstance(chosen, Failed)
        return
    assert isinstance(chosen, Sampled)
    assert chosen.token_id in left
    if temperature == 0:
        assert chosen.token_id == min(left, key=lambda t: (-logits[0, t].item(), t))
    # what is reported is the model's own opinion
    assert chosen.logprob is not None
    assert chosen.logprob.top[0][0] == int(logits.argmax())


def test_stop_ids_cannot_be_drawn_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 50.0
    rules = sampling(min_tokens=2)
    sampler = sampler_for(rules, stops=frozenset({3}))
    assert [token(sampler, logits, index) for index in range(4)] == [0, 0, 3, 3]


def test_logprobs_are_the_models_own_whatever_the_rules() -> None:
    logits = logits_of(4)
    expected = logits[0].double().log_softmax(-1)
    rules = sampling(
        temperature=0.5, top_k=3, logit_bias={2: 5.0}, logprobs=True, top_logprobs=4, seed=11
    )
    chosen = sampler_for(rules).sample(logits, [SampleRow(0, 0)])[0]
    assert isinstance(chosen, Sampled)
    assert chosen.logprob is not None
    assert chosen.logprob.logprob == pytest.approx(expected[chosen.token_id].item(), abs=1e-5)
    ranked = sorted(range(VOCAB), key=lambda t: (-logits[0, t].item(), t))[:4]
    assert [alternative[0] for alternative in chosen.logprob.top] == ranked
    for token_id, value in chosen.logprob.top:
        assert value == pytest.approx(expected[token_id].item(), abs=1e-5)


def test_zero_top_logprobs_still_gives_the_own_one() -> None:
    chosen = sampler_for(sampling(logprobs=True)).sample(logits_of(4), [SampleRow(0, 0)])[0]
    assert isinstance(chosen, Sampled)
    assert chosen.logprob is not None
    assert chosen.logprob.top == ()
    assert chosen.logprob.logprob < 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_finite_choice_are_refused_alone(temperature: float) -> None:
    logits = logits_of(6, rows=4)
    logits[0, 3] = float("nan")
    logits[1] = float("-inf")
    logits[2, 5] = float("inf")
    rules = [sampling(temperature=temperature, logprobs=True) for _ in range(4)]
    chosen = sampler_for(*rules).sample(logits, [SampleRow(handle, 0) for handle in range(4)])
    assert [isinstance(chosen[handle], Failed) for handle in range(4)] == [True, True, True, False]
    good = sampler_for(rules[3]).sample(logits[3:], [SampleRow(0, 0)])[0]
    assert chosen[3] == good


@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, VOCAB),
    ties=st.lists(st.integers(0, VOCAB - 1), max_size=8),
    special=st.lists(
        st.tuples(
            st.integers(0, VOCAB - 1),
            st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38, float("-inf")]),
        ),
        max_size=6,
    ),
)
@settings(max_examples=200, deadline=None)
def test_ranking_a_few_equals_the_head_of_ranking_all(
    seed: int, count: int, ties: list[int], special: list[tuple[int, float]]
) -> None:
    logits = logits_of(seed)
    logits[0, ties] = 0.5
    for token_id, value in special:
        logits[0, token_id] = value
    plain = sorted(range(VOCAB), key=lambda t: (-logits[0, t].item(), t))[:count]
    for width in (count, None):
        ids, values = rank_logits(logits, width)
        assert ids[0, :count].tolist() == plain
        assert values[0, :count].tolist() == logits[0, plain].tolist()


def test_a_rows_draw_does_not_depend_on_how_wide_its_neighbours_top_k_is() -> None:
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(1)).mul(3)
    sampler = Sampler(1000, CPU)
    for handle, top_k in enumerate((3, 256)):
        rules = sampling(temperature=1.0, top_k=top_k, top_p=0.9, seed=4)
        sampler.begin(handle, rules, prompt_token_ids=(), stop_ids=frozenset())
    for index in range(50):
        alone = sampler.sample(logits[:1], [SampleRow(0, index)])[0]
        both = sampler.sample(logits, [SampleRow(0, index), SampleRow(1, index)])
        assert both[0] == alone
