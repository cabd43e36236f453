"""Whether a JSON schema allows a value that ends: some require themselves for ever.

Conservative: what is not understood here is taken to have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

MAX_ROUNDS = 200
"""A chain of references longer than that is not followed to its end."""

Schema = Mapping[str, Any]


def is_endless(schema: object) -> bool:
    """Whether every value that a schema allows would hold another one of itself."""
    try:
        targets = _targets(schema)
        ending: set[str] = set()
        for _ in range(MAX_ROUNDS):
            found = {
                name
                for name, target in targets.items()
                if name not in ending and _ends(target, ending, targets)
            }
            if "#" in found or not found:
                return "#" not in found
            ending |= found
    except RecursionError:
        pass
    return False


def _targets(root: object) -> dict[str, object]:
    """What references point to within the document, and the document itself as `#`."""
    found: dict[str, object] = {"#": root}
    open_nodes = [root]
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, dict):
            fields = cast(dict[str, object], node)
            name = fields.get("$ref")
            if isinstance(name, str) and name not in found:
                is_there, target = _resolve(root, name)
                if is_there:
                    found[name] = target
            open_nodes.extend(fields.values())
        elif isinstance(node, list):
            open_nodes.extend(cast(list[object], node))
    return found


def _resolve(root: object, name: str) -> tuple[bool, object]:
    """Source: RFC 6901, in the fragment form of section 6, without percent encoding."""
    if not name.startswith("#/"):
        return False, None
    node = root
    for part in name[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, dict) or key not in node:
            return False, None
        node = cast(dict[str, object], node)[key]
    return True, node


def _ends(node: object, ending: set[str], targets: Mapping[str, object]) -> bool:
    """Whether a schema allows a value that ends, given the references known to have one."""
    if not isinstance(node, dict):
        return node is not False
    schema = cast(Schema, node)
    name = schema.get("$ref")
    if isinstance(name, str) and name in targets and name not in ending:
        return False
    if "const" in schema or schema.get("enum"):
        return True
    if not all(_ends(part, ending, targets) for part in _list(schema, "allOf")):
        return False
    for key in ("anyOf", "oneOf"):
        parts = _list(schema, key)
        if parts and not any(_ends(part, ending, targets) for part in parts):
            return False
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return _kind_ends(kinds, schema, ending, targets)
    if isinstance(kinds, list) and kinds:
        names = cast(list[object], kinds)
        return any(_kind_ends(str(kind), schema, ending, targets) for kind in names)
    return True


def _kind_ends(kind: str, schema: Schema, ending: set[str], targets: Mapping[str, object]) -> bool:
    if kind == "object":
        properties = schema.get("properties")
        known = cast(Schema, properties) if isinstance(properties, dict) else {}
        needed = [known[name] for name in _list(schema, "required") if name in known]
        return all(_ends(one, ending, targets) for one in needed)
    if kind == "array":
        least = schema.get("minItems", 0)
        items = schema.get("items", True)
        first = _list(schema, "prefixItems") or (items if isinstance(items, list) else [])
        if not isinstance(least, int) or not least:
            return True
        needed = [*first[:least]]
        if least > len(first) and not isinstance(items, list):
            needed.append(items)
        return all(_ends(one, ending, targets) for one in needed)
    return True


def _list(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return cast(list[Any], value) if isinstance(value, list) else []
