# SPDX-License-Identifier: Apache-2.0
"""Which sources of a model the operator's accepted licences allow."""

from __future__ import annotations

from typing import Any


def label(source: dict[str, Any]) -> str:
    """A source as one word: repo@revision, or the path."""
    if source.get("repo"):
        return f"{source['repo']}@{source.get('revision', '')[:8]}"
    return str(source.get("path") or source.get("url"))


def model_offered(
    sources: list[dict[str, Any]], bundle: str = "", weights: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Sources that can be asked: with a bundle its `weights` {name, revision, licence}, and what is not on the hub."""
    if not bundle:
        return sources
    own = [{**weights, "path": f"{bundle}/weights/{weights['name']}/{weights['revision']}"}] if weights else []
    return own + [s for s in sources if not s.get("repo")]


def model_licensed(sources: list[dict[str, Any]], accepted: list[str]) -> list[dict[str, Any]]:
    """The sources that may be used: their licence is accepted, or is "none"."""
    return [s for s in sources if s["licence"] == "none" or s["licence"] in accepted]


def model_refused(sources: list[dict[str, Any]], accepted: list[str]) -> list[str]:
    """Licence and source, as "licence (source)", of every source that may not be used."""
    allowed = model_licensed(sources, accepted)
    return model_used([s for s in sources if s not in allowed])


def model_used(sources: list[dict[str, Any]]) -> list[str]:
    """Licence and source, as "licence (source)", of every source."""
    return [f"{s['licence']} ({label(s)})" for s in sources]


def model_entry(chosen: dict[str, Any] | None) -> dict[str, str] | None:
    """{name, revision, path} of what model_source chose; None for nothing."""
    if not chosen:
        return None
    return {"name": chosen["source"]["name"], "revision": chosen["source"]["revision"], "path": chosen["path"]}


class FilterModule:
    """Filters of model-fetch."""

    def filters(self) -> dict[str, Any]:
        return {
            "model_offered": model_offered,
            "model_licensed": model_licensed,
            "model_refused": model_refused,
            "model_used": model_used,
            "model_entry": model_entry,
        }
