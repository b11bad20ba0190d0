"""What must not leave a node in a support bundle or a finding: keys, tokens, passwords and serial numbers."""

from __future__ import annotations

import re

GONE = "REDACTED"
RULES = [
    (re.compile(pattern, flags), replacement)
    for pattern, flags, replacement in (
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL, GONE),
        (r"\b(?:hf_|ghp_|gho_|github_pat_|glpat-|nvapi-|sk-)[A-Za-z0-9_-]{16,}", 0, GONE),
        # Our own API keys are 64 hex digits. SHA-256 sums look the same and go too: nothing here reads them.
        (r"\b[0-9a-fA-F]{64}\b", 0, GONE),
        (r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}", 0, rf"\1 {GONE}"),
        # The word must stand at the end of its name: max_tokens, token_ids and the like are no secrets.
        (
            r"(?i)\b([\w.-]*(?:api[_-]?key|token|passw(?:or)?d|passphrase|secret|psk|serial(?:[_ -]?(?:number|no))?))"
            r"(\\?[\"']?\s*[:=]\s*)(\\?\"[^\"\n]*\"|\\?'[^'\n]*'|[^\s,;}\]]+)",
            0,
            rf"\1\2{GONE}",
        ),
        (r"(?i)(--[\w-]*(?:api-key|token|password|secret))\s+[^\s-]\S*", 0, rf"\1 {GONE}"),
        (r"(://[^/\s:@]+:)[^/\s@]+@", 0, rf"\1{GONE}@"),
        (r"\bGPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", 0, f"GPU-{GONE}"),
    )
]


def redact(text: str) -> str:
    """The text without secrets and serial numbers; what is left in their place says REDACTED."""
    for pattern, replacement in RULES:
        text = pattern.sub(replacement, text)
    return text
