"""What the operators' pages name exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from m3stack.config import setting_specs

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "deploy").rglob("*.md"))


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


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [
        target for target in targets if "://" not in target and not (page.parent / target).exists()
    ]
    assert missing == []


def test_every_alert_has_its_line_in_the_operators_page() -> None:
    alerts = yaml.safe_load((ROOT / "deploy/helm/m3stack/files/alerts.yaml").read_text())
    names = {rule["alert"] for group in alerts["groups"] for rule in group["rules"]}
    page = (ROOT / "docs" / "operations.md").read_text()
    assert {name for name in names if f"| {name} |" not in page} == set()
    assert set(re.findall(r"^\| (M3stack\w+) \|", page, re.MULTILINE)) == names
