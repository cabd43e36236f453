"""Kernel times by part, as text and picture: where a decode step's time goes, dense beside MSA."""

from __future__ import annotations

from html import escape
from typing import Any

PARTS = ("block choice", "attention", "experts", "projections and head", "rest")
COLOURS = ("#8250df", "#1f6feb", "#d29922", "#2da44e", "#8b949e")
# first match counts; kernels of experts come first, since both choose and score
_NAMES = (
    ("rest", ("_gemma_norm",)),
    (
        "experts",
        ("MoeArgs", "FewArgs", "Route", "ScoreLaunch", "SortArgs", "GatherArgs", "RingLaunch",
         "_up_kernel", "_down_kernel", "combine_kernel", "_group_kernel", "grouped"),
    ),
    ("block choice", ("ScoreArgs", "SelectArgs", "SettleArgs", "_score_kernel", "_select_kernel")),
    ("attention", ("AttendArgs", "_paged_kernel", "_merge_kernel", "_attend", "attention")),
    ("projections and head", ("nvjet", "gemm", "cublas", "cutlass", "gemv")),
)  # fmt: skip
WIDTH, BAR, LEFT = 720, 34, 90


def part_of(kernel: str) -> str:
    """Which part of a step a kernel belongs to, by its name."""
    for part, names in _NAMES:
        if any(name in kernel for name in names):
            return part
    return "rest"


def by_part(kernels_us: dict[str, float]) -> dict[str, float]:
    """Microseconds of a step by part."""
    sums: dict[str, float] = {part: 0.0 for part in PARTS}
    for kernel, us in kernels_us.items():
        sums[part_of(kernel)] += us
    return sums


def text(found: dict[str, Any], picture_name: str) -> str:
    """A table of microseconds and shares."""
    any_arm = next(iter(found.values()))
    lines = [
        "## Where a decode step's time goes\n",
        f"{any_arm['requests']} requests behind the same {any_arm['context']:,} tokens; kernel "
        "times of a profiler over recorded steps, one dense and four sparse layers, in "
        "microseconds a step.\n",
        f"![kernel time by part]({picture_name})\n",
        "| arm | " + " | ".join(PARTS) + " | kernels | step |",
        "|---" * (len(PARTS) + 3) + "|",
    ]
    for name, arm in found.items():
        parts = by_part(arm["kernels_us"])
        total = sum(parts.values())
        cells = [f"{us:,.0f} ({us / max(total, 1e-9):.0%})" for us in parts.values()]
        lines.append(
            f"| {name} | " + " | ".join(cells) + f" | {total:,.0f} | {arm['step_ms'] * 1e3:,.0f} |"
        )
    return "\n".join(lines) + "\n"


def picture(found: dict[str, Any]) -> str:
    """One bar an arm, as SVG."""
    arms = {name: by_part(arm["kernels_us"]) for name, arm in found.items()}
    longest = max(1e-9, *(sum(parts.values()) for parts in arms.values()))
    height = 60 + len(arms) * (BAR + 14) + 24
    shown = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for index, (part, colour) in enumerate(zip(PARTS, COLOURS, strict=True)):
        x = 12 + index * 140
        shown.append(f'<rect x="{x}" y="14" width="12" height="12" fill="{colour}"/>')
        shown.append(f'<text x="{x + 17}" y="25">{escape(part)}</text>')
    for row, (name, parts) in enumerate(arms.items()):
        x, y = float(LEFT), 44 + row * (BAR + 14)
        shown.append(f'<text x="12" y="{y + BAR / 2 + 4}">{escape(name)}</text>')
        for us, colour in zip(parts.values(), COLOURS, strict=True):
            width = us / longest * (WIDTH - LEFT - 80)
            shown.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'
            )
            x += width
        total = sum(parts.values())
        shown.append(f'<text x="{x + 6:.1f}" y="{y + BAR / 2 + 4}">{total:,.0f} us</text>')
    return "\n".join(shown) + "\n</svg>\n"
