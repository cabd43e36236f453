"""What the pages name exists: settings, links and the sections they lead to, alerts."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from m3stack.config import setting_specs

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for place in ("*.md", "docs/**/*.md", "deploy/**/*.md", "tests/data/**/*.md", "worker/**/*.md")
    for page in ROOT.glob(place)
)


def gateway_settings() -> set[str]:
    """Names in the example file, those that stand there as a comment included."""
    text = (ROOT / "deploy" / "m3stack.example.toml").read_text()
    table = text.partition("[gateway]")[2].partition("[worker]")[0]
    return set(re.findall(r"^(?:# )?(\w+) = ", table, re.MULTILINE))


def test_every_setting_of_the_migration_page_exists() -> None:
    example = tomllib.loads((ROOT / "deploy" / "m3stack.example.toml").read_text())
    known = {f"shared.{name}" for name in example["shared"]}
    known |= {f"worker.{spec.name}" for spec in setting_specs()}
    known |= {f"gateway.{name}" for name in gateway_settings()}
    page = (ROOT / "docs" / "migration.md").read_text()
    named = set(re.findall(r"`((?:shared|gateway|worker)\.\w+)", page))
    assert len(named) > 30
    assert named - known == set()


def prose(page: Path) -> str:
    """A page without its blocks and spans of code, in which brackets mean other things."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def sections(page: Path) -> set[str]:
    """Names under which a page's headings can be linked to."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)(?: [^)]*)?\)", prose(page)):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, section = target.partition("#")
        found = page.parent / name if name else page
        is_section = not section or (found.suffix == ".md" and section in sections(found))
        if not found.exists() or not is_section:
            missing.append(target)
    assert missing == []


def test_pages_of_every_folder_are_looked_at() -> None:
    folders = {page.parent.relative_to(ROOT).as_posix() for page in PAGES}
    assert {".", "docs", "docs/decisions", "docs/bench", "deploy"} <= folders


def test_every_alert_has_its_line_in_the_operators_page() -> None:
    alerts = yaml.safe_load((ROOT / "deploy/helm/m3stack/files/alerts.yaml").read_text())
    names = {rule["alert"] for group in alerts["groups"] for rule in group["rules"]}
    page = (ROOT / "docs" / "operations.md").read_text()
    assert {name for name in names if f"| {name} |" not in page} == set()
    assert set(re.findall(r"^\| (M3stack\w+) \|", page, re.MULTILINE)) == names
