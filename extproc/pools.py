"""The pools of a process, which change as a whole when the configuration is reloaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import overload

from extproc.pool import Pool


class Pools(Sequence[Pool]):
    """Everybody holds this one object and reads it anew each time. `use` replaces its content in one step."""

    def __init__(self, pools: Iterable[Pool] = ()) -> None:
        self.use(pools)

    def use(self, pools: Iterable[Pool]) -> None:
        """The pools from now on. Model names are unique over all of them (the configuration checks it)."""
        self._pools = tuple(pools)
        self._by_model: Mapping[str, Pool] = {name: pool for pool in self._pools for name in pool.models}

    def of(self, model: str | None) -> Pool | None:
        """Who serves a model name, alias or adapter; a request without one goes to the only pool, if there is one."""
        if model is None:
            return self._pools[0] if len(self._pools) == 1 else None
        return self._by_model.get(model)

    @overload
    def __getitem__(self, index: int) -> Pool: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Pool]: ...
    def __getitem__(self, index: int | slice) -> Pool | Sequence[Pool]:
        return self._pools[index]

    def __len__(self) -> int:
        return len(self._pools)
