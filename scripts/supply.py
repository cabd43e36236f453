"""What the product is made of: checks licences, sources and pins, or writes a bill of materials.

Usage: supply.py check | supply.py sbom FILE

Rust is judged by deny.toml, the same file that `cargo deny` reads; Python by the lists below.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
REGISTRY = "registry+https://github.com/rust-lang/crates.io-index"
# what users install; the extras `test` and `lint` are tools that nobody is given
SHIPPED_EXTRAS = ("worker", "hub", "cuda")
SHIPPED_CRATES = ("gateway-server", "gateway-python")
# of Python packages that are shipped, besides those that deny.toml allows
PYTHON_LICENCES = {"MPL-2.0", "PSF-2.0", "MIT-CMU", "CNRI-Python", "LicenseRef-NVIDIA-Proprietary"}
# how metadata without an SPDX expression says it
SPOKEN = (
    (r"nvidia|other/proprietary", "LicenseRef-NVIDIA-Proprietary"),
    (r"apache", "Apache-2.0"),
    (r"mozilla|mpl", "MPL-2.0"),
    (r"bsd", "BSD-3-Clause"),
    (r"mit\b", "MIT"),
    (r"isc\b", "ISC"),
    (r"python software foundation|psf", "PSF-2.0"),
)
# packages whose metadata names no licence, and what their files say
UNSPOKEN = {"cuda-toolkit": "LicenseRef-NVIDIA-Proprietary"}
# they come with the virtual environment
BOOTSTRAP = {"pip", "setuptools", "wheel", "m3stack"}


@dataclass(frozen=True, slots=True)
class Component:
    """One package of either language."""

    ecosystem: str
    name: str
    version: str
    licence: str
    sha256: str = ""

    @property
    def purl(self) -> str:
        return f"pkg:{self.ecosystem}/{self.name}@{self.version}"


def allows(expression: str, allowed: set[str]) -> bool:
    """Whether an SPDX expression can be satisfied with the allowed licences alone.

    Raises:
        ValueError: it is no expression.
    """
    expression = expression.replace("/", " OR ")
    tokens = re.findall(r"\(|\)|[A-Za-z0-9.+-]+", expression)
    position = 0

    def peek() -> str:
        return tokens[position] if position < len(tokens) else ""

    def take() -> str:
        nonlocal position
        position += 1
        return tokens[position - 1]

    def one() -> bool:
        if not peek() or peek() in ("AND", "OR", "WITH", ")"):
            raise ValueError(f"not a licence expression: {expression!r}")
        if peek() == "(":
            take()
            inner = any_of()
            if not peek() == ")":
                raise ValueError(f"a parenthesis is open in {expression!r}")
            take()
            return inner
        name = take()
        if peek() == "WITH":
            take()
            return f"{name} WITH {take()}" in allowed
        return name in allowed

    def all_of() -> bool:
        fits = one()
        while peek() == "AND":
            take()
            fits = one() and fits
        return fits

    def any_of() -> bool:
        fits = all_of()
        while peek() == "OR":
            take()
            fits = all_of() or fits
        return fits

    fits = any_of()
    if peek():
        raise ValueError(f"{peek()!r} is one too many in {expression!r}")
    return fits


def crates() -> list[Component]:
    """Crates that the shipped binaries are built from, for the targets of deny.toml.

    Raises:
        subprocess.CalledProcessError: Cargo.lock is not current.
    """
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    for target in deny()["graph"]["targets"]:
        command += ["--filter-platform", target]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    metadata = json.loads(done.stdout)
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    locked = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    sums = {(item["name"], item["version"]): item.get("checksum", "") for item in locked}
    pending = [key for key, package in packages.items() if package["name"] in SHIPPED_CRATES]
    seen = set(pending)
    while pending:
        for dependency in nodes[pending.pop()]["deps"]:
            is_shipped = any(kind["kind"] != "dev" for kind in dependency["dep_kinds"])
            if is_shipped and dependency["pkg"] not in seen:
                seen.add(dependency["pkg"])
                pending.append(dependency["pkg"])
    return sorted(
        (
            Component(
                "cargo",
                packages[key]["name"],
                packages[key]["version"],
                packages[key]["license"] or "",
                sums[packages[key]["name"], packages[key]["version"]],
            )
            for key in seen
        ),
        key=lambda item: item.purl,
    )


def sources() -> set[str]:
    """Where the crates of Cargo.lock come from; ours have none."""
    locked = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    return {item["source"] for item in locked if "source" in item}


def deny() -> dict[str, Any]:
    return tomllib.loads((ROOT / "deny.toml").read_text())


def installed() -> dict[str, Distribution]:
    """Packages of this environment by canonical name."""
    return {canonicalize_name(item.metadata["Name"]): item for item in distributions()}


def pins() -> dict[str, str]:
    """Versions of scripts/pins.txt by canonical name."""
    lines = (ROOT / "scripts/pins.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def requirements(extras: Iterable[str] | None) -> Iterator[Requirement]:
    """Requirements of the package and of some extras (None: all), without its own extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["optional-dependencies"]
    lines = list(project["dependencies"])
    for extra in groups if extras is None else extras:
        lines += groups[extra]
    wanted = (Requirement(line) for line in lines)
    return (requirement for requirement in wanted if requirement.name != project["name"])


def shipped_packages(have: dict[str, Distribution]) -> list[Component]:
    """Python packages that `pip install m3stack[worker,hub,cuda]` brings, as far as installed."""
    pending = list(requirements(SHIPPED_EXTRAS))
    seen: dict[str, Component] = {}
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        found = have.get(name)
        if name in seen or found is None:
            continue
        seen[name] = Component("pypi", name, found.version, licence_of(found))
        extras = requirement.extras or {""}
        for text in found.requires or []:
            inner = Requirement(text)
            marker = inner.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                pending.append(inner)
    return sorted(seen.values(), key=lambda item: item.purl)


def licence_of(package: Distribution) -> str:
    """An SPDX expression, or an empty string where nothing is said."""
    metadata = package.metadata
    if metadata.get("License-Expression"):
        return metadata["License-Expression"]
    spoken = [
        line.rpartition("::")[2]
        for line in metadata.get_all("Classifier") or []
        if line.startswith("License")
    ]
    spoken.append((metadata.get("License") or "")[:80])
    for text in spoken:
        for pattern, licence in SPOKEN:
            if re.search(pattern, text, re.IGNORECASE):
                return licence
    return UNSPOKEN.get(canonicalize_name(metadata["Name"]), "")


def findings() -> list[str]:
    """Everything that is not as it should be, one line each."""
    allowed = set(deny()["licenses"]["allow"])
    banned = {entry["crate"] for entry in deny()["bans"]["deny"]}
    ours = {"gateway-media", "gateway-core", "gateway-server", "gateway-python"}
    told = [f"crates come from {source}" for source in sources() - {REGISTRY}]
    for crate in crates():
        if not allows(crate.licence or "none", allowed):
            told.append(f"{crate.purl}: its licence {crate.licence!r} is not in deny.toml")
        if crate.name in banned:
            told.append(f"{crate.purl} is banned by deny.toml")
        if crate.name not in ours and not crate.sha256:
            told.append(f"{crate.purl} has no checksum in Cargo.lock")
    have, pinned = installed(), pins()
    for package in shipped_packages(have):
        if not allows(package.licence or "none", allowed | PYTHON_LICENCES):
            told.append(f"{package.purl}: its licence {package.licence!r} is not allowed")
    for requirement in requirements(None):
        name = canonicalize_name(requirement.name)
        version = pinned.get(name)
        if version is None and name in have:
            told.append(f"{requirement.name} is not pinned in scripts/pins.txt")
        elif version is not None and version not in requirement.specifier:
            told.append(f"scripts/pins.txt has {name} {version}, pyproject.toml {requirement}")
    for name, package in have.items():
        if name not in BOOTSTRAP and name not in pinned:
            told.append(f"{name} {package.version} is installed and not pinned")
    return told


def bill() -> dict[str, Any]:
    """A CycloneDX 1.6 document of what is shipped; the same inputs give the same document."""
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    components = [*crates(), *shipped_packages(installed())]
    digest = hashlib.sha256("\n".join(item.purl for item in components).encode()).hexdigest()
    serial = f"{digest[:8]}-{digest[8:12]}-4{digest[13:16]}-a{digest[17:20]}-{digest[20:32]}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": "m3stack",
                "name": "m3stack",
                "version": version,
                "licenses": [{"expression": "Apache-2.0"}],
            }
        },
        "components": [_component(item) for item in components if item.name not in SHIPPED_CRATES],
    }


def _component(item: Component) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "type": "library",
        "bom-ref": item.purl,
        "name": item.name,
        "version": item.version,
        "purl": item.purl,
    }
    if item.licence:
        entry["licenses"] = [{"expression": item.licence.replace(" / ", "/").replace("/", " OR ")}]
    if item.sha256:
        entry["hashes"] = [{"alg": "SHA-256", "content": item.sha256}]
    return entry


def main() -> int:
    match sys.argv[1:]:
        case ["check"]:
            told = findings()
            for line in told:
                print(line)
            return 1 if told else 0
        case ["sbom", target]:
            Path(target).write_text(json.dumps(bill(), indent=1) + "\n")
            return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
