"""Nodes on one machine: each has a network stack, a host name and processes of its own, and one wire to a switch.

A node is a network namespace with one interface, `eth0`. The other end of its wire is a port of a bridge in one more
namespace, the switch. Nothing touches the machine's own network. `tc` limits the rate of a wire, `wire.py` makes it
late or lossy, and the kernel counts what passes.

What runs on a node dies with this process, whatever happens to it: the kernel sends SIGKILL to the first process of
each node, and with it go all others of its PID namespace. Names of network namespaces remain after a SIGKILL. They hold
the process that made them, and the next `Nodes` removes those whose maker is gone.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import psutil

SWITCH = "switch"
_PREFIX = "zero"
_NETWORK = "10.77.0"
_BURST_S = 0.004
_LEAST_BURST_BYTES = 64 * 1024
"""The least size of a bucket: one packet of TCP's largest size. Others hold 4 ms of a wire, for the kernel's timer."""


@dataclass(frozen=True)
class Wire:
    """The limits of a node's wire.

    Attributes:
        rate: the most that it carries in each direction, in `tc`'s words, such as "200mbit"; "" for no limit.
        delay_s: how much longer a packet takes to leave the node.
        loss: the share of packets that leave it and never arrive, 0 to 1.
    """

    rate: str = ""
    delay_s: float = 0.0
    loss: float = 0.0


class Traffic(NamedTuple):
    """The counters of a node's interface so far. The kernel counts a long TCP packet once, with one header."""

    sent_bytes: int
    received_bytes: int
    resent_segments: int


def why_not() -> str:
    """Return the reason why this process cannot make nodes; "" if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc", "mount", "unshare", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed: apt-get install iproute2 util-linux"
    refused = subprocess.run(["unshare", "--net", "--uts", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"the system refuses namespaces: {refused.stderr.strip()}" if refused.returncode else ""


class Nodes(AbstractContextManager["Nodes"]):
    """Nodes 0 to n - 1 and the switch between them, until the block ends.

    Args:
        wires: one for each node.
        unshared: folders of which each node has its own, as a node's own disk: `FOLDER-node0` and so on, beside it.

    Raises:
        subprocess.CalledProcessError: the system refuses a command; what it said is on stderr.
    """

    def __init__(self, wires: Sequence[Wire], unshared: Sequence[Path] = ()) -> None:
        remove_left_behind()
        self.wires, self._unshared = tuple(wires), [folder.absolute() for folder in unshared]
        maker = psutil.Process()
        self._name = f"{_PREFIX}-{maker.pid}-{int(maker.create_time())}-{id(self):x}"
        self._first: dict[str, list[subprocess.Popen[Any]]] = {}
        with ExitStack() as undo:
            undo.callback(self.close)
            self._make_switch()
            for number, wire in enumerate(self.wires):
                self._make_node(number, wire)
            undo.pop_all()

    def address(self, node: int | str) -> str:
        """Return the IPv4 address of a node, or of the switch."""
        return f"{_NETWORK}.{254 if node == SWITCH else int(node) + 1}"

    def start(
        self, node: int | str, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> "subprocess.Popen[Any]":
        """Start a program on a node, where it is process 1 of a PID namespace: everything that it starts dies with it.

        Args:
            node: its number, or SWITCH.
            env: variables beside this process's own.
            options: of `subprocess.Popen`.
        """
        host = node if node == SWITCH else f"node{node}"
        inside = ["unshare", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child"]
        first = [f"hostname {host}", *(self._mount(folder, host) for folder in self._unshared), 'exec "$@"']
        named = ["sh", "-c", " && ".join(first), "sh", *command]
        dying = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self._netns(node)]
        started = subprocess.Popen(
            [*dying, *inside, *named],
            env={**os.environ, **(env or {})},
            start_new_session=True,  # Ctrl-C is ours to pass on
            **options,
        )
        self._first.setdefault(str(node), []).append(started)
        return started

    def _mount(self, folder: Path, host: str) -> str:
        """Return the command that mounts a node's folder: `ip netns exec` gives each program its own mount table."""
        private = folder.with_name(f"{folder.name}-{host}")
        for path in (folder, private):
            path.mkdir(parents=True, exist_ok=True)
        return shlex.join(["mount", "--bind", str(private), str(folder)])

    def kill(self, node: int | str) -> None:
        """Send SIGKILL to all processes that `start` has started on a node, at once, as if its power failed."""
        for started in self._first.pop(str(node), []):
            with started:  # which waits, and closes its pipes
                started.kill()

    def cut(self, node: int) -> None:
        """Take a node's wire out of the switch: packets are lost, and neither end gets an error."""
        _ip("-n", self._netns(SWITCH), "link", "set", _port(node), "nomaster")

    def mend(self, node: int) -> None:
        """Put a node's wire back into the switch."""
        _ip("-n", self._netns(SWITCH), "link", "set", _port(node), "master", "br0")

    def traffic(self, node: int) -> Traffic:
        """Return the counters of a node since it was made."""
        (link,) = json.loads(_ip("-n", self._netns(node), "-s", "-j", "link", "show", "eth0"))
        stats = link["stats64"]
        snmp = _run(["ip", "netns", "exec", self._netns(node), "cat", "/proc/net/snmp"])
        names, values = (line.split() for line in snmp.splitlines() if line.startswith("Tcp:"))
        resent = int(dict(zip(names, values, strict=True))["RetransSegs"])
        return Traffic(stats["tx"]["bytes"], stats["rx"]["bytes"], resent)

    def close(self) -> None:
        """Kill all processes on the nodes, and remove the nodes."""
        for node in list(self._first):
            self.kill(node)
        _remove([name for name in _namespaces() if name.startswith(self._name)])

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def _netns(self, node: int | str) -> str:
        return f"{self._name}-{node}"

    def _make_switch(self) -> None:
        switch = self._netns(SWITCH)
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "addr", "add", f"{self.address(SWITCH)}/24", "dev", "br0")
        _ip("-n", switch, "link", "set", "br0", "up")

    def _make_node(self, number: int, wire: Wire) -> None:
        node, switch, port = self._netns(number), self._netns(SWITCH), _port(number)
        _ip("netns", "add", node)
        _ip("-n", node, "link", "set", "lo", "up")
        if wire.delay_s or wire.loss:
            self._carry(number, wire)
        else:
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", node)
        _ip("-n", node, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        for namespace, end in ((node, "eth0"), (switch, port)):
            _ip("-n", namespace, "link", "set", end, "up")
            if wire.rate:
                _limit(namespace, end, wire.rate)
        self.mend(number)

    def _carry(self, number: int, wire: Wire) -> None:
        """Make a wire of TAP devices. Its node end is made in the switch and then moved."""
        port, end = _port(number), f"end{number}"
        program = [sys.executable, str(Path(__file__).with_name("wire.py"))]
        arguments = [end, port, str(wire.delay_s), str(wire.loss)]
        carrier = self.start(SWITCH, [*program, *arguments], stdout=subprocess.PIPE)
        assert carrier.stdout is not None
        if carrier.stdout.readline() != b"ready\n":
            raise OSError("wire.py has made no TAP device: is there a /dev/net/tun?")
        _ip("-n", self._netns(SWITCH), "link", "set", end, "netns", self._netns(number), "name", "eth0")


def remove_left_behind() -> list[str]:
    """Remove the nodes of processes that are gone; return the names of their namespaces."""
    left = [name for name in _namespaces() if name.startswith(f"{_PREFIX}-") and not _maker_lives(name)]
    _remove(left)
    return left


def _maker_lives(name: str) -> bool:
    _, pid, created, *_ = name.split("-")
    try:
        return int(psutil.Process(int(pid)).create_time()) == int(created)
    except psutil.NoSuchProcess:
        return False


def _remove(names: Sequence[str]) -> None:
    for name in names:
        for pid in _ip("netns", "pids", name).split():
            try:
                psutil.Process(int(pid)).kill()
            except psutil.NoSuchProcess:  # it has just ended
                continue
        _ip("netns", "delete", name)


def _namespaces() -> list[str]:
    """Return the names of all network namespaces of this machine."""
    return [entry["name"] for entry in json.loads(_ip("-j", "netns", "list") or "[]")]


def _port(node: int) -> str:
    return f"port{node}"


def _limit(namespace: str, interface: str, rate: str) -> None:
    burst_bytes = max(_LEAST_BURST_BYTES, int(_BURST_S * bits_of(rate) / 8))
    tbf = ["tbf", "rate", rate, "burst", str(burst_bytes), "latency", "50ms"]
    _run(["tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *tbf])


def bits_of(rate: str) -> float:
    """Return a rate in `tc`'s words as bits per second.

    Raises:
        ValueError: `rate` has no unit of `tc`.
    """
    units = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
    unit = rate.lstrip("0123456789.")
    if unit not in units:
        raise ValueError(f"{rate} is no rate; write it as 200mbit, 10gbit or 500kbit")
    return float(rate.removesuffix(unit)) * units[unit]


def _ip(*arguments: str) -> str:
    return _run(["ip", *arguments])


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
