"""The part of W&B's server that its commands `wandb sweep` and `wandb agent` talk to, on this machine."""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROJECT = {"id": "p", "name": "functional-zero", "entity": {"id": "e", "name": "us"}}


class Sweeps:
    """One sweep, whose values are chosen beforehand.

    Args:
        chosen: the values of each run, by parameter.

    Attributes:
        config: the sweep's, in YAML, as `wandb sweep` has sent it.
    """

    def __init__(self, chosen: Sequence[Mapping[str, Any]]) -> None:
        self.config = ""
        self._left = [
            {
                "type": "run",
                "run_id": f"run{number}",
                "program": "train.py",
                "args": {k: {"value": v} for k, v in values.items()},
            }
            for number, values in enumerate(chosen)
        ]

    def answer(self, operation: str, given: Mapping[str, Any]) -> dict[str, Any]:
        match operation:
            case "Viewer":
                return {"viewer": {"id": "u", "entity": "us", "username": "us", "flags": "{}", "teams": {"edges": []}}}
            case "UpsertSweep":
                self.config = given["config"]
                return {
                    "upsertSweep": {"sweep": {"name": "sweep1", "project": PROJECT}, "configValidationWarnings": []}
                }
            case "SweepWithRuns":
                return {
                    "project": {"sweep": {"id": "s", "name": "sweep1", "config": self.config, "runs": {"edges": []}}}
                }
            case "CreateAgent":
                return {"createAgent": {"agent": {"id": "agent1"}}}
            case "Heartbeat":
                return {"agentHeartbeat": {"agent": {"id": "agent1"}, "commands": json.dumps(self._next(given))}}
        return {}

    def _next(self, given: Mapping[str, Any]) -> list[Any]:
        """One run at a time; when there are none left, the agent is to exit."""
        if json.loads(given["runState"]):
            return []
        return [self._left.pop(0) if self._left else {"type": "exit"}]


@contextmanager
def serving(answer: Callable[[str, Mapping[str, Any]], dict[str, Any]]) -> Iterator[str]:
    """Yields the address at which operations of GraphQL are answered, and anything else with an empty object."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            asked = json.loads(body) if self.path == "/graphql" else {}
            named = re.search(r"(?:query|mutation)\s+(\w+)", asked.get("query", ""))
            data = {"data": answer(named[1], asked.get("variables") or {})} if named else {}
            said = json.dumps(data).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: Any) -> None:
            """Nothing: the standard library's own goes to the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
