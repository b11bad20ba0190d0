"""The other node: how its watch is asked, and when its loss ends this node's engine."""

from __future__ import annotations

import errno
import http.client
import json
from dataclasses import dataclass

from glm_vllm_overlay.node.fabric import Fabric
from glm_vllm_overlay.node.state import PORT

POLL = 2.0
# How long the peer's engine may be down or another one, before this side goes back to the gate too.
DOWN_GRACE = 10.0
# No answer is weaker evidence than a "stopped": a busy machine or a restarting watch gives none for a while.
SILENCE_GRACE = 30.0


class Silent(Exception):
    """The peer gave no usable answer on any rail; says why."""


def ask_peer(fabric: Fabric, timeout: float = 5.0) -> dict:
    """The peer's document, over the first rail that answers within `timeout` seconds; raises Silent."""
    reasons = []
    for rail in fabric.rails:
        connection = http.client.HTTPConnection(rail.peer, PORT, timeout, source_address=(rail.address, 0))
        try:
            connection.request("GET", "/v1/state")
            response = connection.getresponse()
            body = response.read()
            if response.status == 200:
                document = json.loads(body)
                if document.get("schema") == 1:
                    return document
                reasons.append(f"{rail.peer} speaks another schema")
            else:
                reasons.append(f"{rail.peer} says {response.status} {body.decode(errors='replace').strip()}")
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
                reasons.append(f"this node lacks {rail.address}")
            else:
                reasons.append(f"{rail.peer} port {PORT}: {getattr(error, 'strerror', None) or error}")
        finally:
            connection.close()
    raise Silent("; ".join(reasons))


@dataclass
class Bond:
    """This start's tie to one start of the peer (`session_id`); says when the tie is broken for good."""

    fabric: Fabric
    session_id: str
    broken_since: float | None = None
    silent_since: float | None = None
    phase: str = ""

    def check(self, clock: float) -> str:
        """Ask once, at `clock` (monotonic seconds); returns "" or the one sentence that ends this engine."""
        name = self.fabric.peer
        try:
            document = ask_peer(self.fabric)
        except Silent:
            self.phase = ""
            self.silent_since = clock if self.silent_since is None else self.silent_since
            if clock - self.silent_since < SILENCE_GRACE:
                return ""
            return f"{name} has not answered on the fabric for {SILENCE_GRACE:.0f} s: back to the gate to wait for it"
        self.silent_since = None
        self.phase, unit = document["phase"], document["unit"]["name"]
        if self.phase in ("stopped", "failed"):
            how = "has failed" if self.phase == "failed" else "is stopped"
            broken = f"{unit} on {name} {how}: back to the gate to wait for it"
        elif document["session"]["id"] != self.session_id:
            broken = f"{unit} on {name} was started anew: back to the gate to start together with it"
        else:
            self.broken_since = None
            return ""
        self.broken_since = clock if self.broken_since is None else self.broken_since
        return broken if clock - self.broken_since >= DOWN_GRACE else ""
