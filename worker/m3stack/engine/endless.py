"""Whether a JSON schema allows a value that ends: some require themselves for ever.

Conservative: what is not understood here is taken to have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

MAX_ROUNDS = 200
"""A chain of references longer than that is not followed to its end."""
MAX_VISITS = 50_000
"""Nodes looked at in all; a schema that takes more is let through."""

Schema = Mapping[str, Any]


def is_endless(schema: object) -> bool:
    """Whether every value that a schema allows would hold another one of itself."""
    try:
        targets = _targets(schema)
        if not targets:
            # what has no references can be impossible, but not endless
            return False
        search = _Search(targets)
        for _ in range(MAX_ROUNDS):
            found = {
                name
                for name, target in targets.items()
                if name not in search.ending and search.ends(target)
            }
            if "#" in found or not found:
                return "#" not in found
            search.ending |= found
    except (RecursionError, _TooLargeError):
        pass
    return False


class _TooLargeError(Exception):
    pass


def _targets(root: object) -> dict[str, object]:
    """What references point to within the document, and itself as `#`; empty without any."""
    found: dict[str, object] = {}
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
    return {**found, "#": root} if found else {}


def _resolve(root: object, name: str) -> tuple[bool, object]:
    """Source: RFC 6901, in the fragment form of section 6, without percent encoding."""
    if name == "#":
        return True, root
    if not name.startswith("#/"):
        return False, None
    node = root
    for part in name[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, dict) or key not in node:
            return False, None
        node = cast(dict[str, object], node)[key]
    return True, node


class _Search:
    """Looks for values that end.

    Args:
        targets: what references point to, by name.

    Attributes:
        ending: references known to have a value that ends.
    """

    def __init__(self, targets: Mapping[str, object]) -> None:
        self._targets = targets
        self._num_visits = 0
        self.ending: set[str] = set()

    def ends(self, node: object) -> bool:
        """Whether a schema allows such a value; raises _TooLargeError after many visits."""
        self._num_visits += 1
        if self._num_visits > MAX_VISITS:
            raise _TooLargeError
        if not isinstance(node, dict):
            return node is not False
        schema = cast(Schema, node)
        name = schema.get("$ref")
        if isinstance(name, str) and name in self._targets and name not in self.ending:
            return False
        if "const" in schema or schema.get("enum"):
            return True
        if not all(self.ends(part) for part in _list(schema, "allOf")):
            return False
        for key in ("anyOf", "oneOf"):
            parts = _list(schema, key)
            if parts and not any(self.ends(part) for part in parts):
                return False
        kinds = schema.get("type")
        if isinstance(kinds, str):
            return self._kind_ends(kinds, schema)
        if isinstance(kinds, list) and kinds:
            return any(self._kind_ends(str(kind), schema) for kind in cast(list[object], kinds))
        return True

    def _kind_ends(self, kind: str, schema: Schema) -> bool:
        if kind == "object":
            properties = schema.get("properties")
            known = cast(Schema, properties) if isinstance(properties, dict) else {}
            names = [name for name in _list(schema, "required") if isinstance(name, str)]
            return all(self.ends(known[name]) for name in names if name in known)
        if kind == "array":
            least = schema.get("minItems", 0)
            items = schema.get("items", True)
            first = _list(schema, "prefixItems") or (items if isinstance(items, list) else [])
            if not isinstance(least, int) or least < 1:
                return True
            needed = [*first[:least]]
            if least > len(first) and not isinstance(items, list):
                needed.append(items)
            return all(self.ends(one) for one in needed)
        return True


def _list(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return cast(list[Any], value) if isinstance(value, list) else []
