"""The agentic benchmark asks what it says, checks the answers, and writes its rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from m3stack.bench.agentic import compiled, run, shares_report
from m3stack.bench.agentic.arms import ARMS, grouped_experts
from m3stack.bench.agentic.trace import TraceShape, conversations, shared_prefix
from m3stack.first_steps import StepSize
from m3stack.kernels.interface import SharedExpert
from m3stack.kernels.moe.reference import run_experts


def test_a_trace_is_the_same_in_every_run_and_of_the_sizes_asked_for() -> None:
    shape = TraceShape(shared=50, new=(3, 9), output=(2, 5), turns=4)
    first, again = (conversations(shape, 6, 100) for _ in range(2))
    assert first == again
    # more conversations do not change those before
    assert conversations(shape, 3, 100) == first[:3]
    assert conversations(shape, 2, 100, first=3) == first[3:5]
    for conversation in first:
        assert len(conversation.turns) == 4
        for turn in conversation.turns:
            assert 3 <= len(turn.new_token_ids) <= 9
            assert 2 <= turn.output_tokens <= 5
    assert len(shared_prefix(shape, 100)) == 50
    assert shape.longest == 50 + 4 * 14


def test_the_portable_experts_mean_what_the_reference_means() -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.2).to(torch.bfloat16)

    experts, width, inner, tokens, per_token = 4, 32, 16, 11, 2
    ids = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, per_token, generator=generator)
    arguments = (
        draw(tokens, width) * 5,
        draw(experts, 2 * inner, width),
        draw(experts, width, inner),
        ids.to(torch.int32),
        weights,
        1.702,
        7.0,
    )
    shared = SharedExpert(draw(2 * inner, width), draw(width, inner))
    given = grouped_experts(*arguments, shared=shared, factor=2.0)
    expected = run_experts(*arguments, shared=shared, factor=2.0)
    # bf16 between the two products
    torch.testing.assert_close(given.float(), expected.float(), rtol=0.05, atol=0.02)


def test_the_toy_run_answers_everything_and_reports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "agentic.json"
    names = ["full", "no_prefix_cache"]
    arguments = ["--toy", "--concurrency", "2", "--turns", "1", "--shared-tokens", "140"]
    assert run.main([*arguments, "--arms", *names, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["arm"] for row in rows] == names
    full, anew = rows
    assert full["output_tokens"] > 0 < anew["output_tokens"]
    assert full["cached_share"] > 0.3
    assert anew["cached_share"] == 0
    assert [row["compiled"] for row in rows] == [0, 0]
    assert all(row["itl_p99_ms"] > 0 < row["ttft_p50_ms"] for row in rows)
    assert "no_prefix_cache" in file.with_suffix(".md").read_text()
    assert file.with_suffix(".svg").read_text().count("polyline") == 2
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run there")
def test_arms_that_need_a_gpu_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--toy", "--arms", "portable"]) == 2
    assert "portable" in capsys.readouterr().out
    assert ARMS["portable"].needs_cuda


def test_the_other_parts_measure_on_a_toy_and_write_what_they_found(tmp_path: Path) -> None:
    file = tmp_path / "parts.json"
    parts = ["tier", "full_cache", "beside"]
    arguments = ["--toy", "--turns", "1", "--shared-tokens", "140", "--output-scale", "0.4"]
    assert run.main([*arguments, "--parts", *parts, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    resident, tiered = found["tier"]
    assert tiered["equal_tokens"] == 1
    assert resident["hot_share"] == 0
    assert tiered["host_bytes"] > 0 < tiered["hit_share"] <= 1
    assert [row["concurrency"] for row in found["full_cache"]] == [1, 2, 4]
    assert max(row["of_peak"] for row in found["full_cache"]) == 1
    assert [row["before"] for row in found["beside"]] == [-1, 0, 256]
    together, *places = found["beside"]
    assert together["gaps"] >= sum(row["gaps"] for row in places) > 10
    assert together["stretch"] == sum(row["stretch"] for row in places) == 1024
    assert together["beside_max_ms"] == max(row["beside_max_ms"] for row in places)
    for row in found["beside"]:
        assert row["solo_tokens_per_s"] > 0 < row["beside_tokens_per_s"]
        assert row["idle_p50_ms"] <= row["idle_p99_ms"]


def test_an_unknown_part_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--toy", "--parts", "speed"]) == 2
    assert "speed" in capsys.readouterr().out


def test_kernels_are_told_apart_by_their_names() -> None:
    parts = {
        "nvjet_sm90_tst_512x8_64x3_2x1_v_bz_TNT": "projections and head",
        "_up_kernel": "experts",
        "m3::route_kernel(m3::RouteArgs)": "experts",
        "m3::score_kernel(m3::ScoreLaunch)": "experts",
        "void m3::score_kernel<false, 1>(m3::ScoreArgs)": "block choice",
        "m3::select_kernel(m3::SelectArgs)": "block choice",
        "void m3::attend_kernel<false, 2, (m3::Merge)2>(m3::AttendArgs)": "attention",
        "_paged_kernel": "attention",
        "_gemma_norm_kernel": "rest",
    }
    assert {name: shares_report.part_of(name) for name in parts} == parts
    found = {
        name: {
            "requests": 8,
            "context": 60032,
            "step_ms": 2.0,
            "kernels_us": dict.fromkeys(parts, 9.0),
        }
        for name in ("full", "dense")
    }
    assert "| dense | 18 (22%) |" in shares_report.text(found, "shares.svg")
    assert shares_report.picture(found).count("us</text>") == 2


@pytest.mark.parametrize(
    ("found", "most", "context"),
    [
        (compiled.conversation_steps(70_000, num_decoding=64), 8192, 70_000),
        (compiled.long_prompt_steps(num_decoding=64), 16_384, 1_048_576),
    ],
)
def test_sizes_to_compile_are_within_what_the_engine_is_given(
    found: list[StepSize], most: int, context: int
) -> None:
    assert len(found) == len(set(found))
    assert max(max(size.rows) for size in found) == most
    assert max(size.context_tokens for size in found) == context
    widths = {-(-size.context_tokens // 128) % 16 for size in found if len(size.rows) > 2}
    assert 0 in widths, "tables whose width divides by 16 are compiled apart"
    assert widths != {0}
    for size in found:
        assert sum(size.rows) <= size.context_tokens
        assert len(size.rows) == 1 or max(size.rows) <= 2048


COMPILE_TWICE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from m3stack.bench.agentic.compiled import counted
from m3stack.bench.agentic.decoded_with_triton import _decode_kernel

types = {"elements": "*fp8e4nv", "scales": "*u8", "out": "*bf16", "num_values": "i32"}
constants = {"GROUP": 32, "VALUES": 1024}
source = ASTSource(_decode_kernel, {**types, **dict.fromkeys(constants, "constexpr")}, constants)
for _ in range(2):
    with counted() as compiled:
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(compiled.kernels)
assert triton.knobs.compilation.listener is None
"""


def test_only_what_is_compiled_anew_counts(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    # other tests have kernels interpreted, which a process decides once
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE_TWICE], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "0"]
