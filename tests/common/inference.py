"""An inference engine that receives weights in a process of its own: the weight update calls of SGLang and of vLLM.

Each call is a message over a socket, and the weights are broadcast by gloo from rank 0 of the group, one after another.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Client, Listener
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LIMIT = timedelta(seconds=60)


class Group:
    """A process group of a trainer, which is its rank 0, and engines, beside the trainer's own group."""

    def __init__(self, host: str, port: int, rank: int, size: int) -> None:
        self.store = dist.TCPStore(host, port, is_master=rank == 0, timeout=LIMIT, wait_for_workers=False)
        self._arguments = rank, size

    def connect(self) -> None:
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("weights", self.store), *self._arguments, LIMIT)

    def broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()


class Engine:
    """The engine's side. Updates of vLLM must come between `start_weight_update` and `finish_weight_update`.

    Attributes:
        weights: the model.
        calls: the names of all calls.
        seen: a copy of the model at each call of `generate`.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.calls: list[str] = []
        self.seen: list[dict[str, Tensor]] = []
        self._group: Group | None = None
        self._updating = False

    def _join(self, host: str, port: int, rank: int, size: int) -> None:
        self._group = Group(host, port, rank, size)
        self._group.connect()

    def _receive(self, shape: list[int], dtype: str) -> Tensor:
        assert self._group is not None
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        self._group.broadcast(tensor)
        return tensor

    # -- SGLang --

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        assert (group_name, backend) == ("weights", "gloo")
        self._join(master_address, master_port, rank_offset, world_size)

    def update_weights_from_distributed(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str, flush_cache: bool = True
    ) -> None:
        assert group_name == "weights"
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            self.weights[name] = self._receive(shape, dtype)

    # -- vLLM --

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._join(*(init_info[key] for key in ("master_address", "master_port", "rank_offset", "world_size")))

    def start_weight_update(self) -> None:
        assert not self._updating
        self._updating = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive full parameters, or patches if the info has `num_updates_list`."""
        assert self._updating
        listed = [update_info[key] for key in ("names", "dtype_names", "shapes")]
        if "num_updates_list" not in update_info:
            for name, dtype, shape in zip(*listed, strict=True):
                self.weights[name] = self._receive(shape, dtype)
            return
        for name, dtype, shape, number in zip(*listed, update_info["num_updates_list"], strict=True):
            indices, values = self._receive([number], "int32"), self._receive([number], dtype)
            assert list(self.weights[name].shape) == shape
            self.weights[name].view(-1)[indices.long()] = values

    def finish_weight_update(self) -> None:
        assert self._updating
        self._updating = False

    # -- calls --

    def generate(self) -> None:
        assert not self._updating
        self.seen.append({name: tensor.clone() for name, tensor in self.weights.items()})

    @contextmanager
    def served(self) -> Iterator[Any]:
        """Context manager that serves one trainer in a thread, and yields the address; it raises errors of calls."""
        errors: list[BaseException] = []
        with Listener(("127.0.0.1", 0)) as listener:
            thread = Thread(target=self._serve, args=(listener, errors), daemon=True)
            thread.start()
            yield listener.address
            thread.join(LIMIT.total_seconds())
        if errors:
            raise errors[0]
        assert not thread.is_alive()

    def _serve(self, listener: Listener, errors: list[BaseException]) -> None:
        try:
            with listener.accept() as connection:
                while (message := connection.recv()) is not None:
                    name, arguments, keywords = message
                    self.calls.append(name)
                    getattr(self, name)(*arguments, **keywords)
                    connection.send(None)
        except BaseException as error:
            errors.append(error)


class Remote:
    """The trainer's side: any method is a call of the engine at `address`, and returns when the engine's does."""

    def __init__(self, address: Any) -> None:
        self._connection = Client(address)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> None:
            self._connection.send((name, arguments, keywords))
            assert self._connection.poll(LIMIT.total_seconds()), f"{name} has not returned"
            self._connection.recv()

        return call

    def leave(self) -> None:
        self._connection.send(None)
        self._connection.close()
